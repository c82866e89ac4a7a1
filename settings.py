"""Every setting of train.py: its flag, default, meaning, and what is refused.

A value comes from the dataclass below, then the preset, then the checkpoint that --resume names, then the command line.
All faults are found and told together, before any data is loaded.
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import data.corpus
from amp.formats import FORMATS
from base.cache import cache_folder
from base.errors import BadInput
from base.flags import flag, name_of, read_flags
from data import tokenizers
from model import backends
from run import checkpoint

# Settings of train.py by preset; flags on the command line go before these.
PRESETS = {
    "cpu": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0,
        lr=4e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=250,
    ),
    "gpu": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=32, dropout=0.1,
        lr=1e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=250,
    ),
    "numpy": dict(
        backend="numpy", n_layer=2, n_head=4, n_embd=128, block_size=128, batch_size=8, accumulation=4, dropout=0.0,
        lr=4e-3, warmup=200, steps=2000, weight_decay=0.1, beta2=0.95, eval_every=250,
    ),
    "bpe4k": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, dropout=0.0, tokenizer="bpe",
        lr=1e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=500,
    ),
    "50m": dict(
        n_layer=12, n_head=9, n_embd=576, block_size=512, batch_size=16, dropout=0.1,
        lr=6e-4, warmup=200, steps=5000, weight_decay=0.1, beta2=0.95, eval_every=500,
    ),
    "gpt2": dict(
        n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=4, accumulation=8, dropout=0.1,
        lr=6e-4, warmup=200, steps=5000, weight_decay=0.1, beta2=0.95, eval_every=500,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Fields are flags: `batch_size` is --batch-size. None means "derived", as the help says."""

    preset: str = flag(
        "auto", "sizes and recipe; auto: gpu on CUDA, else cpu, whose values this list shows", ("auto", *PRESETS)
    )
    backend: str = flag("torch", "what computes the gradients", tuple(backends.MODULES))
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps (mps is not tested); auto: CUDA where there is one")
    dtype: str = flag(
        "auto",
        "compute precision; auto: bf16, or fp16 on CUDA cards without it; adopted: what benchmark.py precision chose",
        ("auto", "adopted", *FORMATS),
    )
    emulation: str = flag(
        "auto", "compute 16-bit products by rounding and fp32; auto: where units lack", ("auto", "on", "off")
    )
    kernel: str = flag(
        "auto",
        "what computes mlp.c_proj in bf16; auto: own where it fits; require: stop where it cannot be built",
        ("auto", "own", "library", "off", "require"),
    )
    loss_scaling: str = flag("auto", "dynamic loss scale; off: fixed at 1; auto: on below fp32", ("auto", "on", "off"))
    init_scale: float = flag(2.0**15, "first loss scale")
    growth_interval: int = flag(500, "good steps in a row that double the loss scale")
    max_skips: int = flag(100, "skipped steps in a row after which the run gives up")

    steps: int = flag(2000, "optimizer steps; the learning rate falls over all of them")
    batch_size: int = flag(12, "rows of a micro-batch")
    block_size: int = flag(64, "context length in tokens")
    accumulation: int = flag(1, "micro-batches whose gradients make one step")
    n_layer: int = flag(4, "transformer blocks")
    n_head: int = flag(4, "attention heads of a block")
    n_embd: int = flag(128, "channels of the residual stream")
    dropout: float = flag(0.0, "share of activations dropped in training")

    lr: float = flag(4e-3, "highest learning rate")
    min_lr: float | None = flag(None, "last learning rate of the cosine; default: a tenth of --lr")
    warmup: int = flag(100, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's decay of matrices and embeddings")
    beta1: float = flag(0.9, "AdamW's decay rate of the first moment")
    beta2: float = flag(0.99, "AdamW's decay rate of the second moment")
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping")
    seed: int = flag(1337, "first weights, rows and dropout")

    corpus: str = flag("tinyshakespeare", "tinyshakespeare, stdlib, or a text file")
    tokenizer: str = flag("char", "text to tokens", tuple(tokenizers.TOKENIZERS))
    vocab_size: int | None = flag(None, "tokens that --tokenizer bpe learns, 256 or more; default: 4096")

    eval_every: int = flag(250, "steps between validations; 0: only at the end")
    log_every: int = flag(10, "steps between log lines")
    save_every: int | None = flag(
        None, "steps between checkpoints besides the best and the last; default: --eval-every"
    )
    out: str | None = flag(None, "run folder; default: runs/DATE-TIME-PRESET-DTYPE")
    resume: str | None = flag(None, "auto (the newest checkpoint of --out) or a run or step folder")
    overwrite: bool = flag(False, "replace the run that --out holds, once this one has saved")
    verify_resume: bool = flag(False, "only prove that this run resumes exactly: 4 steps in a temporary folder")
    compile: bool = flag(False, "torch.compile the model")
    recompute: bool = flag(False, "compute blocks again in backward: less memory, more time, the same bits")
    deterministic: bool = flag(False, "only deterministic algorithms; slower on CUDA")


# What belongs to one process or one machine, so that a checkpoint does not keep it.
NOT_SAVED = ("device", "out", "resume", "overwrite", "verify_resume", "compile", "recompute", "deterministic")
# What a checkpoint's weights depend on: a resumed run must not change these.
FIXED = ("n_layer", "n_head", "n_embd", "block_size", "tokenizer", "vocab_size")
MAX_SCALE = 2.0**24  # bf16 gradients do not overflow: without a bound their scale would grow for nothing
BPE_VOCAB_SIZE = 4096
ADOPTED = (  # benchmark.py precision writes them: this user's own measurement goes before the committed one
    cache_folder() / "benchmarks" / "config.json",
    Path(__file__).parent / "benchmarks" / "results" / "config.json",
)
LARGEST = 2**20  # of a size; beyond it a typing error is likelier than a model


class Request(NamedTuple):
    """A checked command line."""

    settings: Settings  # nothing in it is "auto" any more
    asked: dict  # the values before derivation, for the checkpoint: a resumed run derives anew from changed flags
    hardware: backends.Hardware
    resume_from: Path | None  # a step folder
    notes: tuple[str, ...] = ()  # for the header: newer checkpoints that are damaged


def _saved_settings(folder: Path) -> dict:
    """The settings of a checkpoint. BadInput where they are not those that this version knows."""
    saved = checkpoint.read_manifest(folder)["settings"]
    for f in fields(Settings):
        value = saved.get(f.name)
        if f.name not in NOT_SAVED and not isinstance(
            value, (f.type, int) if f.type in (float, float | None) else f.type
        ):
            raise BadInput(f"{folder / 'manifest.json'}: damaged, {f.name} is {value!r}: use another checkpoint")
    return {f.name: saved[f.name] for f in fields(Settings) if f.name not in NOT_SAVED}


def adopted_dtype() -> str:
    """The precision that benchmark.py precision adopted. BadInput where that cannot be read."""
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
        return dtype
    raise BadInput(f"--dtype adopted: {fault}: run benchmark.py precision first")


def read(argv: list[str] | None) -> Request:
    """Reads and checks a command line. BadInput lists all faults, one a line."""
    flags, faults = read_flags(Settings, argv, "train.py", "Trains a GPT in mixed precision.")
    resume_from, saved, damaged = None, {}, []
    if "resume" in flags:
        try:
            resume_from, damaged = checkpoint.find_intact(flags["resume"], flags.get("out"))
            saved = _saved_settings(resume_from)
        except BadInput as error:
            faults += [f"--resume {line}" for line in str(error).splitlines()]
        faults += [
            f"{name_of(name)}: a resumed run has it from its checkpoint"
            for name in ("preset", "init_scale")
            if name in flags
        ]
    for name in FIXED:
        if saved and name in flags and flags[name] != saved[name]:
            faults.append(f"{name_of(name)} {flags[name]}: the checkpoint in {resume_from} has {saved[name]}")
    asked = {**PRESETS.get(saved.get("preset", flags.get("preset")), {}), **saved, **flags}
    hardware, refused, adopted = None, {}, asked.get("dtype") == "adopted"
    if adopted:
        try:
            asked["dtype"] = adopted_dtype()
        except BadInput as error:
            faults.append(str(error))
            asked["dtype"] = "auto"
    if (name := asked.get("backend", Settings.backend)) in backends.MODULES:
        chosen = (flags.get("device", "auto"), asked.get("dtype", "auto"), asked.get("emulation", "auto"))
        try:
            refused = backends.refused(name, flags)
            hardware = backends.module(name).hardware(*chosen)
            if adopted:
                hardware = hardware._replace(how=f"{hardware.how} (adopted by measurement: {ADOPTED[0].name})")
        except BadInput as error:
            faults.append(str(error))
    if asked.get("preset", "auto") == "auto":
        preset = "gpu" if hardware and hardware.device.startswith("cuda") else "cpu"
        asked = {**PRESETS[preset], **asked, "preset": preset}
    settings = Settings(**asked)
    honoured = {name: value for name, value in flags.items() if name not in refused}
    faults += [*refused.values(), *_faults(settings, honoured, hardware, resume_from)]
    if faults:
        raise BadInput("\n".join(faults))
    if settings.corpus not in data.corpus.NAMES:
        settings = replace(settings, corpus=os.path.abspath(settings.corpus))  # a resumed run may start elsewhere
    if settings.tokenizer == "bpe" and settings.vocab_size is None:
        settings = replace(settings, vocab_size=BPE_VOCAB_SIZE)
    asked = {n: v for n, v in asdict(replace(settings, dtype=hardware.dtype)).items() if n not in NOT_SAVED}
    scaling = "off" if hardware.dtype == "fp32" else "on"
    settings = replace(
        settings,
        device=hardware.device,
        dtype=hardware.dtype,
        loss_scaling=scaling if settings.loss_scaling == "auto" else settings.loss_scaling,
        min_lr=settings.lr / 10 if settings.min_lr is None else settings.min_lr,
        save_every=settings.eval_every if settings.save_every is None else settings.save_every,
    )
    damaged = [f"{line.removesuffix(': use another checkpoint')}: going on from {resume_from.name}" for line in damaged]
    return Request(settings, asked, hardware, resume_from, tuple(damaged))


def _faults(s: Settings, flags: dict, hardware: backends.Hardware | None, resume_from: Path | None) -> list[str]:
    """What is wrong with the values, each in one line that names the flag."""
    faults = []

    def require(holds: bool, line: str):
        if not holds:
            faults.append(line)

    for name in (
        "steps",
        "batch_size",
        "block_size",
        "accumulation",
        "n_layer",
        "n_head",
        "n_embd",
        "log_every",
        "growth_interval",
    ):
        value = getattr(s, name)
        require(value > 0, f"{name_of(name)} {value}: must be at least 1")
        require(
            value <= LARGEST or name in ("steps", "growth_interval"),
            f"{name_of(name)} {value}: must be at most {LARGEST}",
        )
    for name in ("warmup", "eval_every", "save_every", "max_skips"):
        value = getattr(s, name)
        require(value is None or value >= 0, f"{name_of(name)} {value}: must not be negative")
    if s.n_head > 0 and s.n_embd > 0:
        require(s.n_embd % s.n_head == 0, f"--n-embd {s.n_embd}: not divisible by --n-head {s.n_head}")
    require(0 <= s.dropout < 1, f"--dropout {s.dropout}: must be in [0, 1)")
    require(0 < s.lr < math.inf, f"--lr {s.lr}: must be a finite number above 0")
    if s.min_lr is not None:
        require(0 <= s.min_lr <= s.lr, f"--min-lr {s.min_lr}: must be between 0 and --lr {s.lr}")
    require(0 <= s.weight_decay < math.inf, f"--weight-decay {s.weight_decay}: must be a finite number, not negative")
    for name in ("beta1", "beta2"):
        require(0 <= getattr(s, name) < 1, f"--{name} {getattr(s, name)}: must be in [0, 1)")
    require(0 <= s.clip < math.inf, f"--clip {s.clip}: must be a finite number, not negative; 0 is no clipping")
    require(0 <= s.seed < 2**63, f"--seed {s.seed}: must be between 0 and 2^63 - 1")
    require(1 <= s.init_scale <= MAX_SCALE, f"--init-scale {s.init_scale:.10g}: must be between 1 and 2^24")

    # A setting that would silently do nothing is refused.
    learns = s.tokenizer == "bpe"
    require(learns or "vocab_size" not in flags, f"--vocab-size: only --tokenizer bpe learns one, not {s.tokenizer}")
    in_range = not learns or s.vocab_size is None or 256 <= s.vocab_size <= LARGEST
    require(in_range, f"--vocab-size {s.vocab_size}: must be between 256, the single bytes, and {LARGEST}")
    scaled = s.loss_scaling == "on" or (s.loss_scaling == "auto" and hardware and hardware.dtype != "fp32")
    for name in ("init_scale", "growth_interval"):
        if name in flags and hardware:
            require(scaled, f"{name_of(name)}: loss scaling is off in this run: add --loss-scaling on")
    if hardware and flags.get("emulation") in ("on", "off"):
        require(hardware.dtype != "fp32", f"--emulation {s.emulation}: fp32 has nothing to emulate")
    if hardware and flags.get("kernel", "auto") != "auto":
        require(hardware.dtype == "bf16", f"--kernel {s.kernel}: the kernel is for bf16, this run is {hardware.dtype}")
    if "compile" in flags and hardware:
        require(
            not hardware.emulated,
            f"--compile: cannot be combined with emulated {hardware.dtype}: use --dtype fp32 or drop it",
        )
        if hardware.device == "cpu":
            compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "cl"]
            found = any(shutil.which(compiler) for compiler in compilers)
            require(found, f"--compile: needs a C++ compiler on the CPU: none of {', '.join(compilers)} is there")
        require(hardware.device != "mps", "--compile: not supported on mps")
    if s.corpus not in data.corpus.NAMES:
        names = ", ".join(data.corpus.NAMES)
        found, readable = os.path.isfile(s.corpus), os.access(s.corpus, os.R_OK)
        if os.path.exists(s.corpus):
            require(found, f"--corpus {s.corpus}: not a file: use a text file, or {names}")
            require(readable, f"--corpus {s.corpus}: not readable: change its permissions or use another file")
        else:
            faults.append(f"--corpus {s.corpus}: no such file (names without a file: {names})")
    require(s.out is not None or not s.overwrite, "--overwrite: needs --out: a run without it has a folder of its own")
    require(not (s.resume and s.overwrite), "--overwrite: cannot be combined with --resume, which continues the run")
    for name in ("out", "resume", "overwrite"):
        alone = not (s.verify_resume and name in flags)
        require(alone, f"{name_of(name)}: cannot be combined with --verify-resume, which has a folder of its own")
    require(s.out != "", "--out: is empty: name a folder")
    source = resume_from.parent if resume_from else None  # the run that is resumed
    out = Path(s.out) if s.out else source or Path("runs")
    existing = next(path for path in (out, *out.absolute().parents) if os.path.exists(path))
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    kind = "not writable" if existing.is_dir() else "not a folder"
    require(writable, f"--out {out}: cannot be written, {existing} is {kind}")
    if source and out.absolute() == source.absolute():
        step = checkpoint.STEP_FOLDER.fullmatch(resume_from.name)
        newer = checkpoint.intact_after(source, int(step[1])) if step else None
        if newer:
            faults.append(f"--resume {resume_from}: {newer.name} is newer: go on in another folder with --out")
    elif (s.out or source) and not s.overwrite and writable and checkpoint.holds_run(out):
        faults.append(f"--out {out}: holds a run: --resume {out} continues it, --overwrite replaces it")
    return faults
