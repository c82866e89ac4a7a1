"""One thread, and a run that takes a second.

Tensors as small as the tests' are slower on several threads, and on a busy machine many times slower.
"""

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; processes that tests start inherit it

TINY = "--device cpu --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8"
TINY += " --log-every 1 --eval-every 0 --warmup 5"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(300)))
    return path


@pytest.fixture
def train_run(tmp_path, corpus):
    """train_run("name", "--flag …") trains into tmp_path/name and returns (folder, rows)."""
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


def train_steps(backend, data, steps: range) -> list[float]:
    """Trains as train.py does, without clipping; the losses of the steps."""
    from amp.scaler import DynamicLossScaler

    scaler = DynamicLossScaler(init_scale=2.0**10)
    losses = []
    for step in steps:
        with backend.autocast():
            loss = backend.model(*data.get("train", step, 0), key=(1, step, 0))
        scaler.scale(loss).backward()
        scaler.step(backend.optimizer)
        scaler.update()
        backend.optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.skipped_steps == 0
    return losses


def assert_same_state(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys() == {"model", "optimizer"}
    for kind, arrays in theirs.items():
        assert ours[kind].keys() == arrays.keys(), kind
        for name, array in arrays.items():
            assert ours[kind][name].dtype == array.dtype, name
            assert ours[kind][name].tobytes() == array.tobytes(), name
