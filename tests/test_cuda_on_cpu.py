"""csrc/bf16_linear.cu itself, compiled by g++ and run on the CPU: its values, its safety, its traffic.

Each check fails when the source is changed for the worse, which is tested too.
"""

import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from amp.formats import from_bf16_bits, round_to, to_bf16_bits
from benchmarks import traffic
from csrc.cuda_on_cpu import emulator
from csrc.cuda_on_cpu.emulator import choice, counters, library, linear

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ on Linux")

TYPES = [(x, w) for x in ("fp32", "bf16") for w in ("fp32", "bf16")]


def versions(n: int, k: int, x_type: str, w_type: str) -> list[int]:
    """Those that take such a problem."""
    wide = all(k * (4 if kind == "fp32" else 2) % 16 == 0 for kind in (x_type, w_type))
    several = [2, 3, 4] if n == 1 else [4]
    return [0, 1] + (several if wide else []) + ([5] if wide and x_type == "bf16" else [])


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    return to_bf16_bits(values) if kind == "bf16" else values.astype(np.float32)


def loaded(array: np.ndarray) -> np.ndarray:
    return from_bf16_bits(array) if array.dtype == np.uint16 else array


def integers(n, m, k, x_type, w_type, seed=0):
    """Small ones: every sum is exact in fp32, in any order."""
    rng = np.random.default_rng([seed, n, m, k])
    x, weight, bias = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((n, k), (m, k), m))
    return stored(x, x_type), stored(weight, w_type), stored(bias, w_type)


def normals(n, m, k, x_type, w_type, seed=0):
    rng = np.random.default_rng([seed, n, m, k])
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, k), (m, k), m))
    return stored(x, x_type), stored(weight, w_type), stored(bias, w_type)


def product(x, weight, bias=None):
    """In fp64, of bf16 weights and bias: the result, and the sum of the magnitudes of what was added."""
    x, weight = loaded(x).astype(np.float64), round_to(loaded(weight), "bf16").astype(np.float64)
    bias = np.zeros(len(weight)) if bias is None else round_to(loaded(bias), "bf16").astype(np.float64)
    return x @ weight.T + bias, abs(x) @ abs(weight).T + abs(bias)


# ---- checks: each passes for the source as it is, and fails for a change of it (at the end of the file)


def check_integers(path, shape, version, types=TYPES, **settings):
    """Bit for bit the exact sum, rounded once."""
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
    """The same bits whatever thread runs first."""
    x, weight, bias = normals(*shape, "bf16", "fp32")
    forward = linear(x, weight, bias, version, path=path, **settings)
    assert not np.isnan(loaded(forward)).any()
    for order in (1, 2, 3):
        y = linear(x, weight, bias, version, path=path, order=order, **settings)
        np.testing.assert_array_equal(y, forward, err_msg=f"v{version}, order {order}")


def check_traffic(path, version):
    """From v2 on: no byte of the weights twice, every request coalesced, no bank conflict."""
    for multiprocessors in (1, 132):  # v3: four rows for each warp, or split rows
        for row in traffic.measured(path, [version], m=128, k=1024, multiprocessors=multiprocessors):
            case = f"v{version}, {row['weights']} weights, {multiprocessors} multiprocessors"
            assert row["weight_bytes"] <= 1.02, f"weight_bytes of {case}"
            assert row["all_sectors"] <= 1.02, f"all_sectors of {case}"
            assert row["conflicts"] == 0, f"conflicts of {case}"


def sparse(shape, dtype):
    """Zeros that take no memory until they are written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype).reshape(shape)


def check_large(path, shape, version):
    """First and last result of arrays that are zero but at their ends: offsets beyond 2^32, where 32 bits would wrap to
    another place in the array."""
    n, m, k = shape
    x, weight, y = (sparse(shape, np.uint16) for shape in ((n, k), (m, k), (n, m)))
    (x[0], x[-1]), (weight[0], weight[-1]), _ = normals(2, 2, k, "bf16", "bf16")
    linear(x, weight, None, version, path=path, y=y, blocks=(1, 1))
    for at in (0, -1):
        exact = product(x[[at]], weight[[at]])[0]
        np.testing.assert_allclose(loaded(y[[at], at]), exact[0], rtol=2**-8, err_msg=f"v{version}, result {at}")


# ---- values

# n, m, k: each of k 1 to 33; wide and ragged ones around the sizes of a warp, a block and a tile
NARROW = [(2, 3, k) for k in range(1, 34)] + [(1, 31, 127), (3, 1, 769)]
WIDE = [(1, 1, 8), (1, 65, 768), (1, 3, 776), (2, 31, 24), (3, 65, 40), (4, 1, 264), (5, 3, 16), (6, 7, 32), (7, 65, 8)]
WIDE += [(8, 31, 136), (9, 65, 72), (17, 3, 768), (64, 66, 64), (129, 68, 200)]


@pytest.mark.parametrize("version", range(6))
def test_small_integers_give_the_same_bits_in_every_version(version):
    for shape in WIDE + (NARROW if version < 2 else []):
        if shape[0] * shape[1] < 1000 or version in (0, 5):  # larger ones add time, no case
            check_integers(library(), shape, version)


@pytest.mark.parametrize("version", range(6))
def test_sums_are_fp32_and_rounded_once(version):
    for shape in WIDE + (NARROW[::5] if version < 2 else []):
        if shape[0] * shape[1] < 1000 or version in (0, 5):
            check_normals(library(), shape, version)


@pytest.mark.parametrize("version", range(6))
def test_bf16_error_is_at_most_twice_that_of_torch(version):
    torch = pytest.importorskip("torch")
    n, m, k = (1, 65, 768) if version < 4 else (8, 65, 768)
    x, weight, bias = normals(n, m, k, "fp32", "fp32")
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    low = [torch.from_numpy(array).bfloat16() for array in (x, weight, bias)]
    theirs = abs(torch.nn.functional.linear(*low).double().numpy() - exact).max()
    for w_type in ("fp32", "bf16"):
        y = linear(stored(x, "bf16"), stored(weight, w_type), bias, version)
        assert abs(loaded(y) - exact).max() <= 2 * theirs


# m and k, multiprocessors, blocks of v3, blocks of v4: how many rows a warp takes, how many warps share a row
SPLITS = [
    ((131, 64), 1, 5, 17),  # four rows for each warp
    ((9, 64), 132, 2, 2),
    ((9, 512), 132, 3, 5),  # two warps for each row in v3, four in v4
    ((9, 1024), 132, 5, 5),
    ((9, 2048), 132, 9, 5),
    ((65, 2048), 2, 9, 9),  # enough rows: no split
]


@pytest.mark.parametrize(("shape", "multiprocessors", "blocks_of_v3", "blocks_of_v4"), SPLITS)
def test_rows_and_splits_follow_the_device(shape, multiprocessors, blocks_of_v3, blocks_of_v4):
    for version, blocks in ((3, blocks_of_v3), (4, blocks_of_v4)):
        check_integers(library(), (1, *shape), version, [("fp32", "fp32")], multiprocessors=multiprocessors)
        assert counters(library()).blocks == blocks
        check_integers(library(), (1, *shape), version, TYPES[1:], multiprocessors=multiprocessors)
        check_normals(library(), (1, *shape), version, multiprocessors=multiprocessors)


def test_the_launcher_takes_the_version_that_suits_the_shape():
    def chosen(n, m, k, x_type="bf16", w_type="fp32", **device):
        x, weight, _ = normals(n, m, k, x_type, w_type)
        return choice(x, weight, **device)

    assert chosen(1, 9, 64) == 3
    assert chosen(1, 9, 63) == 1
    assert chosen(1, 9, 4, "fp32") == 3
    assert chosen(1, 9, 4, "fp32", "bf16") == 1  # eight bytes of weights a row
    assert chosen(2, 9, 64) == chosen(8, 9, 64) == 4
    assert chosen(9, 9, 64) == 5
    assert chosen(9, 9, 64, "fp32") == 4
    assert chosen(9, 9, 64, major=7) == 4
    x, weight, _ = normals(9, 9, 64, "bf16", "fp32")
    np.testing.assert_array_equal(linear(x, weight), linear(x, weight, version=5))


def shifted(array, elements):
    """A copy that begins so many elements after a multiple of 16 bytes."""
    memory = emulator.aligned(np.zeros(array.size + 16, array.dtype))
    view = memory[elements : elements + array.size].reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("which", ["x", "weight", "y"])
def test_misaligned_views_take_the_scalar_path(which):
    x, weight, bias = integers(1, 9, 64, "bf16", "fp32")
    exact = stored(product(x, weight, bias)[0].astype(np.float32), "bf16")
    for elements in (1, 2, 8):
        arrays = {"x": x, "weight": weight, "y": np.zeros((1, 9), np.uint16)}
        arrays[which] = shifted(arrays[which], elements)
        aligned = arrays[which].ctypes.data % 16 == 0
        assert choice(**arrays) == (3 if aligned else 1)
        np.testing.assert_array_equal(linear(**arrays, bias=bias), exact)
        if not aligned:
            for version in (2, 3, 4, 5):
                with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
                    linear(**arrays, version=version)


def test_what_a_version_cannot_take_is_an_error():
    x, weight, _ = normals(2, 3, 64, "fp32", "fp32")
    for version, message in ((2, "one vector"), (3, "one vector"), (5, "takes bf16"), (6, "versions 0 to 5")):
        with pytest.raises(RuntimeError, match=message):
            linear(x, weight, version=version)
    with pytest.raises(RuntimeError, match="sm_80"):
        linear(stored(x, "bf16"), weight, version=5, major=7)


def test_a_grid_beyond_what_cuda_launches_is_an_error():
    for version, n, m, k in ((1, 200_000, 90_000, 8), (4, 8_700_000, 4_000, 512)):
        x, weight = sparse((n, k), np.uint16), sparse((m, k), np.float32)
        with pytest.raises(RuntimeError, match="more blocks than a grid has"):
            linear(x, weight, version=version, y=np.zeros((1, 1), np.uint16))


@pytest.mark.parametrize("version", [emulator.AUTO, *range(6)])
def test_empty_problems(version):
    path, n = library(), 1 if version in (2, 3) else 3
    x, weight, bias = normals(n, 5, 0, "bf16", "fp32")
    np.testing.assert_array_equal(linear(x, weight, None, version), np.zeros((n, 5), np.uint16))
    np.testing.assert_array_equal(linear(x, weight, bias, version), [to_bf16_bits(bias)] * n)
    assert counters(path).launches == 1
    for n, m in ((0, 5), (3, 0)):
        assert linear(*normals(n, m, 8, "bf16", "fp32"), version).shape == (n, m)
        assert counters(path).launches == 0


@pytest.mark.parametrize("version", range(6))
def test_nan_and_inf_pass_through(version):
    n = 1 if version in (2, 3) else 9
    x, weight, bias = normals(n, 9, 72, "bf16", "fp32")
    x = abs(loaded(x))
    weight[0, 3], weight[2, 71], weight[4, 0], weight[4, 1], weight[6, 40] = np.nan, np.inf, np.inf, -np.inf, -3.4e38
    bias[8] = np.nan
    x[-1, 5] = np.inf if n > 1 else x[-1, 5]
    with np.errstate(invalid="ignore"):
        exact = product(x, weight, bias)[0].astype(np.float32)
    y = loaded(linear(to_bf16_bits(x), weight, bias, version))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(exact), exact, 0))
    assert np.isinf(y[0, 6])  # beyond bf16's range


LARGE = [((1, 5_600_004, 768), v) for v in range(5)] + [((5_600_004, 5, 768), v) for v in (0, 1, 4, 5)]
LARGE += [((70_000, 62_004, 8), v) for v in (0, 1, 4, 5)] + [((9, 5_600_004, 768), 5)]


@pytest.mark.parametrize(("shape", "version"), LARGE)
def test_offsets_beyond_2_to_32(shape, version):
    check_large(library(), shape, version)


# ---- safety

ORDERS = [
    (0, (2, 9, 64), 132),
    (1, (2, 9, 64), 132),
    (2, (1, 9, 64), 132),
    (3, (1, 131, 64), 1),
    (3, (1, 9, 2048), 132),
    (4, (3, 9, 512), 132),
    (5, (130, 66, 200), 132),
]


@pytest.mark.parametrize(("version", "shape", "multiprocessors"), ORDERS)
def test_the_order_of_threads_changes_no_bit(version, shape, multiprocessors):
    check_orders(library(), shape, version, multiprocessors=multiprocessors)


def sanitized(path: Path, function: str) -> subprocess.CompletedProcess:
    """Runs a function of this file in a process that AddressSanitizer watches."""
    asan = subprocess.run([emulator.COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    code = f"from pathlib import Path; from tests import test_cuda_on_cpu as t; t.{function}(Path({str(path)!r}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def everything_once(path):
    for version in range(6):
        for shape in [(1, 9, 512), (3, 5, 264), (9, 3, 72), (2, 3, 7)]:
            check_integers(path, shape, version)
    check_integers(path, (1, 131, 64), 3, multiprocessors=1)  # four rows for each warp
    check_integers(path, (131, 67, 8), 5)


def misaligned_x(path):
    x, weight, _ = integers(2, 9, 64, "bf16", "fp32")
    linear(shifted(x, 1), weight, path=path)


def test_address_and_undefined_behaviour_sanitizers_find_nothing():
    result = sanitized(library("safe"), "everything_once")
    assert result.returncode == 0, result.stderr[-3000:]


# ---- traffic


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_from_v2_on_every_weight_moves_once_and_no_bank_is_asked_twice(version):
    check_traffic(library("counted"), version)


def test_the_first_versions_move_what_their_comments_say():
    rows = {(row["version"], row["weights"]): row for row in traffic.measured(library("counted"), [0, 1])}
    assert rows[0, "fp32"]["weight_bytes"] == 8
    assert rows[0, "bf16"]["weight_bytes"] == 16
    assert rows[1, "fp32"]["weight_bytes"] == rows[1, "bf16"]["weight_bytes"] == 1


def test_fp32_vectors_beside_packed_weights_take_two_requests_of_half_used_sectors():
    x, weight, _ = normals(1, 64, 1024, "fp32", "bf16")
    x, weight = emulator.aligned(x), emulator.aligned(weight)
    for version in (2, 3, 4):  # eight floats for each eight weights: the second 16 bytes come out of L1
        linear(x, weight, None, version, path=library("counted"))
        count = counters(library("counted"))
        assert count.sectors[1] * 32 == weight.nbytes
        assert count.sectors[0] == 2 * count.perfect[0]


def test_the_table_has_a_line_for_each_version_and_type():
    rows = traffic.measured(library("counted"), [0, 5], m=64, k=128)
    lines = traffic.markdown(rows).splitlines()
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1
    assert [re.findall(r"v\d", line) for line in lines[2:]] == [["v0"], ["v0"], ["v5"], ["v5"]]


# ---- the checks can fail: a change of the source, and the check that notices it

V5_LOAD = "if (row < rows && column < k)\n"
V1_OFFSET = """  // the whole warp
    const int64_t row = result % p.m;
    const W* w = static_cast<const W*>(p.weight) + row * p.k;"""
PARTS_BARRIER = "partial[warp * COUNT + i] = sum[i];\n    }\n    __syncthreads();"


def without(text: str, what: str) -> str:
    assert text.count(what) == 1
    return text.replace(what, "")


def v0_ragged(path):
    check_integers(path, (2, 3, 7), 0)


def v1_ragged(path):
    check_integers(path, (2, 3, 33), 1)


def v3_split(path):
    check_integers(path, (1, 9, 2048), 3, [("bf16", "fp32")])


def v4_split(path):
    check_integers(path, (3, 9, 512), 4, [("bf16", "fp32")])


def v5_tiles(path):
    for order in range(3):
        check_integers(path, (33, 66, 136), 5, [("bf16", "fp32")], order=order)


def v2_normals(path):
    check_normals(path, (1, 9, 64), 2)


def v1_large(path):
    check_large(path, (1, 5_600_004, 768), 1)
    check_large(path, (70_000, 62_004, 8), 1)


def v1_traffic(path):
    check_traffic(path, 1)


def v2_traffic(path):
    check_traffic(path, 2)


def v5_traffic(path):
    check_traffic(path, 5)


def v5_is_safe(path):
    result = sanitized(path, "v5_tiles")
    assert result.returncode == 0, result.stderr


def misaligned_is_safe(path):
    result = sanitized(path, "misaligned_x")
    assert result.returncode == 0, result.stderr


# what is wrong: variant, old text, new text, check, what it says
MUTATIONS = {
    "v3 without its barrier": (
        "quick",
        PARTS_BARRIER,
        without(PARTS_BARRIER, "__syncthreads();"),
        v3_split,
        "v3",
    ),
    "v4 without its barrier": (
        "quick",
        PARTS_BARRIER,
        without(PARTS_BARRIER, "__syncthreads();"),
        v4_split,
        "v4",
    ),
    "v3: a barrier for some threads only": (
        "quick",
        PARTS_BARRIER,
        PARTS_BARRIER.replace("__sync", "if (warp > 0) __sync"),
        v3_split,
        "224 threads wait at __syncthreads, 0 wait elsewhere, 32 have left",
    ),
    "v5 without the barrier before the tiles are read": (
        "quick",
        "w_next.write(w_tile);\n        __syncthreads();",
        "w_next.write(w_tile);",
        v5_tiles,
        "v5",
    ),
    "v5 without the barrier before the tiles are overwritten": (
        "quick",
        "__syncthreads();  // before the next tile",
        "// before the next tile",
        v5_tiles,
        "v5",
    ),
    "v5 without __syncwarp before the results are read": (
        "quick",
        "sums[half][1], LD_STAGE, wmma::mem_row_major);\n        __syncwarp();",
        "sums[half][1], LD_STAGE, wmma::mem_row_major);",
        v5_tiles,
        "v5",
    ),
    "v3 with less shared memory than it uses": (
        "quick",
        "divided(p.m, rows_at_once), THREADS, WARPS * 4, stream",
        "divided(p.m, rows_at_once), THREADS, WARPS * 2, stream",
        v3_split,
        "beyond the 16 bytes of shared memory",
    ),
    "v0 without its bounds test": (
        "quick",
        "in each row after row\n    if (result >= p.n * p.m) return;",
        "in each row after row",
        v0_ragged,
        "written outside of y",
    ),
    "a shuffle too few": ("quick", "int offset = WARP / 2;", "int offset = WARP / 4;", v1_ragged, "v1"),
    "v1: a shuffle for some lanes only": (
        "quick",
        "sum = sum_of_warp(sum);\n    if (lane == 0) store(static_cast<X*>(p.y) + result",
        "if (lane < 16) sum = sum_of_warp(sum);\n    if (lane == 0) store(static_cast<X*>(p.y) + result",
        v1_ragged,
        "96 threads wait at __shfl_xor_sync, 0 wait elsewhere, 160 have left",
    ),
    "weights that are not rounded": (
        "quick",
        "return __bfloat162float(__float2bfloat16_rn(weight));",
        "return weight;",
        v2_normals,
        "v2",
    ),
    "products that are rounded to bf16": (
        "quick",
        "sum += rounded(w.values[i]) * widened(x.values[i])",
        "sum += rounded(rounded(w.values[i]) * widened(x.values[i]))",
        v2_normals,
        "v2",
    ),
    "offsets of 32 bits": (
        "quick",
        V1_OFFSET,
        V1_OFFSET.replace("row * p.k", "int(row * p.k)"),
        v1_large,
        "v1, result",
    ),
    "the number of a result in 32 bits": (
        "quick",
        "const int64_t result = int64_t(blockIdx.x) * WARPS",
        "const int64_t result = blockIdx.x * WARPS",
        v1_large,
        "v1, result",
    ),
    "v5 without the bounds test of its loads": (
        "safe",
        V5_LOAD,
        without(V5_LOAD, "row < rows && "),
        v5_is_safe,
        "ERROR: AddressSanitizer: heap-",
    ),
    "a launcher that does not look at the address of x": (
        "safe",
        "is_aligned(p.x) && ",
        "",
        misaligned_is_safe,
        "misaligned address",
    ),
    "v1 that reads with a stride": (
        "counted",
        "for (int64_t i = lane; i < p.k; i += WARP)",
        "for (int64_t i = lane * p.k / WARP; i < (lane + 1) * p.k / WARP; i++)",
        v1_traffic,
        "weight_bytes",
    ),
    "packs that are read element by element": (
        "counted",
        "dot(Pack<W, WIDTH<W>> w, Pack<X, WIDTH<W>> x, float sum)",
        "dot(const Pack<W, WIDTH<W>>& w, const Pack<X, WIDTH<W>>& x, float sum)",
        v2_traffic,
        "all_sectors",
    ),
    "tiles without padding": ("counted", "LD = TILE_K + 8;", "LD = TILE_K;", v5_traffic, "conflicts"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_can_fail(name):
    variant, old, new, check, message = MUTATIONS[name]
    path = library(variant, ((old, new),))
    with pytest.raises((AssertionError, RuntimeError), match=re.escape(message)):
        check(path)


@pytest.mark.parametrize("check", sorted({entry[3] for entry in MUTATIONS.values()}, key=lambda check: check.__name__))
def test_and_pass_for_the_source_as_it_is(check):
    variant = next(entry[0] for entry in MUTATIONS.values() if entry[3] is check)
    check(library(variant))


def test_a_change_of_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="the source has 0 of what is to be changed"):
        library("quick", (("no such text", ""),))
