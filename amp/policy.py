"""Which operation runs in which precision, and which precision is active right now. No torch in this file.

Every backend obeys this table. It is the usual recipe of mixed precision (Micikevicius et al. 2018, "Mixed Precision
Training"): matrix products, which cost the time and whose rounding errors average out, take 16-bit operands and
accumulate in fp32; whatever sums, exponentiates, normalises or lives from step to step stays in fp32.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

LOW = "low"  # the active compute dtype: bf16 or fp16, and fp32 when nothing lower is active


class Rule(NamedTuple):
    """Precisions of one family of operations: LOW or "fp32". Gradients follow the same rule as what they belong to."""

    operands: str  # inputs, weight and bias, rounded before the operation
    accumulate: str
    result: str
    grad_input: str
    grad_weight: str  # the product is accumulated in fp32, rounded to this, then added into an fp32 .grad


PRODUCT = Rule(operands=LOW, accumulate="fp32", result=LOW, grad_input=LOW, grad_weight=LOW)
EXACT = Rule(operands="fp32", accumulate="fp32", result="fp32", grad_input="fp32", grad_weight="fp32")

TABLE = {
    "linear": PRODUCT,
    "matmul": PRODUCT,
    "attention": PRODUCT,  # both products; the softmax between them is fp32, and emulation leaves it so
    "softmax": EXACT,
    "layer_norm": EXACT,
    "gelu": EXACT,  # its inside; a fused GELU reads and writes what its neighbours hand it
    "cross_entropy": EXACT,
    "reduction": EXACT,
    "residual": EXACT,
    "embedding": EXACT,
    "optimizer": EXACT,  # moments, master weights, loss scale, clipping
}

_active: ContextVar[str] = ContextVar("compute dtype", default="fp32")


def compute_dtype() -> str:
    """The compute dtype that is active here: "fp32", "bf16" or "fp16"."""
    return _active.get()


@contextmanager
def computing(dtype: str):
    """Makes `dtype` the compute dtype inside the block; what was active before returns after it, also on exceptions."""
    token = _active.set(dtype)
    try:
        yield
    finally:
        _active.reset(token)
