"""Decoding with a KV cache: keys and values of tokens that were read are kept, so a new token costs one vector a layer.

Then each weight is read once a token, and that is what the time goes into: our GEMV (csrc/) reads them as bf16, packed
once, or as fp32 masters that it rounds on the way. Activations, keys and values stay fp32. A model of another
precision, or without csrc/, goes through PyTorch's linear on weights that were rounded once.

T new tokens · C channels · V vocabulary · NH heads · HS head size
"""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from amp.autocast import LOW_DTYPES
from csrc import build
from model.bf16_linear import bf16_linear


def decoder(gpt, dtype: str, weights: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function of tokens, int64 (1, T) -> fp32 logits (1, V) after the last, that remembers what it has read.

    Tokens that go on from the call before cost only what is new; any others are read from the start.
    dtype: of the computation. weights: "bf16" packed or "fp32", for our GEMV; its numbers are the same.
    """
    own = dtype == "bf16" and gpt.h[0].mlp.c_proj.op is bf16_linear
    linear = build.load().bf16_linear if own else F.linear

    def prepared(weight):
        if own:
            return weight.bfloat16() if weights == "bf16" else weight
        return weight if dtype == "fp32" else weight.to(LOW_DTYPES[dtype]).float()

    def weights_of(part):  # the bias too is an operand, which our kernel rounds on load
        return prepared(part.weight), part.bias if own else prepared(part.bias)

    config, device = gpt.config, gpt.wte.weight.device
    NH, HS = config.n_head, config.n_embd // config.n_head
    with torch.no_grad():
        layers = [(layer, [weights_of(part) for part in linears(layer)]) for layer in gpt.h]
        head = prepared(gpt.wte.weight)
    cache = torch.zeros(config.n_layer, 2, NH, config.block_size, HS, device=device)
    read: list[int] = []

    @torch.no_grad()
    def logits(tokens):
        nonlocal read
        given = tokens[0].tolist()
        start = len(read) if given[:-1] == read else 0  # one more than last time, or from the start
        read = given
        end = len(given)
        T = end - start
        x = gpt.wte(torch.tensor(given[start:], device=device)) + gpt.wpe.weight[start:end]  # (T, C)
        for (layer, (qkv, out, up, down)), (keys, values) in zip(layers, cache, strict=True):
            heads = linear(layer.ln_1(x), *qkv).view(T, 3, NH, HS)
            q, k, v = heads.permute(1, 2, 0, 3)  # (NH, T, HS) each
            keys[:, start:end], values[:, start:end] = k, v
            y = F.scaled_dot_product_attention(q, keys[:, :end], values[:, :end], is_causal=T > 1)  # (NH, T, HS)
            x = x + linear(y.transpose(0, 1).reshape(T, -1), *out)  # (T, C)
            y = F.gelu(linear(layer.ln_2(x), *up), approximate="tanh")  # (T, 4C)
            x = x + linear(y, *down)  # (T, C)
        return linear(gpt.ln_f(x[-1:]), head).cpu().numpy()  # (1, V)

    return logits


def linears(layer):
    return layer.attn.c_attn, layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj
