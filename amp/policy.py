"""Which operation computes in which precision, and which compute dtype is active. Imports no torch.

The table is the usual recipe of mixed precision (Micikevicius et al. 2018, "Mixed Precision Training").
Matrix products take most of the time, and their rounding errors average out: they take 16-bit operands and
accumulate in fp32. All that sums, exponentiates, normalises or lives from step to step stays in fp32.

There are four ways to compute. Two of them read the table: PyTorch with emulation (amp/autocast.py) and the
engine (engine/autocast.py). The other two have the same rules without reading it: PyTorch's native
torch.autocast has its own lists of operations, and the NumPy backend rounds where its layers say so
(model/numpy_layers.py). tests/test_policy.py measures all four and compares them with the table. They differ
from it on purpose in four places:

- GELU: the table speaks of its inside. Under torch.autocast and in NumPy it reads 16 bits and writes 16 bits,
  as the linears around it do. With emulation and in the engine its result stays in fp32; the next linear
  rounds its operand.
- Attention: NumPy rounds the softmax's probabilities, since they are an operand of the second product; fused
  kernels for GPUs do so too. On a CPU the model in PyTorch and the engine leave them in fp32.
- Gradients of weights: NumPy's two threads each compute the products of half of a batch, and the sum of both
  is rounded. The engine's two threads round each half, so that a sum of two 16-bit numbers reaches `.grad`.
- Gradients of attention's inputs: in NumPy they are rounded where the linear before attention reads them.

The logits are the result of a product, so they are rounded. Then they are widened, and the cross-entropy is
fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

Precision = Literal["low", "fp32"]
LOW: Literal["low"] = "low"  # the active compute dtype: bf16 or fp16; fp32 where nothing lower is active


class Rule(NamedTuple):
    """The precisions of one family of operations: LOW or "fp32"."""

    operands: Precision  # inputs, weight and bias are rounded to it before the operation
    accumulate: Precision
    result: Precision
    grad_input: Precision
    grad_weight: Precision  # accumulated in fp32, rounded to this precision, added into an fp32 .grad


PRODUCT = Rule(operands=LOW, accumulate="fp32", result=LOW, grad_input=LOW, grad_weight=LOW)
EXACT = Rule(operands="fp32", accumulate="fp32", result="fp32", grad_input="fp32", grad_weight="fp32")

TABLE = {
    "linear": PRODUCT,
    "matmul": PRODUCT,
    "attention": PRODUCT,  # its two products; the softmax between them is fp32
    "softmax": EXACT,
    "layer_norm": EXACT,
    "gelu": EXACT,  # its inside
    "cross_entropy": EXACT,
    "reduction": EXACT,
    "residual": EXACT,
    "embedding": EXACT,
    "optimizer": EXACT,  # master weights, moments, loss scale, clipping
}

_active: ContextVar[str] = ContextVar("compute dtype", default="fp32")


def compute_dtype() -> str:
    """Returns the compute dtype that is active in this thread: "fp32", "bf16" or "fp16"."""
    return _active.get()


@contextmanager
def computing(dtype: str) -> Iterator[None]:
    """Makes `dtype` the compute dtype in the block. The one before returns after it, also on an exception."""
    token = _active.set(dtype)
    try:
        yield
    finally:
        _active.reset(token)
