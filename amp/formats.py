"""What fp32, bf16 and fp16 are, and rounding NumPy arrays to them (nearest, ties to even).

A float is sign · 1.mantissa · 2^exponent. fp16 spends its 16 bits on precision (10 mantissa bits, 5 exponent
bits): it overflows at 65504 and loses everything below 6e-8. bf16 spends them on range (8 exponent bits, like
fp32) and keeps 7 mantissa bits. Source: IEEE 754-2019; bf16 is the upper half of an IEEE fp32.
"""

from typing import NamedTuple

import numpy as np

from base.dtypes import Dtype


class Format(NamedTuple):
    """The sizes and limits of a binary floating-point format that has an implicit leading bit and subnormals."""

    name: Dtype
    exponent_bits: int
    mantissa_bits: int  # stored bits, without the implicit leading 1

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def max(self) -> float:
        return (2 - self.eps) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * self.eps


FP32 = Format("fp32", exponent_bits=8, mantissa_bits=23)
BF16 = Format("bf16", exponent_bits=8, mantissa_bits=7)
FP16 = Format("fp16", exponent_bits=5, mantissa_bits=10)
FORMATS: dict[str, Format] = {format.name: format for format in (FP32, BF16, FP16)}


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """Returns the bit patterns of x rounded to bf16. fp32 array -> uint16 array of the same shape."""
    return (_nearest_bf16(x) >> np.uint32(16)).astype(np.uint16).reshape(np.shape(x))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """Returns the values of bf16 bit patterns, exactly. uint16 array -> fp32 array of the same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Returns 32 bits for each number, whose upper half is the nearest bf16. The lower half is not cleared.

    fp32 array -> uint32 array of one dimension or more. To add 0x7fff plus the lowest kept bit carries into
    the kept half exactly if the dropped half is more than one half, or is one half and the number below is
    odd. The carry runs into the exponent, so an overflow becomes inf by itself.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = bits >> np.uint32(16)
    nearest &= np.uint32(1)  # the lowest kept bit
    nearest += np.uint32(0x7FFF)
    nearest += bits
    x = bits.view(np.float32)
    if x.size and np.isnan(x.max()):  # the carry could turn a NaN's mantissa into inf or into -0
        nearest[np.isnan(x)] = 0x7FC00000
    return nearest


def to_fp16(x: np.ndarray) -> np.ndarray:
    """Returns x rounded to fp16. fp32 array -> fp16 array of the same shape.

    From 65520 on the result is inf, as in hardware, without a warning. The arithmetic is on whole arrays,
    since astype(np.float16) goes through them number by number. An fp32 number times 2^-112 has the exponent
    bits of the fp16 number. Then exponent, mantissa and sign only move to their places.
    """
    shape = np.shape(x)
    x = np.ascontiguousarray(x, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = _nearest_fp16(x)
        np.clip(nearest, -65536, 65536, out=nearest)  # 65536 becomes inf; a larger number would become NaN
        nearest *= np.float32(2.0**-112)
    half = nearest.view(np.uint32)
    half >>= np.uint32(13)
    half &= np.uint32(0x7FFF)
    sign = x.view(np.uint32) >> np.uint32(16)
    sign &= np.uint32(0x8000)
    half |= sign
    return half.astype(np.uint16).view(np.float16).reshape(shape)


def from_fp16(half: np.ndarray) -> np.ndarray:
    """Returns the values of an fp16 array, exactly. fp16 array -> fp32 array of the same shape."""
    bits = half.view(np.int16).astype(np.int32)  # copies of the sign, 5 exponent bits, 10 mantissa bits
    bits <<= 13
    bits &= np.int32(-0x70000001)  # only the first copy of the sign stays
    x = bits.view(np.float32)
    x *= np.float32(2.0**112)
    if x.size and not (x.max() < 65536 and x.min() > -65536):  # the shift is wrong for inf and NaN
        return half.astype(np.float32)
    return x


def _nearest_fp16(x: np.ndarray) -> np.ndarray:
    """Returns the nearest numbers with fp16's spacing, ties to even. The sign of a zero may be lost.

    fp32 array -> fp32 array. To add 1.5 · 2^(e + 13) and subtract it again drops all bits below 2^(e - 10),
    since an fp32 number of exponent e + 13 has none below. e is the exponent of x, but at least -14, where
    fp16's subnormal numbers begin, and at most 16, where all is inf.
    """
    shift = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)  # 2^e
    np.clip(shift, np.float32(2.0**-14), np.float32(2.0**16), out=shift)
    shift *= np.float32(1.5 * 2.0**13)
    nearest = x + shift
    nearest -= shift
    return nearest


def bits(x: float, dtype: str) -> str:
    """Returns the bits of x rounded to a format, as text: sign, exponent and mantissa with spaces between."""
    value = np.array(x, dtype=np.float32)
    stored = narrow(value, dtype)
    pattern = stored.view(np.uint32 if dtype == "fp32" else np.uint16)
    text = f"{int(pattern):0{FORMATS[dtype].bits}b}"
    mantissa_start = 1 + FORMATS[dtype].exponent_bits
    return f"{text[0]} {text[1:mantissa_start]} {text[mantissa_start:]}"


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns x rounded to `dtype`: "fp32", "bf16" or "fp16". fp32 array -> fp32 array of the same shape.

    ValueError: `dtype` is another.
    """
    if dtype == "fp32":
        return np.asarray(x, dtype=np.float32)
    if dtype == "bf16":
        bits = _nearest_bf16(x)
        bits &= np.uint32(0xFFFF0000)
        return bits.view(np.float32).reshape(np.shape(x))
    if dtype == "fp16":
        contiguous = np.ascontiguousarray(x, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = _nearest_fp16(contiguous)
            nearest *= np.float32(2.0**112)  # 65536 and above become inf, smaller numbers stay finite
            nearest *= np.float32(2.0**-112)
        bits = nearest.view(np.uint32)
        bits |= contiguous.view(np.uint32) & np.uint32(0x80000000)  # the sign, also of a zero
        return nearest.reshape(np.shape(x))
    raise ValueError(f"unknown format {dtype!r}: use one of {', '.join(FORMATS)}")


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns x as `dtype` stores it: fp32 as it is, bf16 as uint16 bit patterns, fp16 as np.float16."""
    if dtype == "fp32":
        return x
    return to_bf16_bits(x) if dtype == "bf16" else to_fp16(x)


def widen(stored: np.ndarray) -> np.ndarray:
    """Returns the values of an array from `narrow`, exactly, as fp32. The array's type tells its format."""
    if stored.dtype == np.uint16:
        return from_bf16_bits(stored)
    return from_fp16(stored) if stored.dtype == np.float16 else stored
