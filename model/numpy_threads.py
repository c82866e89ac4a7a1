"""Two halves of a batch side by side: NumPy leaves Python's lock while it computes, so plain threads are enough.

A batch is cut into the same two shards everywhere, and what they give is added in order, so the number of cores does
not change a bit of the result. BLAS is held to one thread: two of ours with several each would fight for the cores.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

SHARDS = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def shards(rows: int) -> list[slice]:
    """The rows of a batch in two parts, the first larger by one where the number is odd; one part of a single row."""
    half = -(-rows // SHARDS)
    return [slice(start, min(start + half, rows)) for start in range(0, rows, half)]


def run(work: Callable, *arguments: Iterable) -> list:
    """[work(a, b, …) for a, b, … in zip(*arguments)], on two threads where there are two cores."""

    def quietly(*arguments):
        with np.errstate(all="ignore"):  # of inf and NaN the scaler tells; what the caller has set, threads do not see
            return work(*arguments)

    return list(_threads().map(quietly, *arguments)) if cores() > 1 else list(map(quietly, *arguments))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(SHARDS, thread_name_prefix="shard")


@cache
def prepare() -> bool:
    """For the whole process, once: BLAS to one thread, freed memory kept. Whether the allocator did as asked."""
    ThreadpoolController().limit(limits=1, user_api="blas")
    return keep_freed_memory()


def keep_freed_memory() -> bool:
    """Has malloc keep what is freed. By default it gives large arrays back to the system, which hands the next one out
    page by page, each with a fault and zeroed: half of the time of a step. False where malloc is not glibc's.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, of Alpine
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
