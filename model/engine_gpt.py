"""The GPT on engine/: GPT-2's architecture and names, and no derivative. Its backend: engine_backend.py.

Its layers are functions of tensors. `weights` holds all parameters by name; `w` holds those of one block.
B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

from collections.abc import Mapping

import numpy as np

from engine.ops import attention, cross_entropy, dropout, embedding, gelu, layer_norm, linear
from engine.recompute import recompute
from engine.tensor import Tensor
from model.config import TIED, GPTConfig

Weights = Mapping[str, Tensor]


def self_attention(x: Tensor, w: Weights, config: GPTConfig) -> Tensor:  # (B, T, C)
    """Causal multi-head self-attention."""
    B, T, C = x.shape
    qkv = linear(x, w["attn.c_attn.weight"], w["attn.c_attn.bias"])  # (B, T, 3C)
    heads = qkv.reshape(B, T, 3, config.n_head, -1).transpose(2, 0, 3, 1, 4)  # (3, B, NH, T, HS)
    y = attention(heads, config.dropout)  # (B, NH, T, HS)
    y = y.transpose(0, 2, 1, 3).reshape(B, T, C)
    return linear(y, w["attn.c_proj.weight"], w["attn.c_proj.bias"])


def mlp(x: Tensor, w: Weights) -> Tensor:  # (B, T, C)
    x = gelu(linear(x, w["mlp.c_fc.weight"], w["mlp.c_fc.bias"]))  # (B, T, 4C)
    return linear(x, w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])


def block(x: Tensor, w: Weights, config: GPTConfig) -> Tensor:  # (B, T, C)
    """x + attention(LayerNorm(x)), then the same with the MLP. x is the residual stream, fp32 throughout."""
    y = self_attention(layer_norm(x, w["ln_1.weight"], w["ln_1.bias"]), w, config)
    x = x + dropout(y, config.dropout)
    y = mlp(layer_norm(x, w["ln_2.weight"], w["ln_2.bias"]), w)
    return x + dropout(y, config.dropout)


def blocks(x: Tensor, weights: Weights, layers: range, config: GPTConfig) -> Tensor:  # (B, T, C)
    for layer in layers:
        prefix = f"h.{layer}."
        w = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x = block(x, w, config)
    return x


def hidden(weights: Weights, tokens: np.ndarray, config: GPTConfig, recomputed: int = 0) -> Tensor:  # (B, T)
    """The input of the head (B, T, C).

    Groups of `recomputed` layers keep only their input, and backward recomputes the arrays inside. With 0 all
    layers keep their arrays; the last group always does, since backward begins with it.
    """
    _, T = tokens.shape
    L = config.n_layer
    x = embedding(weights[TIED], tokens) + weights["wpe.weight"][:T]  # (B, T, C)
    x = dropout(x, config.dropout)
    size = recomputed or L
    for start in range(0, L, size):
        layers = range(start, min(start + size, L))
        again = recomputed and layers.stop < L
        x = recompute(blocks, x, weights, layers, config) if again else blocks(x, weights, layers, config)
    return layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"])


def forward(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, config: GPTConfig, recomputed: int = 0
) -> Tensor:  # (B, T), (B, T)
    """Mean loss of each row (B,), in nats. The head is tied to the embedding."""
    logits = linear(hidden(weights, tokens, config, recomputed), weights[TIED])  # (B, T, V)
    return cross_entropy(logits, targets).mean(1)
