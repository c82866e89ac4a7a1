"""A run on disk: arrays and JSON in folders `step-N/`, written whole or not at all. No torch, no pickle.

    step-N/config.json              the model's sizes, as Hugging Face transformers reads a GPT-2
    step-N/model.safetensors        weights by GPT-2's names; Conv1D kinds (in, out) as GPT-2 keeps them
    step-N/minigpt_tokenizer.json   what decodes the tokens
    step-N/optimizer.safetensors    AdamW's moments by parameter name
    step-N/manifest.json            everything else, the sha256 of the files above and one of itself; written last
    latest.json, best.json          {"step": N, ...}: which folder to use, replaced atomically

A folder is built under another name, flushed, and renamed to step-N, so a step-N that exists is complete. Damage that
comes later shows in the hashes, and the checkpoint before is used.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save as dump_tensors

from base import files
from base.errors import BadInput
from model import hugging_face

FORMAT_VERSION = 2
STEP_FOLDER = re.compile(r"step-(\d+)", re.ASCII)
LEFTOVER = re.compile(r"\.step-(\d+)\.\d+\.(tmp|old)", re.ASCII)  # of a process that was killed in a save
FILES = ("config.json", "model.safetensors", "minigpt_tokenizer.json", "optimizer.safetensors")
# What a manifest must have, and of which type, before anything is read from it.
MANIFEST = {
    "step": int, "settings": dict, "config": dict, "scaler": dict, "skipped": int, "consecutive_skips": int,
    "corpus": dict, "compute": dict, "tokenizer_fingerprint": str, "sha256": dict, "digest": str,
}  # fmt: skip
KEPT = 2  # newest checkpoints that stay; the best one stays too


class NotSaved(OSError):
    """A save that failed, in one line: nothing of it is left, and the checkpoints before it are as they were."""


def save(
    out: Path,
    step: int,
    arrays: dict,
    config: dict,
    tokenizer: dict,
    manifest: dict,
    best: bool = False,
    replace: bool = False,
) -> Path:
    """Writes `out/step-N` and points latest.json (with `best` also best.json) at it; `arrays` as of Backend.state().

    replace: the folder holds another run, which goes once the new checkpoint is whole. NotSaved on a full disk, say.
    """
    weights = hugging_face.weights_of(arrays["model"])
    contents = {
        "config.json": files.to_json(hugging_face.config_of(config)),
        "model.safetensors": dump_tensors(_contiguous(weights), metadata={"format": "pt"}),
        "minigpt_tokenizer.json": files.to_json(tokenizer),
        "optimizer.safetensors": dump_tensors(_contiguous(arrays["optimizer"])),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    manifest = {"format_version": FORMAT_VERSION, "step": step, **manifest, "sha256": hashes}
    contents["manifest.json"] = files.to_json(manifest | {"digest": _digest(manifest)})
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_folder(out, step, contents)
        if replace:
            _remove_others(out, step)
        files.replace(out / "latest.json", files.to_json({"step": step}))
        if best:
            files.replace(out / "best.json", files.to_json({"step": step, "val": manifest["best_val"]}))
    except OSError as error:
        needed, free = sum(map(len, contents.values())), _free_bytes(out)
        why = f"{error.strerror}: {needed:,} bytes needed, {free:,} free in {out}"
        raise NotSaved(f"step {step} is not saved: {why}") from error
    _remove_old(out)
    return out / f"step-{step}"


def _write_folder(out: Path, step: int, contents: dict[str, bytes]) -> None:
    """All of `contents` in out/step-N, or none of them."""
    temporary, final = out / f".step-{step}.{os.getpid()}.tmp", out / f"step-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, content in contents.items():
            files.write(temporary / name, content)
        files.flush_folder(temporary)
        aside = out / f".step-{step}.{os.getpid()}.old"
        if final.exists():
            final.rename(aside)
        try:
            temporary.rename(final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files.flush_folder(out)


def load(folder: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict, dict]:
    """A step folder -> (arrays as Backend.load_state takes them, tokenizer description, manifest), hashes checked."""
    manifest = read_manifest(folder)
    contents = {name: files.read_checked(folder / name, expected) for name, expected in manifest["sha256"].items()}
    model, optimizer, tokenizer = "model.safetensors", "optimizer.safetensors", "minigpt_tokenizer.json"
    arrays = {
        "model": hugging_face.read_weights(hugging_face.tensors(contents[model], folder / model)),
        "optimizer": hugging_face.tensors(contents[optimizer], folder / optimizer),
    }
    return arrays, files.parse_json(contents[tokenizer], folder / tokenizer), manifest


def load_model(folder: Path) -> tuple[dict[str, np.ndarray], dict, dict | None]:
    """A step folder or a Hugging Face GPT-2 -> (weights, GPTConfig's fields, tokenizer description if there is one)."""
    hashes = read_manifest(folder)["sha256"] if (folder / "manifest.json").is_file() else {}
    weights, sizes = hugging_face.load(folder)
    path = folder / "minigpt_tokenizer.json"
    if not path.is_file():
        return weights, sizes, None
    content = files.read_checked(path, hashes[path.name]) if hashes else files.read(path)
    return weights, sizes, files.parse_json(content, path)


def _digest(manifest: dict) -> str:
    """sha256 of the rest of a manifest, so that a change in it is noticed too."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---- which checkpoint


def find(wanted: str, out: str | None = None, pointers: tuple[str, ...] = ("latest.json",)) -> Path:
    """The folder of a model that `wanted` means: "auto" (in `out`, else the newest run), a run folder, or the folder.

    pointers: which of a run's checkpoints to take, the first that is there.
    """
    folder = _find_run(wanted, out)
    for pointer in pointers:
        if os.path.isfile(folder / pointer):
            return folder / f"step-{_pointed(folder / pointer)}"
    if not os.path.isfile(folder / "config.json"):
        raise BadInput(f"{folder}: no checkpoint there: neither {pointers[-1]} of a run nor config.json of a model")
    return Path(os.path.realpath(folder))  # of ".", or a link to a step, the run is the folder around it


def _find_run(wanted: str, out: str | None) -> Path:
    folder = Path(wanted)
    if wanted == "auto":
        runs = [Path(out)] if out else _entries(Path("runs"))
        runs = [run for run in runs if holds_run(run)]
        if not runs:
            raise BadInput(f"no checkpoint in {out or 'runs'}: train one first, or name its folder")
        folder = max(runs, key=_changed)
    return folder


def _changed(run: Path) -> float:
    """When a run was saved last; without latest.json, as a kill may leave it, by the folder's own time."""
    pointer = run / "latest.json"
    return os.path.getmtime(pointer if os.path.isfile(pointer) else run)


def find_intact(wanted: str, out: str | None = None) -> tuple[Path, list[str]]:
    """As `find`, for a run that goes on: of a run the newest checkpoint that is whole, and a line for each newer one.

    BadInput where none is whole; a step folder that is named is taken as it is.
    """
    run = _find_run(wanted, out)
    faults: list[str] = []
    for step in reversed(_steps(run)):
        if (fault := damage(run / f"step-{step}")) is None:
            return run / f"step-{step}", faults
        faults.append(fault)
    if faults:
        raise BadInput("\n".join(faults))
    return find(wanted, out), []


def damage(folder: Path) -> str | None:
    """What is wrong with a step folder, in one line, or None."""
    try:
        manifest = read_manifest(folder)
        if folder.name != f"step-{manifest['step']}":
            return f"{folder}: holds step {manifest['step']}: a copy, or renamed"
        for name, expected in manifest["sha256"].items():
            files.read_checked(folder / name, expected)
    except BadInput as error:
        return str(error)
    return None


def intact_after(run: Path, step: int) -> Path | None:
    """A whole checkpoint of the run that is newer than `step`, if there is one."""
    newer = [run / f"step-{number}" for number in _steps(run) if number > step]
    return next((folder for folder in newer if damage(folder) is None), None)


def read_manifest(folder: Path) -> dict:
    """BadInput where it is of another version, altered, or lacks what a resumed run needs."""
    path = folder / "manifest.json"
    manifest = files.read_json(path)
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise BadInput(f"{path}: format version {version}, this version reads {FORMAT_VERSION}")
    for key, kind in MANIFEST.items():
        if type(manifest.get(key)) is not kind:
            raise BadInput(f"{path}: damaged, {key} is missing or wrong: use another checkpoint")
    if set(manifest["sha256"]) != set(FILES):
        raise BadInput(f"{path}: damaged, it names other files than {', '.join(FILES)}: use another checkpoint")
    if manifest["digest"] != _digest(manifest):
        raise BadInput(f"{path}: damaged, its sha256 is not the one in it: use another checkpoint")
    return manifest


# ---- what lies in a run folder


def holds_run(out: Path) -> bool:
    """Whether there is a checkpoint to lose; a log alone is of a run that never came to one."""
    return os.path.isfile(out / "latest.json") or bool(_steps(out))


def clear_leftovers(out: Path) -> None:
    """Removes what killed processes left half done, or brings back what they had moved aside. Hold the run's lock."""
    for path in _entries(out):
        if found := LEFTOVER.fullmatch(path.name):
            if found[2] == "old" and not (out / f"step-{found[1]}").exists():
                path.rename(out / f"step-{found[1]}")  # killed between two renames
            else:
                shutil.rmtree(path)
        elif re.fullmatch(r"\.(latest\.json|best\.json|log\.csv)\.\d+\.tmp", path.name, re.ASCII):
            path.unlink()
    if (out / "log.csv.old").exists():  # --overwrite, and killed before its first checkpoint: the old run is still here
        (out / "log.csv.old").replace(out / "log.csv")


def set_aside_newer(out: Path, step: int) -> None:
    """Damaged checkpoints after `step` become step-N.damaged, so that from here on the highest number is the newest.

    BadInput where one of them is whole: another process has gone on since `step` was chosen.
    """
    if newer := intact_after(out, step):
        raise BadInput(f"--resume {out / f'step-{step}'}: {newer.name} is newer: start again")
    for number in _steps(out):
        if number > step:
            shutil.rmtree(out / f"step-{number}.damaged", ignore_errors=True)
            (out / f"step-{number}").rename(out / f"step-{number}.damaged")
    if _pointed_or_none(out / "latest.json") != step:
        files.replace(out / "latest.json", files.to_json({"step": step}))
    if (_pointed_or_none(out / "best.json") or 0) > step:
        (out / "best.json").unlink()


def _remove_others(out: Path, step: int) -> None:
    """Deletes what another run wrote in `out`, and nothing else; the new log.csv stays."""
    for path in _entries(out):
        if _is_ours(path) and path.name != f"step-{step}":
            shutil.rmtree(path)
    for name in ("latest.json", "best.json", "loss.png", "log.csv.damaged", "log.csv.old"):
        (out / name).unlink(missing_ok=True)


def _remove_old(out: Path) -> None:
    pointed = [_pointed_or_none(out / name) for name in ("latest.json", "best.json")]
    for step in _steps(out)[:-KEPT]:
        if step not in pointed:
            shutil.rmtree(out / f"step-{step}", ignore_errors=True)


def _entries(out: Path) -> list[Path]:
    try:
        return sorted(out.iterdir()) if os.path.isdir(out) else []
    except OSError as error:
        raise BadInput(f"{out}: cannot be read ({error.strerror})") from None


def _steps(out: Path) -> list[int]:
    """The steps of which there is a folder of ours, whole or damaged, in order."""
    found = [STEP_FOLDER.fullmatch(path.name) for path in _entries(out) if _is_ours(path)]
    return sorted(int(match[1]) for match in found if match)


def _is_ours(path: Path) -> bool:
    """A step folder, also one set aside for its damage, or one that a process left behind when it died."""
    if LEFTOVER.fullmatch(path.name):
        return True
    name = path.name.removesuffix(".damaged")
    ours = any((path / file).is_file() for file in ("manifest.json", "optimizer.safetensors"))
    return bool(STEP_FOLDER.fullmatch(name)) and ours


def _pointed(pointer: Path) -> int:
    step = files.read_json(pointer).get("step")
    if type(step) is not int:
        raise BadInput(f"{pointer}: damaged, no step in it: name a step folder")
    return step


def _pointed_or_none(pointer: Path) -> int | None:
    try:
        return _pointed(pointer)
    except BadInput:  # a damaged pointer is no reason to end a run
        return None


def _free_bytes(out: Path) -> int:
    return shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.exists())).free


def _contiguous(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """safetensors writes the memory behind an array as it lies, so it must lie in C order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}
