"""Changes of the CUDA kernels' source: other sizes stay right or do not compile, and the checks notice harm."""

import re

import numpy as np
import pytest

from csrc.cuda_on_cpu import emulator
from csrc.cuda_on_cpu.emulator import Changes, changed, counters, library, linear
from tests.kernel_checks import (
    check_integers,
    misaligned_is_safe,
    normals,
    v0_ragged,
    v1_large,
    v1_ragged,
    v1_traffic,
    v2_normals,
    v2_traffic,
    v3_split,
    v4_split,
    v5_is_safe,
    v5_tiles,
    v5_traffic,
)

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ on Linux")


# ---- sizes


def resized(sizes: dict[str, int]) -> Changes:
    """The changes that give these constants of the kernels other values."""
    source = "\n".join(changed(()).values())
    changes = []
    for name, size in sizes.items():
        now = re.search(rf"\b{name} = \d+", source)
        assert now is not None, name
        changes.append((now[0], f"{name} = {size}"))
    return tuple(changes)


V5_SIZES = [  # sizes, threads of a block
    ({"TILE_M": 128}, 512),
    ({"TILE_K": 32}, 256),
    ({"TILE_N": 32, "TILE_M": 32, "TILE_K": 48}, 32),
    ({"TILE_N": 64, "TILE_M": 128, "WARP_N": 16, "WARP_M": 64}, 256),
]


@pytest.mark.parametrize(("sizes", "threads"), V5_SIZES)
def test_other_tile_sizes_of_v5_change_no_bit(sizes, threads):
    path = library("quick", resized(sizes))
    for shape in [(9, 3, 72), (129, 68, 200), (70, 131, 16)]:
        for w_type in ("fp32", "bf16"):
            x, weight, bias = normals(*shape, "bf16", w_type)
            expected = linear(x, weight, bias, 5)
            assert counters(library()).threads == 256
            for order in (0, 1):
                y = linear(x, weight, bias, 5, path=path, order=order)
                np.testing.assert_array_equal(y, expected, err_msg=f"{shape} {w_type}, order {order}")
            assert counters(path).threads == threads


LADDER_SIZES = [{"WARPS": 16}, {"WARPS": 4, "MAX_SPLIT": 4, "MAX_VECTORS": 5}, {"LOADS_AT_ONCE": 2, "MAX_ROWS": 2}]


@pytest.mark.parametrize("sizes", LADDER_SIZES)
def test_other_sizes_of_v1_to_v4_give_the_exact_sums_too(sizes):
    path = library("quick", resized(sizes))
    for version in (1, 2, 3, 4):
        check_integers(path, (1, 9, 2048), version)
        check_integers(path, (1, 67, 64), version, multiprocessors=1)  # in v3 a warp reads several rows where it can
    check_integers(path, (11, 9, 512), 4)
    check_integers(path, (11, 9, 512), emulator.AUTO, [("fp32", "fp32")])


FORBIDDEN_SIZES = [
    ({"TILE_N": 144}, "WARP_N must divide TILE_N"),
    ({"TILE_M": 48}, "WARP_M must divide TILE_M"),
    ({"WARP_N": 8}, "16 must divide WARP_N"),
    ({"WARP_M": 8}, "16 must divide WARP_M"),
    ({"TILE_K": 24}, "16 must divide TILE_K"),
    ({"TILE_M": 96, "WARP_M": 48}, "WARP_M is 32 or 64"),
    ({"WARP_M": 16}, "WARP_M is 32 or 64"),
    ({"TILE_N": 256, "TILE_M": 160}, "at most 1024 threads: larger WARP_N, WARP_M or a smaller tile"),
    ({"TILE_K": 128}, "a launch gets 48 KB of shared memory"),
    ({"TILE_K": 16}, "all threads must carry equally many packs of a tile"),
    ({"WARPS": 64}, "WARPS must be at most 32"),
    ({"WARPS": 4}, "MAX_SPLIT must divide WARPS"),
    ({"LOADS_AT_ONCE": 2}, "ROWS must divide LOADS_AT_ONCE"),
]


@pytest.mark.parametrize(("sizes", "message"), FORBIDDEN_SIZES)
def test_sizes_that_cannot_work_do_not_compile_and_the_message_says_why(sizes, message):
    with pytest.raises(RuntimeError, match=f"static assertion failed: .*{message}"):
        library("quick", resized(sizes))


def test_lines_of_a_tile_that_share_banks_do_not_compile():
    with pytest.raises(RuntimeError, match=r"static assertion failed: .*LD must be an odd multiple of 8"):
        library("quick", (("LD = TILE_K + 8;", "LD = TILE_K;"),))


# ---- harm: a change of the source, and the check that notices it

V1_ROW = """  // the whole warp
    const int64_t row = result % p.m;
    const W* w = static_cast<const W*>(p.weight) + row * p.k;"""
V1_SUM = "sum = sum_of_warp(sum);\n    if (lane == 0) store(static_cast<X*>(p.y) + result"
PARTS_BARRIER = "partial[warp * COUNT + i] = sum[i];\n    }\n    __syncthreads();"
V5_LOAD = "if (row < rows && column < k)\n"
V5_STORED = "sums[part][j], LD_STAGE, wmma::mem_row_major);\n        }\n        __syncwarp();"
BANK_ASSERT = "static_assert(LD / 8 % 2 == 1,"


def without(text: str, part: str) -> tuple[str, str]:
    """The change that takes a part out of a text."""
    assert text.count(part) == 1
    return text, text.replace(part, "")


# what is wrong: (how it is compiled, changes, check, what the check says)
HARM = {
    "v3 without its barrier": ("quick", [without(PARTS_BARRIER, "__syncthreads();")], v3_split, "v3"),
    "v4 without its barrier": ("quick", [without(PARTS_BARRIER, "__syncthreads();")], v4_split, "v4"),
    "v3: a barrier for some threads only": (
        "quick",
        [(PARTS_BARRIER, PARTS_BARRIER.replace("__sync", "if (warp > 0) __sync"))],
        v3_split,
        "224 threads wait at __syncthreads, 0 wait elsewhere, 32 have left",
    ),
    "v5 without the barrier before the tiles are read": (
        "quick",
        [without("w_next.write(w_tile);\n        __syncthreads();", "__syncthreads();")],
        v5_tiles,
        "v5",
    ),
    "v5 without the barrier before the tiles are overwritten": (
        "quick",
        [without("__syncthreads();  // before the next tile", "__syncthreads();")],
        v5_tiles,
        "v5",
    ),
    "v5 without __syncwarp before the results are read": (
        "quick",
        [without(V5_STORED, "__syncwarp();")],
        v5_tiles,
        "v5",
    ),
    "v3 with less shared memory than it uses": (
        "quick",
        [("1, SPLIT>, blocks, THREADS, WARPS * 4, stream", "1, SPLIT>, blocks, THREADS, WARPS * 2, stream")],
        v3_split,
        "beyond the 16 bytes of shared memory",
    ),
    "v0 without its bounds test": (
        "quick",
        [without("vector after vector\n    if (result >= p.n * p.m) return;", "if (result >= p.n * p.m) return;")],
        v0_ragged,
        "written outside of y",
    ),
    "a shuffle too few": ("quick", [("int offset = WARP / 2;", "int offset = WARP / 4;")], v1_ragged, "v1"),
    "v1: a shuffle for some lanes only": (
        "quick",
        [(V1_SUM, f"if (lane < 16) {V1_SUM}")],
        v1_ragged,
        "96 threads wait at __shfl_xor_sync, 0 wait elsewhere, 160 have left",
    ),
    "weights that are not rounded": (
        "quick",
        [("return __bfloat162float(__float2bfloat16_rn(weight));", "return weight;")],
        v2_normals,
        "v2",
    ),
    "products that are rounded to bf16": (
        "quick",
        [("rounded(w.values[i]) * widened(x.values[i])", "rounded(rounded(w.values[i]) * widened(x.values[i]))")],
        v2_normals,
        "v2",
    ),
    "offsets of 32 bits": (
        "quick",
        [(V1_ROW, V1_ROW.replace("row * p.k", "int(row * p.k)"))],
        v1_large,
        "v1, result",
    ),
    "the number of a result in 32 bits": (
        "quick",
        [("const int64_t result = int64_t(blockIdx.x) * WARPS", "const int64_t result = blockIdx.x * WARPS")],
        v1_large,
        "v1, result",
    ),
    "v5 without the bounds test of its loads": (
        "safe",
        [without(V5_LOAD, "row < rows && ")],
        v5_is_safe,
        "ERROR: AddressSanitizer: heap-",
    ),
    "a launcher that does not look at the address of x": (
        "safe",
        [("is_aligned(p.x) && ", "")],
        misaligned_is_safe,
        "misaligned address",
    ),
    "v1 that reads with a stride": (
        "counted",
        [
            (
                "for (int64_t i = lane; i < p.k; i += WARP)",
                "for (int64_t i = lane * p.k / WARP; i < (lane + 1) * p.k / WARP; i++)",
            )
        ],
        v1_traffic,
        "weight_bytes",
    ),
    "packs that are read element by element": (
        "counted",
        [
            (
                "dot(Pack<W, WIDTH<W>> w, Pack<X, WIDTH<W>> x, float sum)",
                "dot(const Pack<W, WIDTH<W>>& w, const Pack<X, WIDTH<W>>& x, float sum)",
            )
        ],
        v2_traffic,
        "all_sectors",
    ),
    "tiles without padding": (
        "counted",
        [("LD = TILE_K + 8;", "LD = TILE_K;"), (BANK_ASSERT, "static_assert(true,")],
        v5_traffic,
        "conflicts",
    ),
}


@pytest.mark.parametrize("name", HARM)
def test_a_check_notices_harm(name):
    variant, changes, check, message = HARM[name]
    path = library(variant, tuple(changes))
    with pytest.raises((AssertionError, RuntimeError), match=re.escape(message)):
        check(path)


CHECKS = sorted({check.__name__: (check, variant) for variant, _, check, _ in HARM.values()}.items())


@pytest.mark.parametrize(("check", "variant"), [entry for _, entry in CHECKS], ids=[name for name, _ in CHECKS])
def test_the_same_checks_pass_for_the_source_as_it_is(check, variant):
    check(library(variant))


def test_a_change_of_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="the kernels have 0 places with 'no such text'"):
        library("quick", (("no such text", ""),))
