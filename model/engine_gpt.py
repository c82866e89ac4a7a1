"""The GPT on the engine of engine/, with not one derivative in this file. The backend: engine_backend.py.

B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

from engine.ops import attention, cross_entropy, dropout, embedding, gelu, layer_norm, linear
from engine.recompute import recompute
from model.config import TIED

# ---- the model: functions of Tensors. `w` takes a name within a block


def self_attention(x, w, config):  # (B, T, C)
    B, T, C = x.shape
    qkv = linear(x, w("attn.c_attn.weight"), w("attn.c_attn.bias"))  # (B, T, 3C)
    heads = qkv.reshape(B, T, 3, config.n_head, -1).transpose(2, 0, 3, 1, 4)  # (3, B, NH, T, HS)
    y = attention(heads, config.dropout).transpose(0, 2, 1, 3).reshape(B, T, C)
    return linear(y, w("attn.c_proj.weight"), w("attn.c_proj.bias"))


def mlp(x, w):  # (B, T, C)
    h = gelu(linear(x, w("mlp.c_fc.weight"), w("mlp.c_fc.bias")))  # (B, T, 4C)
    return linear(h, w("mlp.c_proj.weight"), w("mlp.c_proj.bias"))


def block(x, w, config):  # (B, T, C), the residual stream, fp32 throughout
    y = self_attention(layer_norm(x, w("ln_1.weight"), w("ln_1.bias")), w, config)
    x = x + dropout(y, config.dropout)
    y = mlp(layer_norm(x, w("ln_2.weight"), w("ln_2.bias")), w)
    return x + dropout(y, config.dropout)


def blocks(x, weights, layers, config):
    for layer in layers:
        x = block(x, lambda name, layer=layer: weights[f"h.{layer}.{name}"], config)
    return x


def hidden(weights, tokens, config, recomputed: int = 0):  # (B, T)
    """What goes into the head (B, T, C). Of so many layers at a time backward recomputes the inside; 0: it is kept.

    That of the last ones is kept: backward begins with them.
    """
    x = embedding(weights[TIED], tokens) + weights["wpe.weight"][: tokens.shape[1]]  # (B, T, C)
    x = dropout(x, config.dropout)
    layers, size = range(config.n_layer), recomputed or config.n_layer
    for part in (layers[start : start + size] for start in layers[::size]):
        again = recomputed and part[-1] < layers[-1]
        x = recompute(blocks, x, weights, part, config) if again else blocks(x, weights, part, config)
    return layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"])


def forward(weights, tokens, targets, config, recomputed: int = 0):  # (B, T), (B, T)
    """Mean loss of each row (B,). The head is tied to the embedding."""
    logits = linear(hidden(weights, tokens, config, recomputed), weights[TIED])  # (B, T, V)
    return cross_entropy(logits, targets).mean(1)
