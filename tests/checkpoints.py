"""What the tests of checkpoints and run folders share: small checkpoints, and ways to break them."""

import errno
import hashlib
import json
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np

from base import files
from data.tokenizers import CharTokenizer
from model.config import GPTConfig, parameters
from run import checkpoint
from run.folder import save

CONFIG = GPTConfig(vocab_size=5, block_size=12, n_layer=2, n_head=2, n_embd=8, dropout=0.1)
TOKENIZER = CharTokenizer("abcde").describe()
FILES = {
    "config.json",
    "model.safetensors",
    "minigpt_tokenizer.json",
    "optimizer.safetensors",
    "manifest.json",
}
# What train.py adds to a manifest, of the types that it must have.
ABOUT = {"best_val": 1.0, "skipped": 0, "consecutive_skips": 0, "tokenizer_fingerprint": ""}
ABOUT |= {key: {} for key in ("settings", "config", "scaler", "corpus", "compute")}


def arrays(seed: int = 0) -> dict:
    """What Backend.state() returns, with random numbers."""
    random = np.random.default_rng(seed)

    def tensors(prefix=""):
        return {prefix + p.name: random.normal(size=p.shape).astype(np.float32) for p in parameters(CONFIG)}

    moments = tensors("exp_avg.") | tensors("exp_avg_sq.") | {"step": np.array(seed, dtype=np.int64)}
    return {"model": tensors(), "optimizer": moments}


def save_step(out: Path, step: int, best: bool = False, seed: int | None = None) -> Path:
    """A checkpoint whose arrays are drawn with `seed`, by default the step."""
    state = arrays(step if seed is None else seed)
    return save(out, step, state, asdict(CONFIG), TOKENIZER, ABOUT | {"best_val": 1 / 3}, best)


def assert_same(got: dict, expected: dict) -> None:
    for kind in ("model", "optimizer"):
        assert got[kind].keys() == expected[kind].keys()
        for name, array in expected[kind].items():
            assert got[kind][name].dtype == array.dtype
            assert got[kind][name].shape == array.shape
            assert got[kind][name].tobytes() == array.tobytes()


def content(out: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def folders(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if path.is_dir()}


def pointed(out: Path, name: str) -> int:
    return json.loads((out / name).read_text())["step"]


def altered(path: Path, masks, places=None):
    """Alters one byte after the other, by default all; yields while a byte is altered."""
    raw = path.read_bytes()
    for place, mask in product(range(len(raw)) if places is None else places, masks):
        changed = bytearray(raw)
        changed[place] ^= mask
        path.write_bytes(changed)
        yield place


def fails_at_write(monkeypatch, call: int) -> None:
    """The disk is full in the middle of the `call`-th file, counted from 0."""
    calls, write = iter(range(1000)), files.write

    def full(path: Path, content: bytes):
        if next(calls) == call:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(files, "write", full)


def replace_model(folder: Path, raw: bytes) -> None:
    """Other model.safetensors, with its hash in the manifest."""
    (folder / "model.safetensors").write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["model.safetensors"] = hashlib.sha256(raw).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": checkpoint._digest(manifest)}))
