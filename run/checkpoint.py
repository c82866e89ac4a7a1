"""A run on disk: arrays and JSON in folders `step-N/`, written whole or not at all. No torch, no pickle.

    step-N/config.json              the model's sizes, as Hugging Face transformers reads a GPT-2
    step-N/model.safetensors        weights by GPT-2's names; Conv1D kinds (in, out) as GPT-2 keeps them
    step-N/minigpt_tokenizer.json   what decodes the tokens
    step-N/optimizer.safetensors    AdamW's moments by parameter name
    step-N/manifest.json            everything else, and the sha256 of the files above; written last
    latest.json, best.json          {"step": N, ...}: which folder to use, replaced atomically

A folder is built under another name, flushed, and renamed to step-N, so a step-N that exists is complete.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as dump_tensors

from run.errors import BadInput

FORMAT_VERSION = 1
STEP_FOLDER = re.compile(r"step-(\d+)", re.ASCII)
FILES = ("config.json", "model.safetensors", "minigpt_tokenizer.json", "optimizer.safetensors")
# What a manifest must have, and of which type, before anything is read from it.
MANIFEST = {
    "step": int, "settings": dict, "config": dict, "scaler": dict, "skipped": int, "consecutive_skips": int,
    "corpus": dict, "compute": dict, "tokenizer_fingerprint": str, "sha256": dict,
}  # fmt: skip
KEPT = 2  # newest checkpoints that stay; the best one stays too
CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
NOT_WEIGHTS = re.compile(r"(^lm_head\.weight|\.attn\.bias|\.attn\.masked_bias)$")  # tied, and causal masks of old files


def save(out: Path, step: int, arrays: dict, config: dict, tokenizer: dict, manifest: dict, best: bool = False) -> Path:
    """Writes `out/step-N` and points latest.json (with `best` also best.json) at it; `arrays` as of Backend.state()."""
    out.mkdir(parents=True, exist_ok=True)
    temporary, final = out / f".step-{step}.{os.getpid()}.tmp", out / f"step-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        weights = {name: w.T if CONV1D.search(name) else w for name, w in arrays["model"].items()}
        files = {
            "config.json": _json(hugging_face_config(config)),
            "model.safetensors": dump_tensors(_contiguous(weights), metadata={"format": "pt"}),
            "minigpt_tokenizer.json": _json(tokenizer),
            "optimizer.safetensors": dump_tensors(_contiguous(arrays["optimizer"])),
        }
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format_version": FORMAT_VERSION, "step": step, **manifest, "sha256": hashes}
        for name, content in [*files.items(), ("manifest.json", _json(manifest))]:
            _write(temporary / name, content)
        _flush_folder(temporary)
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
    _flush_folder(out)
    _point(out / "latest.json", {"step": step})
    if best:
        _point(out / "best.json", {"step": step, "val": manifest["best_val"]})
    _remove_old(out)
    return final


def load(folder: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict, dict]:
    """A step folder -> (arrays as Backend.load_state takes them, tokenizer description, manifest), hashes checked."""
    manifest = read_manifest(folder)
    for name, expected in manifest["sha256"].items():
        if hashlib.sha256(_read(folder / name)).hexdigest() != expected:
            raise BadInput(f"{folder / name}: damaged, its sha256 is not the manifest's: use another checkpoint")
    arrays = {"model": _read_weights(folder), "optimizer": _read_tensors(folder / "optimizer.safetensors")}
    return arrays, _read_json(folder / "minigpt_tokenizer.json"), manifest


def load_model(folder: Path) -> tuple[dict[str, np.ndarray], dict, dict | None]:
    """A step folder or a Hugging Face GPT-2 -> (weights, GPTConfig's fields, tokenizer description if there is one)."""
    sizes = _sizes(_read_json(folder / "config.json"), folder)
    tokenizer = folder / "minigpt_tokenizer.json"
    return _read_weights(folder), sizes, _read_json(tokenizer) if tokenizer.is_file() else None


def _read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Weights by our names, (out, in)."""
    tensors = _read_tensors(folder / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in weights.items() if not NOT_WEIGHTS.search(name)}
    return {name: np.ascontiguousarray(w.T) if CONV1D.search(name) else w for name, w in weights.items()}


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_tensors(_read(path))
    except SafetensorError as error:
        raise BadInput(f"{path}: not readable as safetensors ({error}): use another checkpoint") from None


def find(wanted: str, out: str | None = None, pointers: tuple[str, ...] = ("latest.json",)) -> Path:
    """The folder of a model that `wanted` means: "auto" (in `out`, else the newest run), a run folder, or the folder.

    pointers: which of a run's checkpoints to take, the first that is there.
    """
    folder = Path(wanted)
    if wanted == "auto":
        runs = [Path(out)] if out else _entries(Path("runs"))
        runs = [run for run in runs if os.path.isfile(run / "latest.json")]
        if not runs:
            raise BadInput(f"no checkpoint in {out or 'runs'}: train one first, or name its folder")
        folder = max(runs, key=lambda run: os.path.getmtime(run / "latest.json"))
    for pointer in pointers:
        if os.path.isfile(folder / pointer):
            return folder / f"step-{_pointed(folder / pointer)}"
    if not os.path.isfile(folder / "config.json"):
        raise BadInput(f"{folder}: no checkpoint there: neither {pointers[-1]} of a run nor config.json of a model")
    return folder


def read_manifest(folder: Path) -> dict:
    """BadInput where it is of another version, or lacks what a resumed run needs."""
    path = folder / "manifest.json"
    manifest = _read_json(path)
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise BadInput(f"{path}: format version {version}, this version reads {FORMAT_VERSION}")
    for key, kind in MANIFEST.items():
        if type(manifest.get(key)) is not kind:
            raise BadInput(f"{path}: damaged, {key} is missing or wrong: use another checkpoint")
    if set(manifest["sha256"]) != set(FILES):
        raise BadInput(f"{path}: damaged, it names other files than {', '.join(FILES)}: use another checkpoint")
    return manifest


def holds_run(out: Path) -> bool:
    """Whether there is a checkpoint to lose; a log alone is of a run that never came to one."""
    return os.path.exists(out / "latest.json") or any(_is_ours(path) for path in _entries(out))


def remove_run(out: Path) -> None:
    """Deletes what a run wrote in `out`, and nothing else."""
    for path in _entries(out):
        if _is_ours(path):
            shutil.rmtree(path)
    for name in ("latest.json", "best.json", "log.csv", "loss.png"):
        (out / name).unlink(missing_ok=True)


def _entries(out: Path) -> list[Path]:
    return sorted(out.iterdir()) if os.path.isdir(out) else []


def _is_ours(path: Path) -> bool:
    """A finished step folder, or one that a process left behind when it died."""
    if re.fullmatch(r"\.step-\d+\.\d+\.(tmp|old)", path.name, re.ASCII):
        return True
    return bool(STEP_FOLDER.fullmatch(path.name)) and (path / "manifest.json").is_file()


def hugging_face_config(config: dict) -> dict:
    """GPTConfig's fields -> transformers' GPT2Config, so that the folder opens there as it lies."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_positions": config["block_size"],
        "n_embd": config["n_embd"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": config["dropout"],
        "attn_pdrop": config["dropout"],
        "resid_pdrop": config["dropout"],
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def _sizes(config: dict, folder: Path) -> dict:
    """The inverse of hugging_face_config. BadInput where the model is no GPT-2 as this project computes it."""
    path = folder / "config.json"
    ours = {"vocab_size": "vocab_size", "n_positions": "block_size"} | {n: n for n in ("n_layer", "n_head", "n_embd")}
    for key in ours:
        if type(config.get(key)) is not int:
            raise BadInput(f"{path}: {key} is missing or not a number: use another checkpoint")
    known = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config["n_embd"]),
    }
    for key, values in known.items():
        if config.get(key, values[0]) not in values:
            raise BadInput(f"{path}: {key} is {config[key]!r}, and only {values[0]!r} is known here")
    return {name: config[key] for key, name in ours.items()}


def _remove_old(out: Path) -> None:
    steps = [int(found[1]) for path in _entries(out) if _is_ours(path) and (found := STEP_FOLDER.fullmatch(path.name))]
    pointed = []
    for name in ("latest.json", "best.json"):
        with contextlib.suppress(BadInput):  # a damaged pointer is no reason to end a run
            pointed.append(_pointed(out / name))
    for step in sorted(steps)[:-KEPT]:
        if step not in pointed:
            shutil.rmtree(out / f"step-{step}", ignore_errors=True)


def _pointed(pointer: Path) -> int:
    step = _read_json(pointer).get("step")
    if type(step) is not int:
        raise BadInput(f"{pointer}: damaged, no step in it: name a step folder")
    return step


def _point(path: Path, content: dict) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, _json(content))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _contiguous(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """safetensors writes the memory behind an array as it lies, so it must lie in C order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows cannot open a folder to flush it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}): use another checkpoint") from None


def _read_json(path: Path) -> dict:
    content = _read(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise BadInput(f"{path}: damaged, not JSON ({error}): use another checkpoint") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: damaged, not a JSON object: use another checkpoint")
    return value
