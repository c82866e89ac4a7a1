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
    """fp32 array -> uint16 array of the same shape: the bf16 bit patterns, rounded to nearest even.

    Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when the dropped half is above one half,
    or equal to it with an odd neighbour below. The carry runs into the exponent, so overflow becomes inf by itself.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(bits.view(np.float32))
    if nan.any():  # the carry could turn a NaN's mantissa into inf or into -0
        rounded[nan] = 0x7FC0
    return rounded.reshape(np.shape(x))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """uint16 array of bf16 bit patterns -> fp32 array of the same shape. Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_fp16(x: np.ndarray) -> np.ndarray:
    """fp32 array -> fp16 array, nearest even; beyond 65520 the result is inf, as in hardware, without a warning."""
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float32).astype(np.float16)


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
        return from_bf16_bits(to_bf16_bits(x))
    if dtype == "fp16":
        return to_fp16(x).astype(np.float32)
    raise ValueError(f"unknown format {dtype!r}: use one of {', '.join(FORMATS)}")
