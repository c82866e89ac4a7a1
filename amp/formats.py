"""What fp32, bf16 and fp16 are, and rounding NumPy arrays to them (nearest, ties to even).

A float is sign · 1.mantissa · 2^exponent. fp16 spends its 16 bits on precision (10 mantissa bits, 5 exponent bits): it
overflows at 65504 and loses everything below 6e-8. bf16 spends them on range (8 exponent bits, like fp32) and keeps 7
mantissa bits. Source: IEEE 754-2019; bf16 is the upper half of an IEEE fp32.
"""

from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """Facts of a binary floating-point format with an implicit leading bit and gradual underflow."""

    name: str
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
        """Distance from 1 to the next larger number."""
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
FORMATS = {f.name: f for f in (FP32, BF16, FP16)}


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 array -> uint16 array of the same shape: the bf16 bit patterns, rounded to nearest even."""
    return (_nearest_bf16(x) >> np.uint32(16)).astype(np.uint16).reshape(np.shape(x))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """uint16 array of bf16 bit patterns -> fp32 array of the same shape. Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nearest_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 array -> uint32 array, of one dimension at least: bits whose upper half is the nearest bf16.

    Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when the dropped half is above one half,
    or equal to it with an odd neighbour below. The carry runs into the exponent, so overflow becomes inf by itself.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    x = bits.view(np.float32)
    if x.size and np.isnan(x.max()):  # the carry could turn a NaN's mantissa into inf or into -0
        rounded[np.isnan(x)] = 0x7FC00000
    return rounded


def to_fp16(x: np.ndarray) -> np.ndarray:
    """fp32 array -> fp16 array, nearest even; beyond 65520 the result is inf, as in hardware, without a warning.

    By arithmetic on whole arrays, since astype(np.float16) goes through them number by number. Times 2^-112, an fp32
    has the exponent bits of the fp16; what remains is to move exponent, mantissa and sign to their places.
    """
    shape, x = np.shape(x), np.ascontiguousarray(x, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = _nearest_fp16(x)
        np.clip(nearest, -65536, 65536, out=nearest)  # which becomes inf; anything larger would become NaN
        nearest *= np.float32(2.0**-112)
    half = nearest.view(np.uint32)
    half >>= np.uint32(13)
    half &= np.uint32(0x7FFF)
    sign = x.view(np.uint32) >> np.uint32(16)
    sign &= np.uint32(0x8000)
    half |= sign
    return half.astype(np.uint16).view(np.float16).reshape(shape)


def from_fp16(half: np.ndarray) -> np.ndarray:
    """fp16 array -> fp32 array of the same shape. Exact; the way back of to_fp16."""
    bits = half.view(np.int16).astype(np.int32)  # 5 exponent bits and 10 mantissa bits; the sign fills all above
    bits <<= 13
    bits &= np.int32(-0x70000001)  # of the sign's copies only the first stays
    x = bits.view(np.float32)
    x *= np.float32(2.0**112)
    if x.size and not (x.max() < 65536 and x.min() > -65536):  # inf and NaN have an exponent that is no number's
        return half.astype(np.float32)
    return x


def _nearest_fp16(x: np.ndarray) -> np.ndarray:
    """fp32 array -> fp32 array: the nearest number with fp16's spacing, even at a tie; of zeros the sign may be lost.

    Adding and subtracting 1.5 · 2^(e + 13) drops what an fp32 at exponent e + 13 has no bits for, all below 2^(e - 10).
    e is the exponent of x, but not below -14, where fp16's subnormals begin, nor above 16, where all is inf.
    """
    shift = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)  # 2^e
    np.clip(shift, np.float32(2.0**-14), np.float32(2.0**16), out=shift)
    shift *= np.float32(1.5 * 2.0**13)
    nearest = x + shift
    nearest -= shift
    return nearest


def bits(x: float, dtype: str) -> str:
    """The bits of x rounded to a format, as text: sign, exponent, mantissa, with spaces between."""
    f, value = FORMATS[dtype], np.array(x, dtype=np.float32)
    if dtype == "bf16":
        pattern = to_bf16_bits(value)
    else:
        pattern = value.view(np.uint32) if dtype == "fp32" else to_fp16(value).view(np.uint16)
    text = f"{int(pattern):0{f.bits}b}"
    return f"{text[0]} {text[1 : 1 + f.exponent_bits]} {text[1 + f.exponent_bits :]}"


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 array -> fp32 array whose values are representable in `dtype` ("fp32", "bf16" or "fp16")."""
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
        bits, sign = nearest.view(np.uint32), contiguous.view(np.uint32) & np.uint32(0x80000000)
        bits |= sign
        return nearest.reshape(np.shape(x))
    raise ValueError(f"unknown format {dtype!r}: use one of {', '.join(FORMATS)}")


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 array -> how `dtype` keeps it: fp32 as it is, bf16 as uint16 bit patterns, fp16 as np.float16."""
    return x if dtype == "fp32" else to_bf16_bits(x) if dtype == "bf16" else to_fp16(x)


def widen(kept: np.ndarray) -> np.ndarray:
    """The way back of `narrow`, by the type of the array: an fp32 array to compute with. Exact."""
    if kept.dtype == np.uint16:
        return from_bf16_bits(kept)
    return from_fp16(kept) if kept.dtype == np.float16 else kept
