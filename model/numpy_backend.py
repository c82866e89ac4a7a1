"""The `numpy` backend: two threads, AdamW and 16-bit shadows around model/numpy_gpt.py."""

from collections.abc import Callable
from functools import partial

import numpy as np

from amp import policy
from amp.formats import narrow, widen
from base.dtypes import Dtype
from model import numpy_threads
from model.backends import Backend, Hardware, Logits, Sampler, trained
from model.config import HEAD, TIED, GPTConfig, checked_weights, has_shadow, is_operand, optimizer_groups
from model.numpy_gpt import backward, forward, hidden
from model.numpy_layers import linear, round_if_low
from model.numpy_threads import map_shards, shards
from optim.adamw import AdamW, Parameter, clip_grad_norm_, state
from settings import Settings

REFUSED = numpy_threads.REFUSED | {"recompute": "keeps all that backward needs: use --backend engine or torch"}


def hardware(device: str, dtype: str, emulation: str) -> Hardware:
    """The CPU. BadInput where another device is asked for; a checkpoint's `emulation` has no say here."""
    return numpy_threads.hardware("numpy", device, dtype)


class Loss:
    """A number that knows how to run backward: all that the loop and the scaler ask of a loss."""

    def __init__(self, value, backward: Callable):
        self.value = value
        self._backward = backward  # the gradient of this number -> None; adds the parameters' gradients

    def __mul__(self, factor):
        return Loss(self.value * factor, lambda d: self._backward(d * factor))

    def __truediv__(self, divisor):
        return Loss(self.value / divisor, lambda d: self._backward(d / divisor))

    def __add__(self, other):
        def backward(d):
            self._backward(d)
            other._backward(d)

        return Loss(self.value + other.value, backward)

    __rmul__ = __mul__

    def backward(self) -> None:
        """Adds the gradients into `.grad` of the parameters. RuntimeError the second time, or on a detached loss."""
        self._backward(1.0)

    def detach(self) -> "Loss":
        """The same number without a way back."""
        return Loss(self.value, _no_backward)

    def item(self) -> float:
        """The number."""
        return float(self.value)


def _no_backward(d):
    raise RuntimeError("this loss has no backward: it is detached, or backward has run and its activations are freed")


def build(settings: Settings, hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray]) -> Backend:
    """The backend that trains, from copies of `weights`. ValueError names a tensor that does not fit."""
    numpy_threads.prepare()
    masters = {
        name: Parameter(np.array(weight, np.float32, order="C"), hardware.dtype if has_shadow(name) else "fp32")
        for name, weight in checked_weights(config, weights).items()
    }
    optimizer = AdamW(
        optimizer_groups(config, masters, settings.weight_decay), settings.lr, (settings.beta1, settings.beta2)
    )

    def loss(x, y, key):
        low = policy.compute_dtype()  # asked for here, since other threads do not see it
        used, parts = _operands(masters, low), shards(len(x))

        def forward_shard(number, part):
            random = np.random.default_rng([*key, number]) if config.dropout else None
            return forward(used, x[part], y[part], config, low, random)

        losses, caches = map(list, zip(*map_shards(forward_shard, range(len(parts)), parts), strict=True))

        def backward_shard(d, cache):
            dlosses = np.full(len(cache.tokens), d / len(x), dtype=np.float32)  # the loss is the mean over rows
            return backward(used, dlosses, cache, config, low)

        def run_backward(d):
            if not caches:
                _no_backward(d)
            gradients = map_shards(partial(backward_shard, d), caches)
            caches.clear()
            _add_gradients(masters, gradients, low)

        return Loss(np.concatenate(losses).mean(), run_backward)

    def evaluate(x, y):
        used = _operands(masters, hardware.dtype)

        def evaluate_shard(part):
            return forward(used, x[part], y[part], config, hardware.dtype, keep=False)[0]

        return np.concatenate(map_shards(evaluate_shard, shards(len(x)))).astype(np.float64)

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=partial(policy.computing, hardware.dtype),
        clip_grad_norm_=partial(clip_grad_norm_, trained(optimizer)),
        evaluate=evaluate,
        decoder=lambda held: _logits(_operands(masters, hardware.dtype), config, hardware.dtype),
        state=partial(state, masters, optimizer),
        load_optimizer=optimizer.load_state_dict,
        kernel=numpy_threads.KERNEL,
    )


def sampler(hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray], held: str) -> Sampler:
    """The model to draw text from. `held` has no meaning here: it is for the torch backend's kernel."""
    numpy_threads.prepare()
    copies = {n: np.array(w, np.float32, order="C") for n, w in checked_weights(config, weights).items()}
    masters = {name: Parameter(weight) for name, weight in copies.items()}
    return Sampler(_logits(_operands(masters, hardware.dtype), config, hardware.dtype), numpy_threads.KERNEL)


def _operands(masters: dict[str, Parameter], low: str) -> dict[str, np.ndarray]:
    """Arrays that the model computes with: operands of products rounded to `low`, all else the master weights.

    Shadows are widened to fp32 here, once for both shards, forward and backward. The tied weight appears twice: as
    wte.weight, the master that is looked up, and as lm_head.weight, rounded.
    """

    def shadow(parameter):
        return widen(parameter.shadow if parameter.dtype == low else narrow(parameter.data, low))

    used = {name: shadow(p) if is_operand(name) else p.data for name, p in masters.items()}
    return used | {HEAD: shadow(masters[TIED])}


def _logits(used: dict[str, np.ndarray], config: GPTConfig, low: Dtype) -> Logits:
    """A function of tokens, without a memory: it reads every token again."""

    def logits(tokens):  # (B, T)
        B, T = tokens.shape
        with np.errstate(all="ignore"):
            f, _ = hidden(used, tokens, config, low, keep=False)
            last = f.reshape(B, T, -1)[:, -1]  # (B, C)
            return widen(linear(last, used[HEAD], None, low))  # (B, V)

    return logits


def _add_gradients(masters: dict[str, Parameter], gradients: list[dict[str, np.ndarray]], low: str) -> None:
    """Sums the shards' gradients in order, rounds those of products' operands, and adds them into `.grad`.

    The two gradients of the tied weight meet here: the head's is rounded, as an operand's; the embedding's is not; both
    are added into the one fp32 `.grad`.
    """

    def add(names):
        for name in names:
            parameter = masters[name]
            for use in (HEAD, TIED) if name == TIED else (name,):
                gradient = gradients[0][use]
                for other in gradients[1:]:
                    gradient += other[use]
                if is_operand(use):
                    gradient = round_if_low(gradient, low)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    names = list(masters)
    map_shards(add, [names[part] for part in shards(len(names))])
