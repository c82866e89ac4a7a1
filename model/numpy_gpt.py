"""The GPT in NumPy, forward and backward by hand, and the `numpy` backend around it. The layers: numpy_layers.py.

B batch · T time · N tokens (B · T) · C channels · V vocabulary · L layers · NH heads
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from amp import policy
from amp.formats import narrow, widen
from model import numpy_parallel as parallel
from model.backend import Backend, Hardware, Kernel, cpu_name
from model.config import GPTConfig, initial_weights, parameters
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
    rounded,
)
from optim.adamw import AdamW, Parameter, clip_grad_norm_
from run.errors import BadInput

# The embedding and the head are one weight. As an embedding it is looked up in fp32, as the head it is multiplied.
TIED, HEAD = "wte.weight", "lm_head.weight"


def is_operand(name: str) -> bool:
    """Whether a weight goes into products, so that it and its gradient are rounded."""
    return ".c_" in name or name == HEAD


# ---- the model: pure functions of arrays


class BlockCache(NamedTuple):
    """What a block's backward needs of its forward. Operands are narrow; of LayerNorms x̂ and rstd are kept."""

    ln_1: tuple
    a: np.ndarray  # (N, C), into c_attn
    qkv: np.ndarray  # (N, 3C)
    p: np.ndarray  # (B, NH, T, T), attention's probabilities
    o: np.ndarray  # (N, C), into c_proj
    ln_2: tuple
    m: np.ndarray  # (N, C), into c_fc
    h: np.ndarray  # (N, 4C), into GELU
    g: np.ndarray  # (N, 4C), into c_proj
    kept: tuple  # by the dropouts of p, of attention and of the MLP


class Cache(NamedTuple):
    tokens: np.ndarray  # (B, T)
    targets: np.ndarray  # (N,)
    kept: np.ndarray | None
    blocks: list[BlockCache]
    ln_f: tuple
    f: np.ndarray  # (N, C), into the head
    p: np.ndarray  # (N, V), the model's probabilities


def block(x, w, B, config, low, random):  # (N, C)
    """x + attention(LayerNorm(x)), then the same with the MLP. `w` takes a name within the block."""
    NH, rate = config.n_head, config.dropout
    a, ln_1 = layer_norm(x, w("ln_1.weight"), w("ln_1.bias"))
    a = narrow(a, low)
    qkv = linear(a, w("attn.c_attn.weight"), w("attn.c_attn.bias"), low)  # (N, 3C)
    o, p, kept_p = attention(qkv, B, NH, low, rate, random)  # (N, C)
    y, kept_1 = dropout(widen(linear(o, w("attn.c_proj.weight"), w("attn.c_proj.bias"), low)), rate, random)
    x = x + y
    m, ln_2 = layer_norm(x, w("ln_2.weight"), w("ln_2.bias"))
    m = narrow(m, low)
    h = linear(m, w("mlp.c_fc.weight"), w("mlp.c_fc.bias"), low)  # (N, 4C)
    g = gelu(h, low)
    y, kept_2 = dropout(widen(linear(g, w("mlp.c_proj.weight"), w("mlp.c_proj.bias"), low)), rate, random)  # (N, C)
    return x + y, BlockCache(ln_1, a, qkv, p, o, ln_2, m, h, g, (kept_p, kept_1, kept_2))


def block_backward(dx, w, cache, B, config, low):  # (N, C)
    """The same lines from the last to the first. At a residual dx goes on as it is, and what comes back is added."""
    NH, rate, d = config.n_head, config.dropout, {}
    kept_p, kept_1, kept_2 = cache.kept
    dy = dropout_backward(dx, rate, kept_2)
    dg, d["mlp.c_proj.weight"], d["mlp.c_proj.bias"] = linear_backward(dy, cache.g, w("mlp.c_proj.weight"), low)
    dh = gelu_backward(dg, cache.h)  # (N, 4C)
    dm, d["mlp.c_fc.weight"], d["mlp.c_fc.bias"] = linear_backward(dh, cache.m, w("mlp.c_fc.weight"), low)
    dy, d["ln_2.weight"], d["ln_2.bias"] = layer_norm_backward(dm, w("ln_2.weight"), *cache.ln_2)
    dx = dx + dy
    dy = dropout_backward(dx, rate, kept_1)
    do, d["attn.c_proj.weight"], d["attn.c_proj.bias"] = linear_backward(dy, cache.o, w("attn.c_proj.weight"), low)
    dqkv = attention_backward(do, cache.qkv, cache.p, kept_p, B, NH, low, rate)  # (N, 3C)
    da, d["attn.c_attn.weight"], d["attn.c_attn.bias"] = linear_backward(dqkv, cache.a, w("attn.c_attn.weight"), low)
    dy, d["ln_1.weight"], d["ln_1.bias"] = layer_norm_backward(da, w("ln_1.weight"), *cache.ln_1)
    return dx + dy, d


def hidden(weights, tokens, config, low="fp32", random=None, keep=True):  # (B, T)
    """Tokens -> what goes into the head (N, C), narrow, and what backward needs of the way there."""
    x, kept = dropout(embedding(tokens, weights[TIED], weights["wpe.weight"]), config.dropout, random)
    blocks = []
    for layer in range(config.n_layer):
        x, cache = block(x, _within(weights, layer), len(tokens), config, low, random)
        if keep:
            blocks.append(cache)
    f, ln_f = layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"])
    return narrow(f, low), (kept, blocks, ln_f)


def forward(weights, tokens, targets, config, low="fp32", random=None, keep=True):  # (B, T), (B, T)
    """Mean loss of each row (B,), and the cache for `backward`. `random` draws what dropout keeps; None keeps all."""
    f, (kept, blocks, ln_f) = hidden(weights, tokens, config, low, random, keep)
    logits = linear(f, weights[HEAD], None, low)  # (N, V)
    losses, p = cross_entropy(logits, targets.ravel())  # (N,)
    cache = Cache(tokens, targets.ravel(), kept, blocks, ln_f, f, p) if keep else None
    return losses.reshape(tokens.shape).mean(1), cache


def backward(weights, dlosses, cache, config, low="fp32"):  # (B,)
    """The gradient of every weight, by name. The tied one has two: wte.weight's and, as the head, lm_head.weight's."""
    B, T = cache.tokens.shape
    dlogits = cross_entropy_backward(np.repeat(dlosses / T, T), cache.p, cache.targets)  # (N, V)
    df, dhead, _ = linear_backward(dlogits, cache.f, weights[HEAD], low)
    dx, dweight, dbias = layer_norm_backward(df, weights["ln_f.weight"], *cache.ln_f)
    gradients = {HEAD: dhead, "ln_f.weight": dweight, "ln_f.bias": dbias}
    for layer in reversed(range(config.n_layer)):
        dx, d = block_backward(dx, _within(weights, layer), cache.blocks[layer], B, config, low)
        gradients |= {f"h.{layer}.{name}": gradient for name, gradient in d.items()}
    dx = dropout_backward(dx, config.dropout, cache.kept)
    dwte, dwpe = embedding_backward(dx, cache.tokens, weights[TIED], weights["wpe.weight"])
    return gradients | {TIED: dwte, "wpe.weight": dwpe}


def _within(weights, layer):
    return lambda name: weights[f"h.{layer}.{name}"]


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


# ---- the `numpy` backend

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
    threads = min(parallel.cores(), parallel.SHARDS)
    how = "full precision" if dtype == "fp32" else "emulated: operands rounded, products in fp32; NumPy has no others"
    return Hardware("cpu", f"{cpu_name()}, {threads} threads", dtype, dtype != "fp32", how)


def build(settings, hardware: Hardware, config: GPTConfig) -> Backend:
    """The backend for train.py's settings."""
    parallel.prepare()
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
        used, rows = weights(low), parallel.shards(len(x))

        def forward_shard(number, part):
            random = np.random.default_rng([*key, number]) if config.dropout else None
            return forward(used, x[part], y[part], config, low, random)

        losses, caches = map(list, zip(*parallel.run(forward_shard, range(len(rows)), rows), strict=True))

        def backward_shard(d, cache):
            dlosses = np.full(len(cache.tokens), d / len(x), dtype=np.float32)  # the loss is the mean over rows
            return backward(used, dlosses, cache, config, low)

        def run_backward(d):
            if not caches:
                _no_backward(d)
            parts = parallel.run(partial(backward_shard, d), caches)
            caches.clear()
            _add_gradients(masters, parts, low)

        return Loss(np.concatenate(losses).mean(), run_backward)

    def evaluate(x, y):
        used = weights(hardware.dtype)

        def evaluate_shard(part):
            return forward(used, x[part], y[part], config, hardware.dtype, keep=False)[0]

        return np.concatenate(parallel.run(evaluate_shard, parallel.shards(len(x)))).astype(np.float64)

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
        clip_grad_norm_=clip_grad_norm_,
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
    parallel.run(add, [names[part] for part in parallel.shards(len(names))])


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
