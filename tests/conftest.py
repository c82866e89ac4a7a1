"""Shared by all tests: a training run that takes a second, and small models, weights, batches and comparisons."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp.scaler import DynamicLossScaler
from base.dtypes import Dtype
from data.batches import Batches
from model import backends
from model.backends import Backend
from model.config import GPTConfig, initial_weights, parameters
from settings import Settings

# ---- runs of train.py

TINY = "--device cpu --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8"
TINY += " --log-every 1 --eval-every 0 --warmup 5"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A text of sums that a small model learns in a few steps."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(300)))
    return path


@pytest.fixture
def train_run(tmp_path, corpus):
    """train_run("name", "--flag …") trains into tmp_path/name and returns (folder, rows of the log)."""
    import train
    from run.log import read_log

    def train_into(name: str, flags: str = "", status: int = 0) -> tuple[Path, list]:
        argv = [*TINY.split(), "--corpus", str(corpus), "--out", str(tmp_path / name), *flags.split()]
        assert train.main(argv) == status
        return tmp_path / name, read_log(tmp_path / name / "log.csv")

    return train_into


def numbers(rows: list) -> list[str]:
    """Rows in full digits, without what depends on time; as text, since NaN equals itself there."""
    return [str(row._replace(tokens_per_second=0, seconds=0)) for row in rows]


# ---- small models and batches

CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)


def random_weights(dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Weights of CONFIG with no parameter at its start: biases that are not 0, LayerNorms that are not 1."""
    random = np.random.default_rng(0)
    draws = {p.name: 0.2 * random.standard_normal(p.shape) + (p.init == "ones") for p in parameters(CONFIG)}
    return {name: weight.astype(dtype) for name, weight in draws.items()}


def batches(batch_size: int, block_size: int = 8, vocab_size: int = 11) -> Batches:
    """Rows of squares: they can be learned, and are not trivial."""
    tokens = np.arange(1000) ** 2 // 7 % vocab_size
    return Batches(tokens.astype(np.int32), block_size, batch_size, seed=1)


# ---- backends


def build(
    name: str,
    dtype: Dtype,
    config: GPTConfig | None = None,
    weights: dict[str, np.ndarray] | None = None,
    emulation: str = "on",
    **settings,
) -> Backend:
    """A backend on the CPU. By default CONFIG with dropout, from the first weights of seed 1."""
    module, config = backends.module(name), config or replace(CONFIG, dropout=0.1)
    weights = initial_weights(config, 1) if weights is None else weights
    hardware = module.hardware("cpu", dtype, emulation)
    return module.build(Settings(**{"lr": 3e-3, "seed": 1} | settings), hardware, config, weights)


def trained_by_name(backend: Backend) -> dict[str, Any]:
    """The optimizer's parameters by name."""
    groups = backend.optimizer.param_groups
    return {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}


def gradients(backend: Backend, data: Batches, key=(1, 0, 0), scale: float = 1.0) -> dict[str, np.ndarray]:
    """Copies of the gradients of scale · loss, of the first training rows."""
    backend.optimizer.zero_grad()
    with backend.autocast():
        loss = backend.model(*data.get("train", 0, 0), key=key)
    (loss * scale).backward()
    return {name: np.asarray(parameter.grad).copy() for name, parameter in trained_by_name(backend).items()}


def train_steps(
    backend: Backend, data: Batches, steps: range, clip: float = 0.0, scale: float = 2.0**10
) -> list[float]:
    """Trains by train.py's step() at a constant learning rate. Returns the losses; no step may be skipped."""
    import train

    scaler, settings = DynamicLossScaler(init_scale=scale), Settings(clip=clip, seed=1)
    losses = [train.step(backend, scaler, data, settings, number)[0][0].item() for number in steps]
    assert scaler.skipped_steps == 0
    return losses


# ---- comparisons


def assert_close(name: str, ours, theirs, tolerance: float) -> None:
    """Arrays or tensors, within `tolerance` of their largest value; of 1e-3 where all are smaller or, in theory, 0."""
    ours, theirs = (x.detach().numpy() if hasattr(x, "detach") else np.asarray(x) for x in (ours, theirs))
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    error, largest = np.abs(ours - theirs).max(), max(np.abs(theirs).max(), 1e-3)
    assert error <= tolerance * largest, f"{name}: off by {error:.1e}, {error / largest:.1e} of the largest value"


def assert_same_state(ours: dict, theirs: dict) -> None:
    """Two states of a backend, bit for bit."""
    assert ours.keys() == theirs.keys() == {"model", "optimizer"}
    for kind, arrays in theirs.items():
        assert ours[kind].keys() == arrays.keys(), kind
        for name, array in arrays.items():
            assert ours[kind][name].dtype == array.dtype, name
            assert ours[kind][name].tobytes() == array.tobytes(), name
