"""The GPT on the engine of engine/, with not one derivative in this file, and the `engine` backend around it.

B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

from dataclasses import replace
from functools import partial

import numpy as np

from amp import policy
from engine.autocast import Weight, autocast
from engine.ops import attention, cross_entropy, drawing, dropout, embedding, gelu, layer_norm, linear, total
from engine.recompute import recompute
from engine.tensor import no_grad
from model import numpy_gpt
from model import numpy_parallel as parallel
from model.backend import Backend, Hardware, Kernel
from model.config import GPTConfig, initial_weights
from model.numpy_gpt import TIED, is_operand
from optim.adamw import clip_grad_norm_

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


# ---- the `engine` backend

REFUSED = {flag: why for flag, why in numpy_gpt.REFUSED.items() if flag != "recompute"}
hardware = partial(numpy_gpt.hardware, backend="engine")


def build(settings, hardware: Hardware, config: GPTConfig) -> Backend:
    """The backend for train.py's settings."""
    parallel.prepare()
    weights = {
        name: Weight(w, hardware.dtype if is_operand(name) or name == TIED else "fp32")
        for name, w in initial_weights(config, settings.seed).items()
    }
    optimizer, evaluated = numpy_gpt.adamw(weights, settings, config), replace(config, dropout=0.0)

    def loss(x, y, key):
        low, rows = policy.compute_dtype(), parallel.shards(len(x))  # here, since other threads do not see it

        def forward_shard(number, part):
            with autocast(low), drawing(np.random.default_rng([*key, number])):
                losses = forward(weights, x[part], y[part], config, int(settings.recompute))
                return losses.sum() / len(x)

        return total(parallel.run(forward_shard, range(len(rows)), rows), parallel.run)

    def evaluate(x, y):
        def evaluate_shard(part):
            with no_grad(), autocast(hardware.dtype):
                return forward(weights, x[part], y[part], evaluated).data

        return np.concatenate(parallel.run(evaluate_shard, parallel.shards(len(x)))).astype(np.float64)

    def logits(tokens):
        with no_grad(), autocast(hardware.dtype), np.errstate(all="ignore"):
            last = hidden(weights, tokens, evaluated)[:, -1]  # (B, C)
            return linear(last, weights[TIED]).data  # (B, V)

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=partial(autocast, hardware.dtype),
        clip_grad_norm_=clip_grad_norm_,
        evaluate=evaluate,
        logits=logits,
        decoder=lambda weights: logits,  # without a memory: every token is read again
        state=partial(numpy_gpt.state, weights, optimizer),
        load_state=partial(numpy_gpt.load_state, weights, optimizer),
        kernel=Kernel("numpy/numpy/numpy", "NumPy's products"),
    )
