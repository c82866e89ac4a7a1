"""What a forward pass keeps for the backward pass, counted tensor by tensor and without computing anything.

Fake tensors have shapes and storages but no content, so that GPT-2's gigabytes are counted in a second on any
laptop, 16-bit autocast included. They are fake CPU tensors. memory() in model/cost.py has the formula, for
GPUs too.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp.autocast import autocast
from model.config import GPTConfig
from model.minigpt import MiniGPT


def activations(config: GPTConfig, batch_size: int, dtype: str) -> int:
    """Returns the bytes kept that grow with the batch: all but weights and their 16-bit copies."""
    with FakeTensorMode():
        gpt = MiniGPT(config)
        return batch_size * (kept_bytes(gpt, 2, dtype) - kept_bytes(gpt, 1, dtype))


def kept_bytes(gpt: MiniGPT, batch_size: int, dtype: str) -> int:
    """Returns the bytes of every storage that autograd holds on to after a forward pass."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()  # by its address: q, k and v are views of one
        return tensor

    x, y = (torch.zeros(batch_size, gpt.config.block_size, dtype=torch.int64) for _ in "xy")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast("cpu", dtype):
        loss = gpt(x, y)  # holds the graph, so that no address is used twice
    del loss
    return sum(kept.values())
