"""Runs the CUDA kernels on a CPU: csrc/bf16_linear.cu, compiled by g++. Tests and benchmarks/traffic.py use it.

    y = linear(x, weight, bias, version=3)

x (n, k), weight (m, k), bias (m) and y (n, m) are NumPy arrays of float32, or of uint16 that holds bf16 bits
(amp/formats.py converts). y has the type of x.
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
KERNELS = ("bf16_linear.cu", "bf16_linear_vectors.cuh", "bf16_linear_tiles.cuh", "bf16_linear_numbers.cuh")
COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # elsewhere g++ is another compiler
AUTO = -1
GUARD = 1024  # elements before and after y that no kernel may touch: a wrong kernel has room there to be wrong in

# Flags of the compiler for the kernels. The emulator itself is always compiled plainly.
VARIANTS = {
    "plain": ["-O1"],
    "quick": ["-O0"],  # for a changed source that runs once
    "safe": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    # One request for each load in the source: -fno-tree-sra keeps packs whole, and -O1 vectorizes nothing.
    "counted": ["-O1", "-fsanitize=thread", "-fno-tree-sra"],
}
Changes = tuple[tuple[str, str], ...]  # (old text, new text) of the kernels


class Problem(ctypes.Structure):
    """Mirrors Problem of csrc/bf16_linear.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("n", "m", "k")),
        *((name, ctypes.c_bool) for name in ("x_bf16", "weight_bf16", "bias_bf16")),
    ]


class Settings(ctypes.Structure):
    """Mirrors Settings of cuda_on_cpu.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("multiprocessors", "major", "order", "first_blocks", "last_blocks")]


class Counters(ctypes.Structure):
    """Mirrors Counters of cuda_on_cpu.cpp: what the last call did."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("launches", "blocks", "threads", "barriers")),
        *((name, ctypes.c_int64) for name in ("requests", "shared_requests", "conflicts")),
        *((name, ctypes.c_int64 * 4) for name in ("sectors", "perfect")),  # of x, weight, bias, y
    ]


# ---- compiling


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """A folder for compiled files, gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")


def compiled(arguments: list, output: str) -> Path:
    """Runs g++. RuntimeError with the compiler's messages where it fails."""
    if COMPILER is None:
        raise RuntimeError("running the CUDA kernels on a CPU needs g++ on Linux")
    path = Path(scratch().name) / output
    result = subprocess.run([COMPILER, "-std=c++17", "-fPIC", *map(str, arguments), "-o", path], capture_output=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr.decode(errors="replace")[:4000])
    return path


@functools.cache
def runtime() -> Path:
    """The compiled emulator."""
    return compiled(["-O2", "-Wall", "-Wextra", "-Werror", "-c", HERE / "cuda_on_cpu.cpp"], "runtime.o")


def changed(changes: Changes) -> dict[str, str]:
    """The text of each kernel file after the changes. ValueError where an old text is not there exactly once."""
    texts = {name: (CSRC / name).read_text(encoding="utf-8") for name in KERNELS}
    for old, new in changes:
        count = sum(text.count(old) for text in texts.values())
        if count != 1:
            raise ValueError(f"the kernels have {count} places with {old!r}: one is needed")
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return texts


@functools.cache
def library(variant: str = "plain", changes: Changes = ()) -> Path:
    """The compiled kernels, as they are or after changes, which show whether a test notices them."""
    name = f"{variant}_{abs(hash(changes))}"
    folder = CSRC
    if changes:
        folder = Path(scratch().name) / name
        folder.mkdir()
        for file, text in changed(changes).items():
            (folder / file).write_text(text, encoding="utf-8")
    warnings = ["-w"] if changes else ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags = [*VARIANTS[variant], *warnings, "-I", HERE, "-I", CSRC]
    kernels = compiled(["-x", "c++", *flags, "-c", folder / "bf16_linear.cu"], f"{name}.o")
    sanitizers = ["-fsanitize=address,undefined"] if variant == "safe" else []
    return compiled(["-shared", *sanitizers, kernels, runtime()], f"{name}.so")


@functools.cache
def loaded(path: Path) -> ctypes.CDLL:
    cdll = ctypes.CDLL(str(path))
    cdll.run_linear.restype = cdll.version_for.restype = ctypes.c_char_p
    return cdll


# ---- running


def counters(path: Path) -> Counters:
    """The counters of the last call of this library."""
    return Counters.in_dll(loaded(path), "counters")


def problem(x, weight, bias=None, y=None) -> Problem:
    """The arrays as the kernels take them. ValueError where they do not fit together."""
    arrays = [array for array in (x, weight, bias, y) if array is not None]
    if not all(array.flags.c_contiguous and array.dtype in (np.float32, np.uint16) for array in arrays):
        raise ValueError("arrays must be contiguous, of float32 or uint16")
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"x {x.shape} and bias do not fit weight {weight.shape}")
    pointers = [None if array is None else array.ctypes.data for array in (x, weight, bias, y)]
    are_bf16 = [array is not None and array.dtype == np.uint16 for array in (x, weight, bias)]
    return Problem(*pointers, len(x), len(weight), x.shape[1], *are_bf16)


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


def version_for(x, weight, *, path: Path | None = None, multiprocessors: int = 132, major: int = 9, y=None) -> int:
    """The version that the launcher takes on a device with so many multiprocessors and this compute capability."""
    cdll = loaded(path or library())
    set_device(cdll, multiprocessors, major)
    version = ctypes.c_int()
    cdll.version_for(ctypes.byref(problem(x, weight, None, y)), ctypes.byref(version))
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
    blocks: tuple[int, int] = (-1, 0),  # how many run at the beginning and at the end of the grid; (-1, 0): all
) -> np.ndarray:
    """y (n, m). RuntimeError where the launcher refuses, threads wait forever, or memory outside of y is written."""
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
    error = cdll.run_linear(ctypes.byref(problem(x, weight, bias, y)), version)
    if error:
        raise RuntimeError(error.decode())
    if surroundings is not None:
        outside = np.concatenate([surroundings[:GUARD], surroundings[-GUARD:]]).view(np.uint8)
        if (outside != 0xFF).any():
            raise RuntimeError("written outside of y")
    return y
