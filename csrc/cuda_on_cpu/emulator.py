"""csrc/bf16_linear.cu, compiled by g++ and run on a CPU: the door for tests and for benchmarks/traffic.py.

    y = linear(x, weight, bias, version=3)

x (n, k), weight (m, k), bias (m), y (n, m) are NumPy arrays: float32, or uint16 with bf16 bits (amp/formats.py).
"""

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # elsewhere g++ is another compiler
AUTO = -1
GUARD = 1024  # elements before and after y that no kernel may touch; a block has room there to be wrong in

# How the kernels are compiled; the runtime is always compiled plainly.
VARIANTS = {
    "plain": ["-O1"],
    "quick": ["-O0"],  # for a change of the source that is run once
    "safe": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    # one request for each load that the source asks for: aggregates stay whole, and nothing is vectorized
    "counted": ["-O1", "-fsanitize=thread", "-fno-tree-sra"],
}


class Problem(ctypes.Structure):  # csrc/bf16_linear.h
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("n", "m", "k")),
        *((name, ctypes.c_bool) for name in ("x_bf16", "weight_bf16", "bias_bf16")),
    ]


class Settings(ctypes.Structure):  # cuda_on_cpu.cpp
    _fields_ = [(name, ctypes.c_int64) for name in ("multiprocessors", "major", "order", "first_blocks", "last_blocks")]


class Counters(ctypes.Structure):  # cuda_on_cpu.cpp; of the last call
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("launches", "blocks", "threads", "barriers")),
        *((name, ctypes.c_int64) for name in ("requests", "shared_requests", "conflicts")),
        *((name, ctypes.c_int64 * 4) for name in ("sectors", "perfect")),  # of x, weight, bias, y
    ]


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")  # gone when the process ends


def compiled(arguments: list, output: str) -> Path:
    if COMPILER is None:
        raise RuntimeError("running the CUDA kernels on a CPU needs g++ on Linux")
    path = Path(folder().name) / output
    result = subprocess.run([COMPILER, "-std=c++17", "-fPIC", *map(str, arguments), "-o", path], capture_output=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr.decode(errors="replace")[:2000])
    return path


@functools.cache
def runtime() -> Path:
    return compiled(["-O2", "-Wall", "-Wextra", "-Werror", "-c", HERE / "cuda_on_cpu.cpp"], "runtime.o")


def mutated(source: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"the source has {source.count(old)} of what is to be changed: {old!r}")
        source = source.replace(old, new)
    return source


@functools.cache
def library(variant: str = "plain", changes: tuple[tuple[str, str], ...] = ()) -> Path:
    """The compiled kernels; `changes` are (old text, new text) of the .cu, to see whether a test notices."""
    source = CSRC / "bf16_linear.cu"
    name = f"{variant}_{abs(hash(changes))}"
    if changes:
        source = Path(folder().name) / f"{name}.cu"
        source.write_text(mutated((CSRC / "bf16_linear.cu").read_text(encoding="utf-8"), changes), encoding="utf-8")
    warnings = ["-w"] if changes else ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    kernels = compiled(["-x", "c++", *VARIANTS[variant], *warnings, "-I", HERE, "-I", CSRC, "-c", source], f"{name}.o")
    sanitizers = ["-fsanitize=address,undefined"] if variant == "safe" else []
    return compiled(["-shared", *sanitizers, kernels, runtime()], f"{name}.so")


@functools.cache
def loaded(path: Path) -> ctypes.CDLL:
    cdll = ctypes.CDLL(str(path))
    cdll.run.restype = cdll.choice.restype = ctypes.c_char_p
    return cdll


def counters(path: Path) -> Counters:
    return Counters.in_dll(loaded(path), "counters")


def problem(x, weight, bias=None, y=None) -> Problem:
    arrays = [array for array in (x, weight, bias, y) if array is not None]
    if not all(array.flags.c_contiguous and array.dtype in (np.float32, np.uint16) for array in arrays):
        raise ValueError("arrays are contiguous, float32 or uint16")
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"x {x.shape}, weight {weight.shape} and bias do not fit")
    pointers = [None if array is None else array.ctypes.data for array in (x, weight, bias, y)]
    low = [array is not None and array.dtype == np.uint16 for array in (x, weight, bias)]
    return Problem(*pointers, len(x), len(weight), x.shape[1], *low)


def set_device(cdll, multiprocessors: int, major: int, order: int = 0, blocks: tuple[int, int] = (-1, 0)) -> None:
    settings = Settings.in_dll(cdll, "settings")
    settings.multiprocessors, settings.major, settings.order = multiprocessors, major, order
    settings.first_blocks, settings.last_blocks = blocks


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 256 bytes, as CUDA allocates."""
    memory = np.empty(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def choice(x, weight, *, path: Path | None = None, multiprocessors: int = 132, major: int = 9, y=None) -> int:
    """The version that the launcher takes."""
    cdll = loaded(path or library())
    set_device(cdll, multiprocessors, major)
    version = ctypes.c_int()
    cdll.choice(ctypes.byref(problem(x, weight, None, y)), ctypes.byref(version))
    return version.value


def linear(
    x,
    weight,
    bias=None,
    version: int = AUTO,
    *,
    path: Path | None = None,  # of the library
    y=None,  # else a new array
    order: int = 0,  # of the threads: 0 forward, 1 backward, else the seed of a shuffle
    multiprocessors: int = 132,
    major: int = 9,
    blocks: tuple[int, int] = (-1, 0),  # run only so many at the beginning and at the end
) -> np.ndarray:
    path = path or library()
    cdll = loaded(path)
    set_device(cdll, multiprocessors, major, order, blocks)
    surroundings = None
    if y is None and path.name.startswith("safe"):  # the sanitizer watches the ends of the very array
        y = np.empty((len(x), len(weight)), x.dtype)
    elif y is None:
        size = len(x) * len(weight)
        surroundings = np.full(size + 2 * GUARD, 0xFF, np.uint8).repeat(x.itemsize).view(x.dtype)
        y = surroundings[GUARD : GUARD + size].reshape(len(x), len(weight))
    if blocks[0] < 0:
        y.view(np.uint8)[...] = 0xFF  # NaN: a result that is not written shows
    error = cdll.run(ctypes.byref(problem(x, weight, bias, y)), version)
    if error:
        raise RuntimeError(error.decode())
    if surroundings is not None:
        outside = np.concatenate([surroundings[:GUARD], surroundings[-GUARD:]]).view(np.uint8)
        if (outside != 0xFF).any():
            raise RuntimeError("written outside of y")
    return y
