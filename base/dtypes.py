"""The names of the precisions, for every folder. Their facts and how numbers are rounded to them: amp/formats.py."""

from typing import Literal, get_args

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
