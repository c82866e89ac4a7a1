"""autocast: the block in which ops compute in 16 bits; and the weights that are trained in it.

The table of amp/policy.py says what each op rounds; `op` in tensor.py obeys it. Values stay in fp32 arrays: a
tensor core, too, computes products of 16-bit numbers and sums them in fp32.
"""

from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike

from amp import policy
from amp.formats import FORMATS, widen
from base.dtypes import Dtype
from engine.tensor import Tensor
from optim.adamw import Parameter


@contextmanager
def autocast(dtype: str, enabled: bool = True):
    """Makes `dtype` the compute dtype of the block: "bf16", "fp16", or "fp32", which rounds nothing.

    Blocks nest, and enabled=False inside one means fp32. After the block, also after an exception, the former
    dtype returns. ValueError for another dtype.
    """
    if dtype not in FORMATS:
        raise ValueError(f"unknown compute dtype {dtype!r}: use one of {', '.join(FORMATS)}")
    with policy.computing(dtype if enabled else "fp32"):
        yield


class Weight(Tensor, Parameter):
    """A leaf that AdamW trains: the fp32 master weight `.data`, and its 16-bit copy `.shadow` for products.

    The shadow is rounded once a step, by AdamW, and not by every product.
    """

    def __init__(self, data: ArrayLike, dtype: Dtype = "fp32"):
        Tensor.__init__(self, data, requires_grad=True)
        Parameter.__init__(self, self.data, dtype)

    def data_in(self, dtype: str) -> np.ndarray:
        return widen(self.shadow) if dtype == self.dtype else super().data_in(dtype)
