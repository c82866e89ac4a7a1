"""Rounding to bf16 and fp16 in NumPy against torch, bit by bit; and the facts of the formats."""

import warnings

import numpy as np
import pytest
import torch

from amp import formats
from amp.formats import FORMATS, bits, from_bf16_bits, from_fp16, narrow, round_to, to_bf16_bits, to_fp16, widen

pytestmark = pytest.mark.filterwarnings("error")  # NumPy tells overflow and invalid values by warnings

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOW = ("bf16", "fp16")
EVERY_PATTERN = np.arange(2**16, dtype=np.uint16)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1.0, -1.5, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1e-40], "f4")


def with_neighbours(points: np.ndarray) -> np.ndarray:
    """The fp32 numbers next to each point join it: its bits one up and one down."""
    bits = points.view(np.uint32)
    return np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)


def around_every_bf16_value() -> np.ndarray:
    """All 65536 bf16 values, the midpoints to their successors, and the neighbours of both. NaNs included."""
    values = EVERY_PATTERN.astype(np.uint32) << np.uint32(16)
    midpoints = values + np.uint32(0x8000)  # a bf16 is the upper half of an fp32; here the lower is at its middle
    return with_neighbours(np.concatenate([values, midpoints]).view(np.float32))


def around_every_fp16_value() -> np.ndarray:
    """All 65536 fp16 values, the midpoints between them, and the neighbours of both. NaNs included."""
    values = EVERY_PATTERN.view(np.float16).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    ladder = np.array([-65536, *finite, 65536], np.float64)  # with the numbers that a larger exponent would give
    midpoints = ((ladder[:-1] + ladder[1:]) / 2).astype(np.float32)
    return with_neighbours(np.concatenate([values, midpoints]))


def by_torch(x: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(x.copy()).to(TORCH[dtype]).float().numpy()


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal as bits, so that -0 is not 0; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert not len(wrong), (
        f"{len(wrong)} wrong, first {x[wrong[0]]!r}: {actual[wrong[0]]!r}, torch {expected[wrong[0]]!r}"
    )


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("points", [around_every_bf16_value, around_every_fp16_value])
def test_every_value_its_neighbours_and_all_midpoints_round_as_in_torch(points, dtype):
    x = points()
    assert_same_bits(round_to(x, dtype), by_torch(x, dtype), x)


@pytest.mark.parametrize("dtype", LOW)
def test_random_bit_patterns_round_as_in_torch(dtype):
    x = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    assert_same_bits(round_to(x, dtype), by_torch(x, dtype), x)


def test_bf16_bits_are_those_of_torch():
    x = around_every_bf16_value()
    x = x[~np.isnan(x)]
    expected = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bf16_bits(x), expected)


def test_bf16_bits_survive_the_way_to_fp32_and_back():
    values = from_bf16_bits(EVERY_PATTERN)
    numbers = ~np.isnan(values)
    assert values.dtype == np.float32
    assert numbers.sum() == 2**16 - 2 * 127  # all but the NaNs: exponent full, mantissa not 0
    np.testing.assert_array_equal(to_bf16_bits(values)[numbers], EVERY_PATTERN[numbers])


@pytest.mark.parametrize("dtype", LOW)
def test_nan_stays_nan_whatever_its_payload(dtype):
    payloads = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFF800001, 0xFFFF8000, 0xFFFFFFFF]
    nans = np.array(payloads, np.uint32).view(np.float32)
    assert np.isnan(nans).all()
    assert np.isnan(round_to(nans, dtype)).all()
    for n, payload in enumerate(payloads):  # NumPy warns of integers that wrap around in an array of no dimensions only
        assert np.isnan(round_to(nans[n : n + 1].reshape(()), dtype)), hex(payload)


@pytest.mark.parametrize("dtype", LOW)
def test_infinities_and_signed_zeros_stay(dtype):
    x = np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)
    assert_same_bits(round_to(x, dtype), x, x)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (65504.0, 65504.0),
        (65519.99, 65504.0),
        (65520.0, np.inf),  # the midpoint to 65536, which fp16 does not have, goes to even: away
        (-65519.99, -65504.0),
        (-65520.0, -np.inf),
        (1e38, np.inf),
        (2.0**-24, 2.0**-24),  # the smallest subnormal
        (2.0**-25, 0.0),  # half of it goes to even
        (2.0**-25 * 1.001, 2.0**-24),
        (-(2.0**-25), -0.0),
        (3 * 2.0**-25, 2 * 2.0**-24),
    ],
)
def test_fp16_overflows_and_underflows_where_ieee_says(x, expected):
    rounded = round_to(np.array([x], np.float32), "fp16")
    assert_same_bits(rounded, np.array([expected], np.float32), np.array([x]))


def test_bf16_overflows_half_a_step_above_its_maximum():
    largest = np.float32(formats.BF16.max)
    tie = np.array([0x7F7F8000], np.uint32).view(np.float32)
    below = np.nextafter(tie, np.float32(0))
    assert round_to(below, "bf16")[0] == largest
    assert round_to(tie, "bf16")[0] == np.inf


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_twice_is_rounding_once(dtype):
    once = round_to(around_every_fp16_value(), dtype)
    assert_same_bits(round_to(once, dtype), once, once)


def test_fp32_is_left_as_it_is():
    assert_same_bits(round_to(SPECIAL, "fp32"), SPECIAL, SPECIAL)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_argument_is_not_changed(dtype):
    x = around_every_bf16_value()
    before = x.copy()
    round_to(x, dtype)
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
def test_views_round_like_their_copies(dtype):
    grid = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
    for view in (grid.T, grid[::2, ::-1], grid[:, 3], np.broadcast_to(grid[0], (4, 8))):
        assert not view.flags.c_contiguous
        np.testing.assert_array_equal(round_to(view, dtype), round_to(view.copy(), dtype))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 2, 3)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_shapes_stay(dtype, shape):
    rounded = round_to(np.full(shape, 1.0000001, np.float32), dtype)
    assert np.shape(rounded) == shape
    assert rounded.dtype == np.float32
    assert (np.abs(rounded - 1) < 1e-6).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_bits_have_the_shape_of_their_numbers(shape):
    for value in (1.0, np.nan):
        bits = to_bf16_bits(np.full(shape, value, np.float32))
        assert np.shape(bits) == shape
        assert bits.dtype == np.uint16
        assert np.shape(from_bf16_bits(bits)) == shape


def test_fp16_arrays_are_those_of_torch():
    x = around_every_fp16_value()
    x = x[~np.isnan(x)]
    expected = torch.from_numpy(x).half().numpy()
    np.testing.assert_array_equal(to_fp16(x).view(np.uint16), expected.view(np.uint16))


def test_every_fp16_pattern_becomes_its_value():
    half = EVERY_PATTERN.view(np.float16)
    finite = np.isfinite(half)
    for some in (half, half[finite]):  # with inf and NaN, and by arithmetic alone
        expected = torch.from_numpy(some.copy()).float().numpy()
        assert_same_bits(from_fp16(some), expected, expected)


@pytest.mark.parametrize(("dtype", "kept"), [("fp32", np.float32), ("bf16", np.uint16), ("fp16", np.float16)])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_narrow_keeps_what_round_to_gives(dtype, kept, shape):
    x = np.full(shape, 1.0000001, np.float32)
    narrowed = narrow(x, dtype)
    assert narrowed.dtype == kept
    assert narrowed.shape == widen(narrowed).shape == shape
    np.testing.assert_array_equal(widen(narrowed), round_to(x, dtype))


def test_fp64_passes_narrow_and_widen():
    x = np.array([1 / 3])
    assert widen(narrow(x, "fp32")) is x


def test_fp16_results_are_fp16():
    assert to_fp16(np.array([1.0, 1e9], np.float32)).dtype == np.float16


@pytest.mark.parametrize("dtype", ["fp8", "float16", "BF16", ""])
def test_an_unknown_format_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"unknown format '{dtype}'.*fp32, bf16, fp16"):
        round_to(SPECIAL, dtype)


def test_warnings_would_be_seen():
    with pytest.raises(RuntimeWarning):
        np.array([1e9], np.float32).astype(np.float16)
    with warnings.catch_warnings(record=True) as seen:
        to_fp16(np.array([1e9], np.float32))
    assert not seen


@pytest.mark.parametrize("name", FORMATS)
def test_facts_are_those_of_torch(name):
    ours, theirs = FORMATS[name], torch.finfo(TORCH[name])
    assert ours.name == name
    assert ours.bits == theirs.bits
    assert ours.max == theirs.max
    assert ours.eps == theirs.eps
    assert ours.smallest_normal == theirs.smallest_normal
    pattern_1 = torch.tensor(1, dtype={16: torch.int16, 32: torch.int32}[ours.bits])
    assert ours.smallest_subnormal == pattern_1.view(TORCH[name]).item()


@pytest.mark.parametrize(
    ("x", "dtype", "shown"),
    [
        (0.1, "bf16", "0 01111011 1001101"),
        (-2.0, "fp16", "1 10000 0000000000"),
        (70000.0, "fp16", "0 11111 0000000000"),
        (1.5, "fp32", "0 01111111 1" + "0" * 22),
        (1e-45, "fp32", "0 00000000 " + "0" * 22 + "1"),
    ],
)
def test_bits_are_sign_exponent_and_mantissa(x, dtype, shown):
    assert bits(x, dtype) == shown
