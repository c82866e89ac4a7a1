"""Two shards whatever the machine: one core, two or eight compute the same bits."""

import ctypes
import threading
import types

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from data.batches import Batches
from model import numpy_backend, numpy_threads
from model.config import GPTConfig
from settings import Settings
from tests.conftest import train_steps


@pytest.mark.parametrize("rows", range(1, 9))
def test_shards_are_all_rows_in_order(rows):
    parts = [list(range(rows)[part]) for part in numpy_threads.shards(rows)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert len(parts) == min(rows, 2)
    assert len(parts[0]) - len(parts[-1]) in (0, 1)


def trained(monkeypatch, cores: int, batch_size: int) -> dict[str, np.ndarray]:
    """The state after three steps with dropout, and the losses."""
    monkeypatch.setattr(numpy_threads, "cores", lambda: cores)
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.1)
    backend = numpy_backend.build(Settings(), numpy_backend.hardware("cpu", "bf16", "auto"), config)
    batches = Batches(np.arange(1000) ** 2 // 7 % 11, 8, batch_size, seed=1)
    losses = train_steps(backend, batches, range(3))
    state = backend.state()
    return {"losses": np.array(losses)} | state["model"] | state["optimizer"]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_number_of_cores_does_not_change_a_bit(monkeypatch, batch_size):
    one = trained(monkeypatch, 1, batch_size)
    for cores in (2, 8):
        for name, array in trained(monkeypatch, cores, batch_size).items():
            assert array.tobytes() == one[name].tobytes(), f"{name} on {cores} cores"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 2)])
def test_two_threads_where_there_are_two_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(numpy_threads, "cores", lambda: cores)
    met = threading.Barrier(threads, timeout=60)  # passed only where as many threads wait side by side

    def work(number, letter):
        if threads == 2:
            met.wait()
        return f"{number}{letter}", threading.current_thread() is threading.main_thread()

    assert numpy_threads.run(work, [1, 2], "ab") == [("1a", threads == 1), ("2b", threads == 1)]


def test_an_exception_of_a_shard_is_the_caller_s(monkeypatch):
    monkeypatch.setattr(numpy_threads, "cores", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        numpy_threads.run(lambda x: 1 / x, [1, 0])


def test_blas_is_held_to_one_thread():
    numpy_threads.prepare()
    assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {1}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_allocator_is_left_alone_off_linux(monkeypatch, platform):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    assert not numpy_threads.keep_freed_memory()


def test_the_allocator_is_left_alone_where_it_is_not_glibc_s(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert not numpy_threads.keep_freed_memory()
