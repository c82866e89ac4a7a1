"""The GPT in NumPy, forward and backward by hand. Its layers: numpy_layers.py. The backend: numpy_backend.py.

B batch · T time · N tokens (B · T) · C channels · V vocabulary · L layers · NH heads
"""

from typing import NamedTuple

import numpy as np

from amp.formats import narrow, widen
from model.config import HEAD, TIED
from model.numpy_layers import (
    attention,
    attention_backward,
    cross_entropy,
    cross_entropy_backward,
    dropout,
    dropout_backward,
    embedding,
    embedding_backward,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
)

# ---- the model: pure functions of arrays


class BlockCache(NamedTuple):
    """Results of a block's forward pass that its backward pass needs.

    "narrow" is the storage of amp/formats.py: 16 bits an element in mixed precision. All other numbers here are fp32.
    """

    ln_1: tuple[np.ndarray, np.ndarray]  # x̂ (N, C) and rstd (N, 1), fp32
    a: np.ndarray  # (N, C), narrow, into c_attn
    qkv: np.ndarray  # (N, 3C), narrow
    p: np.ndarray  # (B, NH, T, T), narrow, attention's probabilities before dropout
    o: np.ndarray  # (N, C), narrow, into attention's c_proj
    ln_2: tuple[np.ndarray, np.ndarray]  # as ln_1
    m: np.ndarray  # (N, C), narrow, into c_fc
    h: np.ndarray  # (N, 4C), narrow, into GELU
    g: np.ndarray  # (N, 4C), narrow, into the MLP's c_proj
    masks: tuple[np.ndarray | None, ...]  # bool: what the dropouts of p, of attention and of the MLP kept; None: all


class Cache(NamedTuple):
    """Results of the whole forward pass that the backward pass needs."""

    tokens: np.ndarray  # (B, T), whole numbers
    targets: np.ndarray  # (N,), whole numbers
    mask: np.ndarray | None  # (N, C), bool: what the embedding's dropout kept; None: all
    blocks: list[BlockCache]
    ln_f: tuple[np.ndarray, np.ndarray]  # x̂ (N, C) and rstd (N, 1), fp32
    f: np.ndarray  # (N, C), narrow, into the head
    p: np.ndarray  # (N, V), fp32, the probabilities of the next token


def block(x, w, B, config, low, random):  # (N, C)
    """x + attention(LayerNorm(x)), then the same with the MLP, (N, C); and the block's cache.

    `w` takes a weight's name within the block. `low` is the compute dtype, `random` what dropout draws from.
    """
    NH, rate = config.n_head, config.dropout
    a, ln_1 = layer_norm(x, w("ln_1.weight"), w("ln_1.bias"))
    a = narrow(a, low)
    qkv = linear(a, w("attn.c_attn.weight"), w("attn.c_attn.bias"), low)  # (N, 3C)
    o, p, mask_p = attention(qkv, B, NH, low, rate, random)  # (N, C)
    y, mask_1 = dropout(widen(linear(o, w("attn.c_proj.weight"), w("attn.c_proj.bias"), low)), rate, random)
    x = x + y
    m, ln_2 = layer_norm(x, w("ln_2.weight"), w("ln_2.bias"))
    m = narrow(m, low)
    h = linear(m, w("mlp.c_fc.weight"), w("mlp.c_fc.bias"), low)  # (N, 4C)
    g = gelu(h, low)
    y, mask_2 = dropout(widen(linear(g, w("mlp.c_proj.weight"), w("mlp.c_proj.bias"), low)), rate, random)  # (N, C)
    return x + y, BlockCache(ln_1, a, qkv, p, o, ln_2, m, h, g, (mask_p, mask_1, mask_2))


def block_backward(dx, w, cache, B, config, low):  # (N, C)
    """The lines of `block` from the last to the first: the gradient of its input (N, C), and of its weights by name.

    At a residual connection dx goes on as it is, and the gradient that comes back through the layer is added to it.
    """
    NH, rate = config.n_head, config.dropout
    d: dict[str, np.ndarray] = {}
    mask_p, mask_1, mask_2 = cache.masks
    dy = dropout_backward(dx, rate, mask_2)
    dg, d["mlp.c_proj.weight"], d["mlp.c_proj.bias"] = linear_backward(dy, cache.g, w("mlp.c_proj.weight"), low)
    dh = gelu_backward(dg, cache.h)  # (N, 4C)
    dm, d["mlp.c_fc.weight"], d["mlp.c_fc.bias"] = linear_backward(dh, cache.m, w("mlp.c_fc.weight"), low)
    dy, d["ln_2.weight"], d["ln_2.bias"] = layer_norm_backward(dm, w("ln_2.weight"), *cache.ln_2)
    dx = dx + dy
    dy = dropout_backward(dx, rate, mask_1)
    do, d["attn.c_proj.weight"], d["attn.c_proj.bias"] = linear_backward(dy, cache.o, w("attn.c_proj.weight"), low)
    dqkv = attention_backward(do, cache.qkv, cache.p, mask_p, B, NH, low, rate)  # (N, 3C)
    da, d["attn.c_attn.weight"], d["attn.c_attn.bias"] = linear_backward(dqkv, cache.a, w("attn.c_attn.weight"), low)
    dy, d["ln_1.weight"], d["ln_1.bias"] = layer_norm_backward(da, w("ln_1.weight"), *cache.ln_1)
    return dx + dy, d


def hidden(weights, tokens, config, low="fp32", random=None, keep=True):  # (B, T)
    """The head's input (N, C), narrow; and mask, blocks and ln_f for the Cache. Without `keep`, `blocks` is empty."""
    x, mask = dropout(embedding(tokens, weights[TIED], weights["wpe.weight"]), config.dropout, random)
    blocks = []
    for layer in range(config.n_layer):
        x, cache = block(x, _within(weights, layer), len(tokens), config, low, random)
        if keep:
            blocks.append(cache)
    f, ln_f = layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"])
    return narrow(f, low), (mask, blocks, ln_f)


def forward(weights, tokens, targets, config, low="fp32", random=None, keep=True):  # (B, T), (B, T)
    """Mean loss of each row (B,) in nats, and the Cache for `backward`, None without `keep`.

    `random` is the generator that dropout draws from; with None nothing is dropped.
    """
    f, (mask, blocks, ln_f) = hidden(weights, tokens, config, low, random, keep)
    logits = linear(f, weights[HEAD], None, low)  # (N, V)
    losses, p = cross_entropy(logits, targets.ravel())  # (N,)
    cache = Cache(tokens, targets.ravel(), mask, blocks, ln_f, f, p) if keep else None
    return losses.reshape(tokens.shape).mean(1), cache


def backward(weights, dlosses, cache, config, low="fp32"):  # (B,)
    """The gradient of every weight by name, from the gradient of each row's loss (B,).

    The tied weight has two: wte.weight's as the embedding and lm_head.weight's as the head. The backend adds them.
    """
    B, T = cache.tokens.shape
    dlogits = cross_entropy_backward(np.repeat(dlosses / T, T), cache.p, cache.targets)  # (N, V)
    df, dhead, _ = linear_backward(dlogits, cache.f, weights[HEAD], low)
    dx, dweight, dbias = layer_norm_backward(df, weights["ln_f.weight"], *cache.ln_f)
    gradients = {HEAD: dhead, "ln_f.weight": dweight, "ln_f.bias": dbias}
    for layer in reversed(range(config.n_layer)):
        dx, d = block_backward(dx, _within(weights, layer), cache.blocks[layer], B, config, low)
        gradients |= {f"h.{layer}.{name}": gradient for name, gradient in d.items()}
    dx = dropout_backward(dx, config.dropout, cache.mask)
    dwte, dwpe = embedding_backward(dx, cache.tokens, weights[TIED], weights["wpe.weight"])
    return gradients | {TIED: dwte, "wpe.weight": dwpe}


def _within(weights, layer):
    return lambda name: weights[f"h.{layer}.{name}"]
