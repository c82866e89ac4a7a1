"""The CUDA kernels, compiled by g++ and run on the CPU: their values, their launcher, their safety, their traffic.

The checks are in kernel_checks.py; test_cuda_changes.py shows that they can fail.
"""

import re

import numpy as np
import pytest

from amp.formats import to_bf16_bits
from benchmarks import traffic
from csrc.cuda_on_cpu import emulator
from csrc.cuda_on_cpu.emulator import counters, library, linear, version_for
from tests.kernel_checks import (
    TYPES,
    check_integers,
    check_large,
    check_normals,
    check_orders,
    check_sanitizers,
    check_traffic,
    everything_once,
    integers,
    loaded,
    normals,
    product,
    shifted,
    sparse,
    stored,
)

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ on Linux")


# ---- values

# n, m, k: every k from 1 to 33, and sizes a little below and above those of a warp, a block and a tile
NARROW = [(2, 3, k) for k in range(1, 34)] + [(1, 31, 127), (3, 1, 769)]
WIDE = [(1, 1, 8), (1, 65, 768), (1, 3, 776), (2, 31, 24), (3, 65, 40), (4, 1, 264), (5, 3, 16), (6, 7, 32), (7, 65, 8)]
WIDE += [(8, 31, 136), (9, 65, 72), (17, 3, 768), (64, 66, 64), (129, 68, 200)]


@pytest.mark.parametrize("version", range(6))
def test_small_integers_give_the_same_bits_in_every_version(version):
    for shape in WIDE + (NARROW if version < 2 else []):
        if shape[0] * shape[1] < 1000 or version in (0, 5):  # the larger ones would add time but no new case
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


# (m, k), multiprocessors, blocks of v3, blocks of v4
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
        return version_for(x, weight, **device)

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


@pytest.mark.parametrize("which", ["x", "weight", "y"])
def test_misaligned_arrays_take_v1_and_are_refused_by_the_versions_with_wide_loads(which):
    x, weight, bias = integers(1, 9, 64, "bf16", "fp32")
    exact = stored(product(x, weight, bias)[0].astype(np.float32), "bf16")
    for elements in (1, 2, 8):
        arrays = {"x": x, "weight": weight, "y": np.zeros((1, 9), np.uint16)}
        arrays[which] = shifted(arrays[which], elements)
        aligned = arrays[which].ctypes.data % 16 == 0
        assert version_for(**arrays) == (3 if aligned else 1)
        np.testing.assert_array_equal(linear(**arrays, bias=bias), exact)
        if not aligned:
            for version in (2, 3, 4, 5):
                with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
                    linear(**arrays, version=version)


def test_a_version_refuses_a_problem_that_it_cannot_take():
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
def test_an_empty_k_gives_the_bias_and_an_empty_y_launches_nothing(version):
    path, n = library(), 1 if version in (2, 3) else 3
    x, weight, bias = normals(n, 5, 0, "bf16", "fp32")
    np.testing.assert_array_equal(linear(x, weight, None, version), np.zeros((n, 5), np.uint16))
    np.testing.assert_array_equal(linear(x, weight, bias, version), [to_bf16_bits(bias)] * n)
    assert counters(path).launches == 1
    for n, m in ((0, 5), (3, 0)):
        assert linear(*normals(n, m, 8, "bf16", "fp32"), version).shape == (n, m)
        assert counters(path).launches == 0


@pytest.mark.parametrize("version", range(6))
def test_nan_and_inf_reach_the_results_that_they_belong_to(version):
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


def test_address_and_undefined_behaviour_sanitizers_find_nothing():
    check_sanitizers(library("safe"), everything_once)


# ---- traffic


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_from_v2_on_every_weight_moves_once_without_bank_conflicts(version):
    check_traffic(library("counted"), version)


def test_v0_moves_8_or_16_times_the_bytes_of_the_weights_and_v1_moves_them_once():
    rows = {(row["version"], row["weights"]): row for row in traffic.measured(library("counted"), [0, 1])}
    assert rows[0, "fp32"]["weight_bytes"] == 8
    assert rows[0, "bf16"]["weight_bytes"] == 16
    assert rows[1, "fp32"]["weight_bytes"] == rows[1, "bf16"]["weight_bytes"] == 1


def test_fp32_vectors_beside_bf16_weights_take_two_requests_of_half_used_sectors():
    x, weight, _ = normals(1, 64, 1024, "fp32", "bf16")
    x, weight = emulator.aligned(x), emulator.aligned(weight)
    for version in (2, 3, 4):  # eight floats for each eight weights: the second 16 bytes come out of L1
        linear(x, weight, None, version, path=library("counted"))
        count = counters(library("counted"))
        assert count.sectors[1] * 32 == weight.nbytes
        assert count.sectors[0] == 2 * count.perfect[0]


def test_the_table_of_traffic_has_a_line_for_each_version_and_type():
    rows = traffic.measured(library("counted"), [0, 5], m=64, k=128)
    lines = traffic.markdown(rows).splitlines()
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1
    assert [re.findall(r"v\d", line) for line in lines[2:]] == [["v0"], ["v0"], ["v5"], ["v5"]]
