"""Decoding with a KV cache: the keys and values of read tokens are kept, so a new token costs one vector a layer.

Each weight is then read once for a token, and this reading takes most of the time. Our GEMV (csrc/) reads weights as
bf16, packed once, or as fp32 masters that it rounds on the way. Activations, keys and values stay fp32. A model of
another precision, or one without csrc/, goes through PyTorch's linear on weights that were rounded once.

T new tokens · C channels · V vocabulary · NH heads · HS head size
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp.autocast import LOW_DTYPES
from csrc import build
from model.bf16_linear import bf16_linear
from model.minigpt import Block, MiniGPT


def decoder(gpt: MiniGPT, dtype: str, weights: str) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function: tokens, int64 (1, T) -> fp32 logits (1, V) after the last. It remembers what it has read.

    Where a call's tokens are those of the call before and one more, only that token is computed. Any other tokens are
    read from the start.
    dtype: "fp32", "bf16" or "fp16", of the computation. weights: "bf16" packed or "fp32", for our GEMV, which computes
    the same numbers from both.
    """
    h = cast(list[Block], gpt.h)
    with_our_kernel = dtype == "bf16" and h[0].mlp.c_proj.op is bf16_linear
    linear = build.load().bf16_linear if with_our_kernel else F.linear

    def prepared(weight):
        if with_our_kernel:
            return weight.bfloat16() if weights == "bf16" else weight
        return weight if dtype == "fp32" else weight.to(LOW_DTYPES[dtype]).float()

    def operands(layer: nn.Linear):
        """Weight and bias. The bias too is rounded: by our kernel on load, else here."""
        return prepared(layer.weight), layer.bias if with_our_kernel else prepared(layer.bias)

    config, device = gpt.config, gpt.wte.weight.device
    NH, HS = config.n_head, config.n_embd // config.n_head
    with torch.no_grad():
        blocks = [(block, [operands(layer) for layer in linears(block)]) for block in h]
        head = prepared(gpt.wte.weight)
    cache = torch.zeros(config.n_layer, 2, NH, config.block_size, HS, device=device)  # keys and values
    tokens_in_cache: list[int] = []

    @torch.no_grad()
    def logits(tokens: np.ndarray) -> np.ndarray:
        nonlocal tokens_in_cache
        given = tokens[0].tolist()
        start = len(tokens_in_cache) if given[:-1] == tokens_in_cache else 0
        tokens_in_cache = given
        end = len(given)
        T = end - start
        x = gpt.wte(torch.tensor(given[start:], device=device)) + gpt.wpe.weight[start:end]  # (T, C)
        for (block, (c_attn, attn_c_proj, c_fc, mlp_c_proj)), (keys, values) in zip(blocks, cache, strict=True):
            qkv = linear(block.ln_1(x), *c_attn).view(T, 3, NH, HS)
            q, k, v = qkv.permute(1, 2, 0, 3)  # (NH, T, HS) each
            keys[:, start:end], values[:, start:end] = k, v
            y = F.scaled_dot_product_attention(q, keys[:, :end], values[:, :end], is_causal=T > 1)  # (NH, T, HS)
            x = x + linear(y.transpose(0, 1).reshape(T, -1), *attn_c_proj)  # (T, C)
            y = F.gelu(linear(block.ln_2(x), *c_fc), approximate="tanh")  # (T, 4C)
            x = x + linear(y, *mlp_c_proj)  # (T, C)
        return linear(gpt.ln_f(x[-1:]), head).cpu().numpy()  # (1, V)

    return logits


def linears(block: Block) -> tuple[nn.Linear, ...]:
    """The linear layers of a transformer block, in the order in which they run."""
    return block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
