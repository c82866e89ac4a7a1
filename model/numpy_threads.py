"""The CPU as both NumPy-based backends use it: two threads, one for each half of a batch, and which flags mean nothing.

NumPy lets go of Python's lock while it computes, so plain threads are enough. A batch is cut into the same two shards
on every machine, and the shards' results are added in order, so the number of cores does not change a bit of the sum.
BLAS is held to one thread: two threads of ours with several of BLAS each would fight for the cores.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import numpy as np
from threadpoolctl import ThreadpoolController

from base.dtypes import Dtype
from base.errors import BadInput
from model.backends import Hardware, Kernel, cpu_name

SHARDS = 2
KERNEL = Kernel("numpy/numpy/numpy", "NumPy's products")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

# Flags of train.py and sample.py that a backend on NumPy cannot honour, and why.
REFUSED = {
    "compile": "has nothing to compile",
    "kernel": "has no kernel of its own",
    "weights": "has no kernel of its own",
    "deterministic": "always is",
    "emulation": "always rounds the operands and multiplies in fp32",
}


def hardware(backend: str, device: str, dtype: str) -> Hardware:
    """The CPU, and the precision with "auto" resolved. BadInput where another device is asked for."""
    if device not in ("auto", "cpu"):
        raise BadInput(f"--device {device}: --backend {backend} computes on the CPU: use --device cpu")
    if dtype == "auto":
        dtype = "bf16"
    name = f"{cpu_name()}, {min(cores(), SHARDS)} threads"
    emulated = dtype != "fp32"
    how = "emulated: operands rounded, products in fp32; NumPy has no others" if emulated else "full precision"
    return Hardware("cpu", name, cast(Dtype, dtype), emulated, how)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shards(rows: int) -> list[slice]:
    """The rows of a batch in two parts, the first larger by one where the number is odd. One row is one part."""
    half = -(-rows // SHARDS)
    return [slice(start, min(start + half, rows)) for start in range(0, rows, half)]


def map_shards(work: Callable, *arguments: Iterable) -> list:
    """[work(a, b, …) for a, b, … in zip(*arguments)], on two threads where there are two cores.

    A thread does not see the caller's context variables: neither the active compute dtype nor NumPy's error state.
    """

    def quietly(*arguments):
        with np.errstate(all="ignore"):  # inf and NaN are the scaler's business, so NumPy need not warn
            return work(*arguments)

    return list(_threads().map(quietly, *arguments)) if cores() > 1 else list(map(quietly, *arguments))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(SHARDS, thread_name_prefix="shard")


@cache
def prepare() -> bool:
    """Holds BLAS to one thread and has freed memory kept, once for the whole process. Whether memory will be kept."""
    ThreadpoolController().limit(limits=1, user_api="blas")
    return keep_freed_memory()


def keep_freed_memory() -> bool:
    """Has malloc keep freed memory for the next array. False where malloc is not glibc's, which alone is told how.

    By default malloc gives a large array back to the system as soon as it is freed. The system hands the next array out
    page by page, each with a page fault and filled with zeros: with the preset cpu on the numpy backend, some 5,000
    faults a step in fp32 and 8,000 in bf16. With freed memory kept there are none.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # Alpine's musl
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
