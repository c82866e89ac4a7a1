"""The `engine` backend: two threads and AdamW around model/engine_gpt.py."""

from dataclasses import replace
from functools import partial

import numpy as np

from amp import policy
from base.dtypes import Dtype
from engine.autocast import Weight, autocast
from engine.graph import no_grad
from engine.ops import drawing, linear, sum_losses
from model import numpy_threads
from model.backends import Backend, Hardware, Logits, Sampler, trained
from model.config import TIED, GPTConfig, checked_weights, has_shadow, optimizer_groups
from model.engine_gpt import forward, hidden
from model.numpy_threads import map_shards, shards
from optim.adamw import AdamW, clip_grad_norm_, state
from settings import Settings

REFUSED = numpy_threads.REFUSED


def hardware(device: str, dtype: str, emulation: str) -> Hardware:
    """The CPU. BadInput where another device is asked for; a checkpoint's `emulation` has no say here."""
    return numpy_threads.hardware("engine", device, dtype)


def build(settings: Settings, hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray]) -> Backend:
    """The backend that trains, from copies of `weights`. ValueError names a tensor that does not fit."""
    numpy_threads.prepare()
    masters = _masters(config, weights, hardware.dtype)
    optimizer = AdamW(
        optimizer_groups(config, masters, settings.weight_decay), settings.lr, (settings.beta1, settings.beta2)
    )
    evaluated = replace(config, dropout=0.0)

    def loss(x, y, key):
        low, parts = policy.compute_dtype(), shards(len(x))  # asked for here, since other threads do not see it

        def forward_shard(number, part):
            with autocast(low), drawing(np.random.default_rng([*key, number])):
                losses = forward(masters, x[part], y[part], config, int(settings.recompute))
                return losses.sum() / len(x)

        # The two gradients of the tied weight meet in the engine: the weight is a parent of two ops, the embedding and
        # the head, and `backpropagate` adds what comes back from both, the head's rounded, in fp32.
        return sum_losses(map_shards(forward_shard, range(len(parts)), parts), map_shards)

    def evaluate(x, y):
        def evaluate_shard(part):
            with no_grad(), autocast(hardware.dtype):
                return forward(masters, x[part], y[part], evaluated).data

        return np.concatenate(map_shards(evaluate_shard, shards(len(x)))).astype(np.float64)

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=partial(autocast, hardware.dtype),
        clip_grad_norm_=partial(clip_grad_norm_, trained(optimizer)),
        evaluate=evaluate,
        decoder=lambda held: _logits(masters, evaluated, hardware.dtype),
        state=partial(state, masters, optimizer),
        load_optimizer=optimizer.load_state_dict,
        kernel=numpy_threads.KERNEL,
    )


def sampler(hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray], held: str) -> Sampler:
    """The model to draw text from. `held` has no meaning here: it is for the torch backend's kernel."""
    numpy_threads.prepare()
    masters = _masters(config, weights, hardware.dtype)
    return Sampler(_logits(masters, replace(config, dropout=0.0), hardware.dtype), numpy_threads.KERNEL)


def _masters(config: GPTConfig, weights: dict[str, np.ndarray], low: Dtype) -> dict[str, Weight]:
    """Copies of the weights as leaves of the engine, with 16-bit shadows where they are operands of products."""
    return {
        name: Weight(np.array(weight, np.float32, order="C"), low if has_shadow(name) else "fp32")
        for name, weight in checked_weights(config, weights).items()
    }


def _logits(masters: dict[str, Weight], config: GPTConfig, low: Dtype) -> Logits:
    """A function of tokens, without a memory: it reads every token again."""

    def logits(tokens):  # (B, T)
        with no_grad(), autocast(low), np.errstate(all="ignore"):
            last = hidden(masters, tokens, config)[:, -1]  # (B, C)
            return linear(last, masters[TIED]).data  # (B, V)

    return logits
