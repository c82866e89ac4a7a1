"""The `numpy` backend: two threads, AdamW and shadow weights around model/numpy_gpt.py."""

from functools import partial

import numpy as np

from amp import policy
from amp.formats import narrow, widen
from base.errors import BadInput
from model import numpy_threads
from model.backends import Backend, Hardware, Kernel, cpu_name, trained
from model.config import HEAD, TIED, GPTConfig, initial_weights, is_operand, parameters
from model.numpy_gpt import backward, forward, hidden
from model.numpy_layers import linear, rounded
from optim.adamw import AdamW, Parameter, clip_grad_norm_


class Loss:
    """A number that knows how to run backward: all that the loop and the scaler ask of a loss."""

    def __init__(self, value, backward):
        self.value, self._backward = value, backward

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

    def detach(self):
        return Loss(self.value, _no_backward)

    def item(self) -> float:
        return float(self.value)


def _no_backward(d):
    raise RuntimeError("this loss has no backward: it is detached, or backward has run and its activations are freed")


# Flags of train.py and sample.py that this backend cannot honour, and why.
REFUSED = {
    "compile": "has nothing to compile",
    "kernel": "has no kernel of its own",
    "weights": "has no kernel of its own",
    "deterministic": "always is",
    "recompute": "keeps all that backward needs: use --backend engine or torch",
    "emulation": "always rounds the operands and multiplies in fp32",
}


def hardware(device: str, dtype: str, emulation: str, backend: str = "numpy") -> Hardware:
    """The CPU. BadInput where another device is asked for; `emulation` is a checkpoint's and has no say here."""
    if device not in ("auto", "cpu"):
        raise BadInput(f"--device {device}: --backend {backend} computes on the CPU: use --device cpu")
    dtype = "bf16" if dtype == "auto" else dtype
    threads = min(numpy_threads.cores(), numpy_threads.SHARDS)
    how = "full precision" if dtype == "fp32" else "emulated: operands rounded, products in fp32; NumPy has no others"
    return Hardware("cpu", f"{cpu_name()}, {threads} threads", dtype, dtype != "fp32", how)


def build(settings, hardware: Hardware, config: GPTConfig) -> Backend:
    """The backend for train.py's settings."""
    numpy_threads.prepare()
    masters = {  # LayerNorms and positions are no operands of products: they have no other shadow than themselves
        name: Parameter(w, hardware.dtype if is_operand(name) or name == TIED else "fp32")
        for name, w in initial_weights(config, settings.seed).items()
    }
    optimizer = adamw(masters, settings, config)

    def weights(low):
        """What the model computes with: operands of products as shadows, all else as master weights.

        Shadows are widened here, once for both shards, forward and backward.
        """

        def shadow(parameter):
            return widen(parameter.shadow if parameter.dtype == low else narrow(parameter.data, low))

        used = {name: shadow(p) if is_operand(name) else p.data for name, p in masters.items()}
        return used | {HEAD: shadow(masters[TIED])}

    def loss(x, y, key):
        low = policy.compute_dtype()  # here, since other threads do not see it
        used, rows = weights(low), numpy_threads.shards(len(x))

        def forward_shard(number, part):
            random = np.random.default_rng([*key, number]) if config.dropout else None
            return forward(used, x[part], y[part], config, low, random)

        losses, caches = map(list, zip(*numpy_threads.run(forward_shard, range(len(rows)), rows), strict=True))

        def backward_shard(d, cache):
            dlosses = np.full(len(cache.tokens), d / len(x), dtype=np.float32)  # the loss is the mean over rows
            return backward(used, dlosses, cache, config, low)

        def run_backward(d):
            if not caches:
                _no_backward(d)
            parts = numpy_threads.run(partial(backward_shard, d), caches)
            caches.clear()
            _add_gradients(masters, parts, low)

        return Loss(np.concatenate(losses).mean(), run_backward)

    def evaluate(x, y):
        used = weights(hardware.dtype)

        def evaluate_shard(part):
            return forward(used, x[part], y[part], config, hardware.dtype, keep=False)[0]

        return np.concatenate(numpy_threads.run(evaluate_shard, numpy_threads.shards(len(x)))).astype(np.float64)

    def logits(tokens):
        used, (B, T) = weights(hardware.dtype), tokens.shape
        with np.errstate(all="ignore"):
            f, _ = hidden(used, tokens, config, hardware.dtype, keep=False)
            last = f.reshape(B, T, -1)[:, -1]  # (B, C)
            return widen(linear(last, used[HEAD], None, hardware.dtype))  # (B, V)

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=partial(policy.computing, hardware.dtype),
        clip_grad_norm_=partial(clip_grad_norm_, trained(optimizer)),
        evaluate=evaluate,
        logits=logits,
        decoder=lambda weights: logits,  # without a memory: every token is read again
        state=partial(state, masters, optimizer),
        load_state=partial(load_state, masters, optimizer),
        kernel=Kernel("numpy/numpy/numpy", "NumPy's products"),
    )


def _add_gradients(masters: dict[str, Parameter], parts: list[dict], low: str) -> None:
    """Sums the shards' gradients in order, rounds those of products' operands, adds them into `.grad`."""

    def add(names):
        for name in names:
            parameter = masters[name]
            for part in (HEAD, TIED) if name == TIED else (name,):
                gradient = parts[0][part]
                for other in parts[1:]:
                    gradient += other[part]
                if is_operand(part):
                    gradient = rounded(gradient, low)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    names = list(masters)
    numpy_threads.run(add, [names[part] for part in numpy_threads.shards(len(names))])


def adamw(masters: dict[str, Parameter], settings, config: GPTConfig) -> AdamW:
    table = parameters(config)
    groups = []
    for decay, weight_decay in ((True, settings.weight_decay), (False, 0.0)):
        names = [p.name for p in table if p.decay == decay]
        groups.append({"params": [masters[n] for n in names], "param_names": names, "weight_decay": weight_decay})
    return AdamW(groups, settings.lr, (settings.beta1, settings.beta2))


def state(masters: dict[str, Parameter], optimizer: AdamW) -> dict[str, dict[str, np.ndarray]]:
    return {"model": {name: p.data.copy() for name, p in masters.items()}, "optimizer": optimizer.state_dict()}


def load_state(masters: dict[str, Parameter], optimizer: AdamW, arrays: dict[str, dict[str, np.ndarray]]) -> None:
    """Copies. ValueError where names or shapes differ."""
    if missing := sorted(masters.keys() ^ arrays["model"].keys()):
        raise ValueError(f"the weights do not fit this model: {missing[0]} is missing on one side")
    for name, parameter in masters.items():
        if parameter.data.shape != arrays["model"][name].shape:
            raise ValueError(f"{name}: expected shape {parameter.data.shape}, got {arrays['model'][name].shape}")
        parameter.data[...] = arrays["model"][name]
        parameter.refresh()
    if "optimizer" in arrays:  # a model alone, to sample from, has none
        optimizer.load_state_dict(arrays["optimizer"])
