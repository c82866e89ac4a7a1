"""One checkpoint on disk: arrays and JSON in a folder `step-N/`, written whole or not at all. No torch, no pickle.

    step-N/config.json              the model's sizes, as Hugging Face transformers reads a GPT-2
    step-N/model.safetensors        weights by GPT-2's names; linear layers' weights are (in, out), as GPT-2 keeps them
    step-N/minigpt_tokenizer.json   the vocabulary
    step-N/optimizer.safetensors    AdamW's moments by parameter name
    step-N/manifest.json            everything else, a sha256 of each file above and one of itself; written last

A folder is built under another name, flushed, and renamed to step-N, so a step-N that exists is complete. Damage that
comes later shows in the hashes. folder.py decides which checkpoint is used and which are kept.

The format only grows. A key that a later version adds to the manifest has a default, so that an older checkpoint stays
readable. Keys and files that this version does not know are named in a note, and the keys are kept in later manifests.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save as to_safetensors

from base import files
from base.errors import BadInput
from model import hugging_face

FORMAT_VERSION = 2
STEP_FOLDER = re.compile(r"step-(\d+)", re.ASCII)
LEFTOVER = re.compile(r"\.step-(\d+)\.\d+\.(tmp|old)", re.ASCII)  # a process that was killed in a save leaves these
FILES = ("config.json", "model.safetensors", "minigpt_tokenizer.json", "optimizer.safetensors")

# Keys of a manifest without which a checkpoint is damaged, and their types.
REQUIRED = {
    "format_version": int, "step": int, "settings": dict, "config": dict, "scaler": dict, "skipped": int,
    "consecutive_skips": int, "corpus": dict, "compute": dict, "tokenizer_fingerprint": str, "sha256": dict,
    "digest": str,
}  # fmt: skip
# Keys that a checkpoint may lack, and what that means. A key that a later version adds belongs here.
OPTIONAL = {"best_val": None, "versions": {}}


class NotSaved(OSError):
    """A save failed. The one line says why and what is on disk; earlier checkpoints are as they were."""


def write(
    out: Path, step: int, arrays: dict, config: dict, tokenizer: dict, manifest: dict, keep_replaced: bool = False
) -> Path:
    """Writes `out/step-N` and returns its path. NotSaved: the disk is full, say, and nothing of the checkpoint is left.

    arrays: as Backend.state() gives them. config: GPTConfig's fields. tokenizer: its describe(). manifest: all keys of
    REQUIRED and OPTIONAL but format_version, step, sha256 and digest. keep_replaced: a step-N that was there stays
    beside the new one, for undo().
    """
    weights = hugging_face.weights_of(arrays["model"])
    contents = {
        "config.json": files.to_json(hugging_face.config_of(config)),
        "model.safetensors": to_safetensors(_contiguous(weights), metadata={"format": "pt"}),
        "minigpt_tokenizer.json": files.to_json(tokenizer),
        "optimizer.safetensors": to_safetensors(_contiguous(arrays["optimizer"])),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    manifest = {"format_version": FORMAT_VERSION, "step": step, **manifest, "sha256": hashes}
    contents["manifest.json"] = files.to_json(manifest | {"digest": _digest(manifest)})
    temporary = out / f".step-{step}.{os.getpid()}.tmp"
    try:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, content in contents.items():
            files.write(temporary / name, content)
        files.flush_folder(temporary)
        _put_in_place(temporary, out / f"step-{step}", keep_replaced)
    except OSError as error:
        needed = sum(map(len, contents.values()))
        why = f"{error.strerror}: {needed:,} bytes needed, {_free_bytes(out):,} free in {out}"
        raise NotSaved(f"step {step} is not saved: {why}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out / f"step-{step}"


def _put_in_place(temporary: Path, final: Path, keep_replaced: bool) -> None:
    """Renames `temporary`, which is whole, to `final`. A folder of that name goes aside, and back if that fails."""
    aside = _aside(final)
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    if not keep_replaced:
        shutil.rmtree(aside, ignore_errors=True)
    files.flush_folder(final.parent)


def undo(folder: Path) -> None:
    """Removes a step folder that write() has just made with keep_replaced, and brings back what it replaced."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    folder.rename(temporary)  # first, so that a kill leaves either step whole
    if _aside(folder).exists():
        _aside(folder).rename(folder)
    shutil.rmtree(temporary, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.old")


def load(folder: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict, dict]:
    """A step folder -> (arrays as Backend.state() gives them, tokenizer description, manifest), hashes checked."""
    manifest = read_manifest(folder)
    contents = {name: files.read_checked(folder / name, sha256) for name, sha256 in manifest["sha256"].items()}
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


def read_manifest(folder: Path) -> dict:
    """The manifest of a step folder, with defaults for keys that an older one lacks. BadInput where it is damaged."""
    path = folder / "manifest.json"
    manifest = files.read_json(path)
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise BadInput(f"{path}: format version {version}, this version reads {FORMAT_VERSION}")
    for key, kind in REQUIRED.items():
        if type(manifest.get(key)) is not kind:
            raise BadInput(f"{path}: damaged, {key} is missing or wrong: use another checkpoint")
    names = set(manifest["sha256"])
    if not names >= set(FILES) or any(name != Path(name).name for name in names):
        raise BadInput(f"{path}: damaged, it names other files than {', '.join(FILES)}: use another checkpoint")
    if manifest["digest"] != _digest(manifest):
        raise BadInput(f"{path}: damaged, its sha256 is not the one in it: use another checkpoint")
    return OPTIONAL | manifest


def unknown_keys(manifest: dict) -> dict:
    """The keys of a manifest that a later version has added. A resumed run writes them into its own manifests."""
    return {key: value for key, value in manifest.items() if key not in REQUIRED and key not in OPTIONAL}


def notes(folder: Path, manifest: dict) -> list[str]:
    """A line for what a later version has added to a checkpoint and this one does not know."""
    keys, names = list(unknown_keys(manifest)), sorted(set(manifest["sha256"]) - set(FILES))
    lines = []
    if keys:
        lines.append(f"{folder / 'manifest.json'}: {', '.join(keys)}: unknown to this version, and kept")
    if names:
        lines.append(f"{folder}: {', '.join(names)}: unknown to this version, and left there")
    return lines


def damage(folder: Path) -> str | None:
    """One line that says what is wrong with a step folder, or None."""
    try:
        manifest = read_manifest(folder)
        if folder.name != f"step-{manifest['step']}":
            return f"{folder}: holds step {manifest['step']}, so it is a copy or was renamed"
        for name, sha256 in manifest["sha256"].items():
            files.read_checked(folder / name, sha256)
    except BadInput as error:
        return str(error)
    return None


def _digest(manifest: dict) -> str:
    """The sha256 of a manifest without its digest, so that a change in it is noticed too."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _free_bytes(out: Path) -> int:
    return shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.exists())).free


def _contiguous(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """safetensors writes the memory behind an array as it lies, so it must lie in C order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}
