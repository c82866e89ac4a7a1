"""Two shards whatever the machine: one core, two or eight compute the same bits."""

import ctypes
import threading
import types

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from model import numpy_threads
from tests.conftest import batches, build, train_steps


@pytest.mark.parametrize("rows", range(1, 9))
def test_shards_are_all_rows_in_order(rows):
    parts = [list(range(rows)[part]) for part in numpy_threads.shards(rows)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert len(parts) == min(rows, 2)
    assert len(parts[0]) - len(parts[-1]) in (0, 1)


def trained_on(monkeypatch, cores: int, backend: str, batch_size: int) -> dict[str, np.ndarray]:
    """The losses of three steps with dropout, and the state after them."""
    monkeypatch.setattr(numpy_threads, "cores", lambda: cores)
    built = build(backend, "fp16")
    losses = train_steps(built, batches(batch_size), range(3))
    state = built.state()
    return {"losses": np.array(losses)} | state["model"] | state["optimizer"]


@pytest.mark.parametrize("backend", ["numpy", "engine"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_number_of_cores_does_not_change_a_bit(monkeypatch, backend, batch_size):
    one = trained_on(monkeypatch, 1, backend, batch_size)
    for cores in (2, 8):
        for name, array in trained_on(monkeypatch, cores, backend, batch_size).items():
            assert array.tobytes() == one[name].tobytes(), f"{name} on {cores} cores"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 2)])
def test_two_threads_where_there_are_two_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(numpy_threads, "cores", lambda: cores)
    met = threading.Barrier(threads, timeout=60)  # passed only where as many threads wait side by side

    def work(number, letter):
        if threads == 2:
            met.wait()
        return f"{number}{letter}", threading.current_thread() is threading.main_thread()

    assert numpy_threads.map_shards(work, [1, 2], "ab") == [("1a", threads == 1), ("2b", threads == 1)]


def test_an_exception_of_a_shard_is_the_caller_s(monkeypatch):
    monkeypatch.setattr(numpy_threads, "cores", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        numpy_threads.map_shards(lambda x: 1 / x, [1, 0])


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
