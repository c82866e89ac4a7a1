"""The table of amp/policy.py applied to the engine: it rounds what goes into a product, what comes out, and gradients.

Values live in fp32 arrays. A product of rounded fp32 numbers that is summed in fp32 is what a tensor core computes.
"""

from contextlib import contextmanager
from functools import wraps

import numpy as np

from amp import policy
from amp.formats import FORMATS, round_to, widen
from engine.tensor import Tensor, record
from optim.adamw import Parameter


@contextmanager
def autocast(dtype: str, enabled: bool = True):
    """Ops inside the block obey the table with `dtype` as the low one: "bf16" or "fp16", and "fp32" rounds nothing.

    Blocks nest; enabled=False inside one is fp32. What was active before comes back, also after an exception.
    """
    if dtype not in FORMATS:
        raise ValueError(f"unknown compute dtype {dtype!r}: use one of {', '.join(FORMATS)}")
    with policy.computing(dtype if enabled else "fp32"):
        yield


class Weight(Tensor, Parameter):
    """A leaf that AdamW trains: the fp32 master weight, and its 16-bit shadow for products."""

    def __init__(self, data, dtype: str = "fp32"):
        Tensor.__init__(self, data, requires_grad=True)
        Parameter.__init__(self, self.data, dtype)


def rounded(x: Tensor, low: str) -> Tensor:
    """Rounds, and rounds the gradient on its way back. fp64 passes, as in PyTorch's autocast."""
    if x.data.dtype == np.float64:
        return x
    shadowed = isinstance(x, Weight) and x.dtype == low
    return record(widen(x.shadow) if shadowed else round_to(x.data, low), (x,), lambda dy: (round_to(dy, low),))


def op(row: str | None = None):
    """Makes an op of a function: it obeys a row of the table, by default that of fp32, and names itself in errors."""
    rule = policy.TABLE[row] if row else policy.EXACT

    def decorate(function):
        @wraps(function)
        def run(x, *args, **kwargs):
            args = (x if isinstance(x, Tensor) else Tensor(x), *args)
            low = policy.compute_dtype()
            if low != "fp32" and rule.operands == policy.LOW:
                args = tuple(rounded(arg, low) if isinstance(arg, Tensor) else arg for arg in args)
            try:
                result = function(*args, **kwargs)
            except ValueError as error:  # NumPy's
                shapes = " and ".join(str(arg.shape) for arg in args if isinstance(arg, Tensor))
                raise ValueError(f"{function.__name__}: shapes {shapes} do not fit: {error}") from None
            return rounded(result, low) if low != "fp32" and rule.result == policy.LOW else result

        return run

    return decorate
