"""The `engine` backend: two threads and AdamW around model/engine_gpt.py."""

from dataclasses import replace
from functools import partial

import numpy as np

from amp import policy
from engine.autocast import Weight, autocast
from engine.graph import no_grad
from engine.ops import drawing, linear, sum_losses
from model import numpy_backend, numpy_threads
from model.backends import Backend, Hardware, Kernel, trained
from model.config import TIED, GPTConfig, initial_weights, is_operand
from model.engine_gpt import forward, hidden
from optim.adamw import clip_grad_norm_

REFUSED = {flag: why for flag, why in numpy_backend.REFUSED.items() if flag != "recompute"}
hardware = partial(numpy_backend.hardware, backend="engine")


def build(settings, hardware: Hardware, config: GPTConfig) -> Backend:
    """The backend for train.py's settings."""
    numpy_threads.prepare()
    weights = {
        name: Weight(w, hardware.dtype if is_operand(name) or name == TIED else "fp32")
        for name, w in initial_weights(config, settings.seed).items()
    }
    optimizer, evaluated = numpy_backend.adamw(weights, settings, config), replace(config, dropout=0.0)

    def loss(x, y, key):
        low, rows = policy.compute_dtype(), numpy_threads.shards(len(x))  # here, since other threads do not see it

        def forward_shard(number, part):
            with autocast(low), drawing(np.random.default_rng([*key, number])):
                losses = forward(weights, x[part], y[part], config, int(settings.recompute))
                return losses.sum() / len(x)

        return sum_losses(numpy_threads.run(forward_shard, range(len(rows)), rows), numpy_threads.run)

    def evaluate(x, y):
        def evaluate_shard(part):
            with no_grad(), autocast(hardware.dtype):
                return forward(weights, x[part], y[part], evaluated).data

        return np.concatenate(numpy_threads.run(evaluate_shard, numpy_threads.shards(len(x)))).astype(np.float64)

    def logits(tokens):
        with no_grad(), autocast(hardware.dtype), np.errstate(all="ignore"):
            last = hidden(weights, tokens, evaluated)[:, -1]  # (B, C)
            return linear(last, weights[TIED]).data  # (B, V)

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=partial(autocast, hardware.dtype),
        clip_grad_norm_=partial(clip_grad_norm_, trained(optimizer)),
        evaluate=evaluate,
        logits=logits,
        decoder=lambda weights: logits,  # without a memory: every token is read again
        state=partial(numpy_backend.state, weights, optimizer),
        load_state=partial(numpy_backend.load_state, weights, optimizer),
        kernel=Kernel("numpy/numpy/numpy", "NumPy's products"),
    )
