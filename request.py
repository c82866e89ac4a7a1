"""A request to train: command line, checkpoint and hardware, put together and checked.

A value comes from the default in settings.py, then from the preset of a new run or the checkpoint of a resumed one,
then from the command line. All faults are found and told together, before any data is loaded.
"""

import json
import os
import shutil
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from amp.formats import FORMATS
from base.cache import cache_folder
from base.errors import BadInput
from base.flags import name_of, out_of_bounds, read_flags, type_of
from data.corpus import NAMES
from model import backends
from model.backends import Hardware
from run import checkpoint
from run.folder import find_intact, holds_run, intact_after
from settings import PRESETS, Settings, flags_with, saved_flags

BPE_VOCAB_SIZE = 4096
# benchmark.py precision writes these files. The user's own measurement is preferred to the committed one.
ADOPTED = (
    cache_folder() / "benchmarks" / "config.json",
    Path(__file__).parent / "benchmarks" / "results" / "config.json",
)


class Request(NamedTuple):
    """A checked command line."""

    settings: Settings  # nothing in it is "auto" any more
    asked: dict[str, Any]  # the values before derivation, for the checkpoint: a resumed run derives them anew
    hardware: Hardware
    resume_from: Path | None  # a step folder
    notes: tuple[str, ...] = ()  # for the header


class Saved(NamedTuple):
    """The settings of a checkpoint."""

    known: dict[str, Any]
    unknown: dict[str, Any]  # a later version has added them; later checkpoints of the run keep them
    notes: list[str]


def read(argv: list[str] | None) -> Request:
    """Reads and checks a command line. BadInput lists all faults, one a line."""
    flags, faults = read_flags(Settings, argv, "train.py", "Trains a GPT in mixed precision.")
    resume_from, saved, notes = None, Saved({}, {}, []), []
    if "resume" in flags:
        try:
            resume_from, damaged = find_intact(flags["resume"], flags.get("out"))
            notes = [_going_on(line, resume_from) for line in damaged]
            saved = read_saved(resume_from, flags)
        except BadInput as error:
            faults += [f"--resume {line}" for line in str(error).splitlines()]
        faults += _refused_on_resume(flags, saved.known, resume_from)
    asked = asked_for(flags, saved.known)
    hardware, refused = None, {}
    try:
        asked["dtype"], adopted = adopt(asked.get("dtype", "auto"))
        name = asked.get("backend", Settings.backend)
        refused = backends.refused(name, flags)
        where = (flags.get("device", "auto"), asked["dtype"], asked.get("emulation", "auto"))
        hardware = backends.module(name).hardware(*where)
        hardware = hardware._replace(how=hardware.how + adopted)
    except BadInput as error:
        faults.append(str(error))
    if asked.get("preset", "auto") == "auto":
        preset = "gpu" if hardware and hardware.device.startswith("cuda") else "cpu"
        asked = {**PRESETS[preset], **asked, "preset": preset}
    settings = Settings(**asked)
    honoured = {name: value for name, value in flags.items() if name not in refused}
    faults += [*refused.values(), *out_of_bounds(settings), *_faults(settings, honoured, hardware)]
    faults += _folder_faults(settings, flags, resume_from)
    if faults or hardware is None:
        raise BadInput("\n".join(faults))
    if settings.corpus not in NAMES:
        settings = replace(settings, corpus=os.path.abspath(settings.corpus))  # a resumed run may start elsewhere
    if settings.tokenizer == "bpe" and settings.vocab_size is None:
        settings = replace(settings, vocab_size=BPE_VOCAB_SIZE)
    values = asdict(replace(settings, dtype=hardware.dtype))
    asked = {name: values[name] for name in saved_flags()} | saved.unknown
    return Request(derived(settings, hardware), asked, hardware, resume_from, (*notes, *saved.notes))


def asked_for(flags: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The values before derivation. A resumed run has them from its checkpoint, and none from a preset."""
    return {**saved, **flags} if saved else {**PRESETS.get(flags.get("preset", ""), {}), **flags}


def derived(settings: Settings, hardware: Hardware) -> Settings:
    """Settings with this hardware's device and dtype, and with loss_scaling and save_every resolved."""
    scaling = "off" if hardware.dtype == "fp32" else "on"
    return replace(
        settings,
        device=hardware.device,
        dtype=hardware.dtype,
        loss_scaling=scaling if settings.loss_scaling == "auto" else settings.loss_scaling,
        save_every=settings.eval_every if settings.save_every is None else settings.save_every,
    )


# ---- a checkpoint's settings


def read_saved(folder: Path, flags: dict[str, Any]) -> Saved:
    """The settings in a checkpoint. A field that an older checkpoint lacks has its default, and a note names it.

    BadInput where values are damaged, or are choices that this version does not have and that no flag replaces.
    """
    path = folder / "manifest.json"
    saved = checkpoint.read_manifest(folder)["settings"]
    known, missing, faults = {}, [], []
    for f in fields(Settings):
        if f.name not in saved_flags():
            continue
        value = saved.get(f.name, f.default)
        known[f.name] = float(value) if _is_whole_for_float(value, f) else value
        if f.name not in saved:
            missing.append(f"{name_of(f)} {value}")
        elif not _has_type(known[f.name], f):
            faults.append(f"{path}: damaged, {f.name} is {value!r}: use another checkpoint")
        elif f.name not in flags and not _is_known_choice(value, f):
            choices = ", ".join(f.metadata["choices"])
            remedy = "" if f.metadata["on_resume"] == "fixed" else f": choose one with {name_of(f)}"
            faults.append(f"{path}: {f.name} is {value!r}, and this version knows {choices}{remedy}")
    if faults:
        raise BadInput("\n".join(faults))
    unknown = {name: value for name, value in saved.items() if name not in known}
    notes = []
    if missing:
        notes.append(f"{path}: older than these flags, so their defaults count: {', '.join(missing)}")
    if unknown:
        notes.append(f"{path}: this version does not know these settings, and keeps them: {', '.join(unknown)}")
    return Saved(known, unknown, notes)


def _has_type(value: Any, f: Field) -> bool:
    """Whether a value from JSON has the type of a field. True is no number."""
    return f.default is None if value is None else type(value) is type_of(f)


def _is_whole_for_float(value: Any, f: Field) -> bool:
    """Whether a value is a whole number that stands for a float, as JSON of other programs may have it."""
    return type_of(f) is float and type(value) is int and abs(value) < 2**63


def _is_known_choice(value: Any, f: Field) -> bool:
    """Whether this version has a choice. A flag about a run's beginning is not used any more: any value passes."""
    choices = f.metadata["choices"]
    return not choices or value in choices or f.metadata["on_resume"] == "refused"


def _going_on(line: str, resume_from: Path) -> str:
    return f"{line.removesuffix(': use another checkpoint')}: going on from {resume_from.name}"


def _refused_on_resume(flags: dict[str, Any], saved: dict[str, Any], resume_from: Path | None) -> list[str]:
    """A line for each flag that a resumed run cannot have, or not with another value."""
    lines = [f"{name_of(n)}: a resumed run has it from its checkpoint" for n in flags_with("refused") if n in flags]
    for name in flags_with("fixed"):
        if name in flags and name in saved and flags[name] != saved[name]:
            lines.append(f"{name_of(name)} {flags[name]}: the checkpoint in {resume_from} has {saved[name]}")
    return lines


# ---- hardware


def adopt(dtype: str) -> tuple[str, str]:
    """Returns a precision and words for the header. "adopted" becomes the one that benchmark.py precision chose."""
    if dtype != "adopted":
        return dtype, ""
    path = next((path for path in ADOPTED if path.exists()), ADOPTED[0])
    try:
        dtype = json.loads(path.read_text(encoding="utf-8"))["precision"]
        if dtype not in FORMATS:
            raise ValueError(dtype)
    except OSError as error:
        fault = f"{path} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError):
        fault = f"{path} names no precision"
    else:
        return dtype, f" (adopted by measurement: {path})"
    raise BadInput(f"--dtype adopted: {fault}: run benchmark.py precision first")


# ---- faults of several flags together


def _faults(s: Settings, flags: dict[str, Any], hardware: Hardware | None) -> list[str]:
    """A line for each combination that cannot work, and for each flag that would silently do nothing."""
    faults: list[str] = []

    def require(holds: bool, line: str) -> None:
        if not holds:
            faults.append(line)

    if s.n_head > 0 and s.n_embd > 0:
        require(s.n_embd % s.n_head == 0, f"--n-embd {s.n_embd}: not divisible by --n-head {s.n_head}")
    if s.min_lr is not None and s.min_lr >= 0:
        require(s.min_lr <= s.lr, f"--min-lr {s.min_lr}: must be at most --lr {s.lr}")
    require("recompute" not in flags or s.n_layer != 1, "--recompute: the only layer is always kept: use more layers")
    if s.tokenizer != "bpe":
        require("vocab_size" not in flags, f"--vocab-size: only --tokenizer bpe learns one, not {s.tokenizer}")
    if hardware:
        scaled = s.loss_scaling == "on" or (s.loss_scaling == "auto" and hardware.dtype != "fp32")
        for name in ("init_scale", "growth_interval"):
            off = f"{name_of(name)}: loss scaling is off in this run: add --loss-scaling on"
            require(scaled or name not in flags, off)
        if flags.get("emulation") in ("on", "off"):
            require(hardware.dtype != "fp32", f"--emulation {s.emulation}: fp32 has nothing to emulate")
        if flags.get("kernel", "auto") != "auto":
            not_bf16 = f"--kernel {s.kernel}: the kernel is for bf16, this run is {hardware.dtype}"
            require(hardware.dtype == "bf16", not_bf16)
        if "compile" in flags:
            faults += _compile_faults(hardware)
    if s.corpus not in NAMES:
        names = ", ".join(NAMES)
        if not os.path.exists(s.corpus):
            faults.append(f"--corpus {s.corpus}: no such file (names without a file: {names})")
        else:
            require(os.path.isfile(s.corpus), f"--corpus {s.corpus}: not a file: use a text file, or {names}")
            unreadable = f"--corpus {s.corpus}: not readable: change its permissions or use another file"
            require(os.access(s.corpus, os.R_OK), unreadable)
    return faults


def _compile_faults(hardware: Hardware) -> list[str]:
    if hardware.device == "mps":
        return ["--compile: not supported on mps"]
    if hardware.emulated:
        return [f"--compile: cannot be combined with emulated {hardware.dtype}: use --dtype fp32 or drop it"]
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "cl"]
    if hardware.device == "cpu" and not any(shutil.which(compiler) for compiler in compilers):
        return [f"--compile: needs a C++ compiler on the CPU: none of {', '.join(compilers)} is there"]
    return []


def _folder_faults(s: Settings, flags: dict[str, Any], resume_from: Path | None) -> list[str]:
    """A line for each reason why the run folder cannot be used as asked."""
    faults = []
    if s.overwrite and s.out is None:
        faults.append("--overwrite: needs --out: a run without it has a folder of its own")
    if s.overwrite and s.resume:
        faults.append("--overwrite: cannot be combined with --resume, which continues the run")
    if s.verify_resume:
        for name in ("out", "resume", "overwrite"):
            if name in flags:
                why = "cannot be combined with --verify-resume, which has a folder of its own"
                faults.append(f"{name_of(name)}: {why}")
    if s.out == "":
        faults.append("--out: is empty: name a folder")
    resumed_run = resume_from.parent if resume_from else None
    out = Path(s.out) if s.out else resumed_run or Path("runs")
    existing = next(path for path in (out, *out.absolute().parents) if os.path.exists(path))
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if not writable:
        kind = "not writable" if existing.is_dir() else "not a folder"
        faults.append(f"--out {out}: cannot be written, {existing} is {kind}")
    if resumed_run and out.absolute() == resumed_run.absolute():
        step = checkpoint.STEP_FOLDER.fullmatch(resume_from.name) if resume_from else None
        newer = intact_after(resumed_run, int(step[1])) if step else None
        if newer:
            faults.append(f"--resume {resume_from}: {newer.name} is newer: go on in another folder with --out")
    elif (s.out or resumed_run) and not s.overwrite and writable and holds_run(out):
        faults.append(f"--out {out}: holds a run: --resume {out} continues it, --overwrite replaces it")
    return faults
