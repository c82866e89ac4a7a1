"""Checks of the CUDA kernels in csrc/cuda_on_cpu/: each passes for the source as it is, and fails for a harmful change.

test_cuda_on_cpu.py runs them on the source; test_cuda_changes.py runs them on changes of it. `path` is the compiled
library, `shape` is (n, m, k), `types` are pairs of the types of x and of the weights.
"""

import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from amp.formats import from_bf16_bits, round_to, to_bf16_bits
from benchmarks import traffic
from csrc.cuda_on_cpu import emulator
from csrc.cuda_on_cpu.emulator import linear

ROOT = Path(__file__).resolve().parent.parent
TYPES = [(x, w) for x in ("fp32", "bf16") for w in ("fp32", "bf16")]


def versions(n: int, k: int, x_type: str, w_type: str) -> list[int]:
    """The versions that take such a problem."""
    aligned = all(k * (4 if kind == "fp32" else 2) % 16 == 0 for kind in (x_type, w_type))
    if not aligned:
        return [0, 1]
    return [0, 1, *([2, 3] if n == 1 else []), 4, *([5] if x_type == "bf16" else [])]


# ---- arrays


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    return to_bf16_bits(values) if kind == "bf16" else values.astype(np.float32)


def loaded(array: np.ndarray) -> np.ndarray:
    return from_bf16_bits(array) if array.dtype == np.uint16 else array


def integers(n, m, k, x_type, w_type):
    """x, weight and bias of small integers: every sum is exact in fp32, in any order."""
    rng = np.random.default_rng([n, m, k])
    x, weight, bias = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((n, k), (m, k), m))
    return stored(x, x_type), stored(weight, w_type), stored(bias, w_type)


def normals(n, m, k, x_type, w_type):
    rng = np.random.default_rng([n, m, k])
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, k), (m, k), m))
    return stored(x, x_type), stored(weight, w_type), stored(bias, w_type)


def product(x, weight, bias=None):
    """In fp64, of bf16 weights and bias: the result, and the sum of the magnitudes of its terms."""
    x, weight = loaded(x).astype(np.float64), round_to(loaded(weight), "bf16").astype(np.float64)
    bias = np.zeros(len(weight)) if bias is None else round_to(loaded(bias), "bf16").astype(np.float64)
    return x @ weight.T + bias, abs(x) @ abs(weight).T + abs(bias)


def shifted(array, elements):
    """A copy that begins so many elements after a multiple of 16 bytes."""
    memory = emulator.aligned(np.zeros(array.size + 16, array.dtype))
    view = memory[elements : elements + array.size].reshape(array.shape)
    view[...] = array
    return view


def sparse(shape, dtype):
    """Zeros that take no memory until they are written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype).reshape(shape)


# ---- checks


def check_integers(path, shape, version, types=TYPES, **settings):
    """y is the exact sum, rounded once, bit for bit."""
    for kinds in types:
        if version not in versions(shape[0], shape[2], *kinds):
            continue
        x, weight, bias = integers(*shape, *kinds)
        for given in (bias, None):
            exact = stored(product(x, weight, given)[0].astype(np.float32), kinds[0])
            y = linear(x, weight, given, version, path=path, **settings)
            np.testing.assert_array_equal(loaded(y), loaded(exact), err_msg=f"{shape} {kinds} v{version}")


def check_normals(path, shape, version, types=TYPES, **settings):
    """fp32: within 1e-5 of the summed magnitudes. bf16: at most one unit in the last place from that, rounded."""
    for kinds in types:
        if version not in versions(shape[0], shape[2], *kinds):
            continue
        x, weight, bias = normals(*shape, *kinds)
        y = linear(x, weight, bias, version, path=path, **settings)
        exact, magnitude = product(x, weight, bias)
        allowed = 1e-5 * magnitude
        if kinds[0] == "bf16":
            allowed += np.spacing(abs(exact).astype(np.float32)) * 2**16
        np.testing.assert_array_less(abs(loaded(y) - exact), allowed, err_msg=f"{shape} {kinds} v{version}")


def check_orders(path, shape, version, **settings):
    """The bits are the same whatever thread runs first."""
    x, weight, bias = normals(*shape, "bf16", "fp32")
    forward = linear(x, weight, bias, version, path=path, **settings)
    assert not np.isnan(loaded(forward)).any()
    for order in (1, 2, 3):
        y = linear(x, weight, bias, version, path=path, order=order, **settings)
        np.testing.assert_array_equal(y, forward, err_msg=f"v{version}, order {order}")


def check_traffic(path, version):
    """From v2 on: no byte of the weights moves twice, every request is coalesced, there is no bank conflict."""
    for multiprocessors in (1, 132):  # v3: four rows for each warp, or split rows
        for row in traffic.measured(path, [version], m=128, k=1024, multiprocessors=multiprocessors):
            case = f"v{version}, {row['weights']} weights, {multiprocessors} multiprocessors"
            assert row["weight_bytes"] <= 1.02, f"weight_bytes of {case}"
            assert row["all_sectors"] <= 1.02, f"all_sectors of {case}"
            assert row["conflicts"] == 0, f"conflicts of {case}"


def check_large(path, shape, version):
    """The first and last result of arrays that are zero but at their ends. Their offsets are beyond 2^32, where 32 bits
    would wrap to another place in the array."""
    n, m, k = shape
    x, weight, y = (sparse(shape, np.uint16) for shape in ((n, k), (m, k), (n, m)))
    (x[0], x[-1]), (weight[0], weight[-1]), _ = normals(2, 2, k, "bf16", "bf16")
    linear(x, weight, None, version, path=path, y=y, blocks=(1, 1))
    for at in (0, -1):
        exact = product(x[[at]], weight[[at]])[0]
        np.testing.assert_allclose(loaded(y[[at], at]), exact[0], rtol=2**-8, err_msg=f"v{version}, result {at}")


def check_sanitizers(path, check):
    """AddressSanitizer and UndefinedBehaviorSanitizer find nothing in a function of this file, in its own process."""
    asan = subprocess.run([emulator.COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    code = f"from pathlib import Path; from tests import kernel_checks as c; c.{check.__name__}(Path({str(path)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


# ---- checks of chosen problems, for the sanitizers and for changes of the source


def everything_once(path):
    for version in range(6):
        for shape in [(1, 9, 512), (3, 5, 264), (9, 3, 72), (2, 3, 7)]:
            check_integers(path, shape, version)
    check_integers(path, (1, 131, 64), 3, multiprocessors=1)  # four rows for each warp
    check_integers(path, (131, 67, 8), 5)


def misaligned_x(path):
    x, weight, _ = integers(2, 9, 64, "bf16", "fp32")
    linear(shifted(x, 1), weight, path=path)


def v0_ragged(path):
    check_integers(path, (2, 3, 7), 0)


def v1_ragged(path):
    check_integers(path, (2, 3, 33), 1)


def v1_large(path):
    check_large(path, (1, 5_600_004, 768), 1)
    check_large(path, (70_000, 62_004, 8), 1)


def v2_normals(path):
    check_normals(path, (1, 9, 64), 2)


def v3_split(path):
    check_integers(path, (1, 9, 2048), 3, [("bf16", "fp32")])


def v4_split(path):
    check_integers(path, (3, 9, 512), 4, [("bf16", "fp32")])


def v5_tiles(path):
    for order in range(3):
        check_integers(path, (33, 66, 136), 5, [("bf16", "fp32")], order=order)


def v1_traffic(path):
    check_traffic(path, 1)


def v2_traffic(path):
    check_traffic(path, 2)


def v5_traffic(path):
    check_traffic(path, 5)


def v5_is_safe(path):
    check_sanitizers(path, v5_tiles)


def misaligned_is_safe(path):
    check_sanitizers(path, misaligned_x)
