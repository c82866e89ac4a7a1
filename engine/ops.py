"""Every op: its forward, and below it its derivative. The gradient of the loss by `x` is `dx`.

An op is one function. It computes with `.data` and hands `record` the result, its parents, and a function from the
gradient of the result to a gradient for each parent. Where NumPy has stretched a parent, the engine sums what was
stretched; where a tensor is used twice, it adds. That function runs once, so it may overwrite what forward left it.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from engine.autocast import op
from engine.tensor import Tensor, backpropagate, record, remember, sources

GELU_SCALE, GELU_CUBIC = (2 / math.pi) ** 0.5, 0.044715


def constant(value, like: Tensor) -> Tensor:
    """Tensors as they are; numbers in the type of `like`, so that 2 * x is no wider than x."""
    return value if isinstance(value, Tensor) else Tensor(np.asarray(value, like.data.dtype))


# ---- arithmetic


@op("residual")
def add(a, b):
    b = constant(b, a)
    return record(a.data + b.data, (a, b), lambda dy: (dy, dy))


@op()
def mul(a, b):
    b = constant(b, a)
    return record(a.data * b.data, (a, b), lambda dy: (dy * b.data, dy * a.data))


@op()
def div(a, b):
    b = constant(b, a)
    return record(a.data / b.data, (a, b), lambda dy: (dy / b.data, -dy * a.data / b.data**2))


@op()
def power(x, n: float):
    return record(x.data**n, (x,), lambda dy: (dy * n * x.data ** (n - 1) if n else np.zeros_like(dy),))


@op()
def exp(x):
    y = np.exp(x.data)
    return record(y, (x,), lambda dy: (dy * y,))


@op()
def log(x):
    return record(np.log(x.data), (x,), lambda dy: (dy / x.data,))


@op()
def tanh(x):
    y = np.tanh(x.data)
    return record(y, (x,), lambda dy: (dy * (1 - y * y),))


# ---- shapes


@op()
def reshape(x, *shape: int):
    before = x.shape  # and not x, whose numbers the derivative does not need
    return record(x.data.reshape(shape), (x,), lambda dy: (dy.reshape(before),))


@op()
def transpose(x, *axes: int):
    """The axes in the order given; without any, from the last to the first."""
    back = np.argsort([axis % len(axes) for axis in axes]) if axes else None
    return record(x.data.transpose(axes or None), (x,), lambda dy: (dy.transpose(back),))


@op()
def take(x, index):
    """x[index] by whole numbers and slices. Rows by number are `embedding`."""
    for part in index if isinstance(index, tuple) else (index,):
        if not isinstance(part, int | np.integer | slice | type(None) | type(Ellipsis)) or isinstance(part, bool):
            raise TypeError(f"take: an index is a whole number or a slice, not {type(part).__name__}: use embedding")

    shape = x.shape

    def derive(dy):
        dx = np.zeros(shape, dy.dtype)
        dx[index] = dy
        return (dx,)

    return record(x.data[index], (x,), derive)


def split(x, parts: int, axis: int = -1) -> list[Tensor]:
    """Parts of equal size along an axis."""
    size, rest = divmod(x.shape[axis], parts)
    if rest:
        raise ValueError(f"split: shape {x.shape} does not fit: axis {axis} in {parts} equal parts")
    before = (slice(None),) * (axis % len(x.shape))
    return [take(x, (*before, slice(start, start + size))) for start in range(0, size * parts, size)]


# ---- reductions


@op("reduction")
def sum(x, axis=None, keepdims: bool = False):
    shape = x.shape
    y = x.data.sum(axis, keepdims=keepdims)
    return record(y, (x,), lambda dy: (np.broadcast_to(_unreduced(dy, shape, axis, keepdims), shape),))


@op("reduction")
def mean(x, axis=None, keepdims: bool = False):
    shape = x.shape
    y = x.data.mean(axis, keepdims=keepdims)
    share = y.size / x.data.size
    return record(y, (x,), lambda dy: (np.broadcast_to(_unreduced(dy * share, shape, axis, keepdims), shape),))


@op("reduction")
def max(x, axis=None, keepdims: bool = False):
    """Where several are the largest, they share the gradient."""
    y = x.data.max(axis, keepdims=True)

    def derive(dy):
        largest = x.data == y
        return (_unreduced(dy, x.shape, axis, keepdims) * largest / largest.sum(axis, keepdims=True),)

    return record(x.data.max(axis, keepdims=keepdims), (x,), derive)


def _unreduced(dy, shape, axis, keepdims):
    """Puts the axes back, with length 1."""
    return dy if keepdims else np.expand_dims(dy, tuple(range(len(shape))) if axis is None else axis)


# ---- products


@op("matmul")
def matmul(a, b):
    """The last two axes are matrices, those before them a batch."""
    b = constant(b, a)
    if a.data.ndim < 2 or b.data.ndim < 2:
        raise ValueError("matmul takes matrices, or batches of them")
    return record(a.data @ b.data, (a, b), lambda dy: (dy @ b.data.swapaxes(-1, -2), a.data.swapaxes(-1, -2) @ dy))


@op("linear")
def linear(x, weight, bias=None):  # (..., in), (out, in), (out,)
    """y = x Wᵀ + b"""
    shape, flat = x.shape, x.data.reshape(-1, x.shape[-1])  # one product for the whole batch
    y = flat @ weight.data.T
    if bias is not None:
        y += bias.data

    def derive(dy):
        dy = dy.reshape(-1, dy.shape[-1])
        dx, dweight = (dy @ weight.data).reshape(shape), dy.T @ flat
        return (dx, dweight) if bias is None else (dx, dweight, dy.sum(0))

    return record(y.reshape(*shape[:-1], -1), (x, weight) if bias is None else (x, weight, bias), derive)


# ---- the layers of a GPT


@op("gelu")
def gelu(x):
    """y = x / 2 · (1 + tanh(u)), u = sqrt(2/π) · (x + 0.044715 x³), the approximation of GPT-2"""
    x_ = x.data
    tanh = x_ * x_  # in place from here on: these arrays are the largest
    tanh *= GELU_SCALE * GELU_CUBIC
    tanh += GELU_SCALE
    tanh *= x_
    np.tanh(tanh, out=tanh)
    y = tanh + 1
    y *= x_
    y *= 0.5

    def derive(dy):
        """dy/dx = (1 + tanh(u)) / 2 + x / 2 · (1 - tanh²(u)) · du/dx, du/dx = sqrt(2/π) · (1 + 3 · 0.044715 x²)"""
        dx = x_ * x_
        dx *= 3 * GELU_SCALE * GELU_CUBIC
        dx += GELU_SCALE  # du/dx
        dx *= x_
        dx *= 1 - tanh * tanh
        dx += tanh
        dx += 1
        dx *= dy
        dx *= 0.5
        return (dx,)

    return record(y, (x,), derive)


@op("softmax")
def softmax(x):
    """Over the last axis."""
    p = _softmax(x.data.copy())

    def derive(dy):
        """dx = p · (dy - Σ dy · p)"""
        return (p * (dy - (dy * p).sum(-1, keepdims=True)),)

    return record(p, (x,), derive)


def _softmax(x):
    """In place. e^x cannot overflow once the largest x is 0, and the quotient is the same."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= np.einsum("...i->...", x)[..., None]
    return x


@op("layer_norm")
def layer_norm(x, weight, bias, eps: float = 1e-5):  # (..., C), (C,), (C,)
    """y = weight · x̂ + bias, x̂ = (x - mean) · rstd, rstd = 1 / sqrt(variance + eps)"""
    xhat = x.data - x.data.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(_mean_of_products(xhat, xhat) + eps)  # (..., 1)
    xhat *= rstd

    def derive(dy):
        """x reaches y by itself, through the mean and through rstd: dx = rstd (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂))"""
        flat = dy.reshape(-1, dy.shape[-1])
        dweight, dbias = np.einsum("nc,nc->c", flat, xhat.reshape(flat.shape)), flat.sum(0)
        dxhat = dy * weight.data
        by_rstd = xhat * _mean_of_products(dxhat, xhat)
        dxhat -= dxhat.mean(-1, keepdims=True)
        dxhat -= by_rstd
        dxhat *= rstd
        return dxhat, dweight, dbias

    return record(xhat * weight.data + bias.data, (x, weight, bias), derive)


def _mean_of_products(a, b):
    return np.einsum("...c,...c->...", a, b)[..., None] / a.shape[-1]


@op("embedding")
def embedding(weight, rows):  # (V, C), whole numbers of any shape
    """y[i] = weight[rows[i]]"""
    rows = _indices(rows, len(weight.data), "embedding")

    def derive(dy):
        """A row gets the sum over all places where it stands. Sorted, they lie side by side: one sum for each."""
        dweight, order = np.zeros_like(weight.data), np.argsort(rows, axis=None, kind="stable")
        seen, starts = np.unique(rows.ravel()[order], return_index=True)
        dweight[seen] = np.add.reduceat(dy.reshape(rows.size, -1)[order], starts)
        return (dweight,)

    return record(weight.data[rows], (weight,), derive)


@op("cross_entropy")
def cross_entropy(logits, targets):  # (..., V), (...)
    """loss = log Σ e^z - z[target], for each token. With its softmax in one: together their derivative is simple."""
    targets = _indices(targets, logits.shape[-1], "cross_entropy")[..., None]
    z = logits.data - logits.data.max(-1, keepdims=True)
    losses = -np.take_along_axis(z, targets, -1)
    p = np.exp(z, out=z)
    total = p.sum(-1, keepdims=True)
    losses += np.log(total)
    p /= total

    def derive(dy):
        """dz = (p - 1 at the target) · dloss"""
        np.put_along_axis(p, targets, np.take_along_axis(p, targets, -1) - 1, -1)
        return (p * dy[..., None],)

    return record(losses[..., 0], (logits,), derive)


def _indices(values, size: int, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise IndexError(f"{name}: indices from {values.min()} to {values.max()}, but there are {size} rows")
    return values


_random: ContextVar[np.random.Generator | None] = ContextVar("what dropout draws from", default=None)


@contextmanager
def drawing(random: np.random.Generator | None):
    """Inside the block dropout draws from this generator."""
    token = _random.set(random)
    try:
        yield
    finally:
        _random.reset(token)


def generator() -> np.random.Generator | None:
    return _random.get()


@op()
def dropout(x, rate: float):
    """y = x · kept / (1 - rate), kept = 1 with probability 1 - rate"""
    if rate == 0:
        return x
    kept = _kept(x.shape, rate)
    return record(x.data * kept * (1 / (1 - rate)), (x,), lambda dy: (dy * kept * (1 / (1 - rate)),))


def _kept(shape, rate):
    if generator() is None:
        raise RuntimeError("dropout has nothing to draw from: use it inside `with drawing(generator)`")
    return generator().random(shape, dtype=np.float32) >= rate


@op("attention")
def attention(qkv, rate: float = 0.0):  # (3, B, NH, T, HS): queries, keys, values
    """o = p v, p = softmax(q kᵀ / sqrt(HS)), for each head; a token sees itself and those before it. (B, NH, T, HS)

    Dropout, at this rate, is of p.
    """
    q, k, v = qkv.data
    B, NH, T, HS = q.shape
    scale = HS**-0.5
    p = (q * scale) @ k.swapaxes(-1, -2)  # (B, NH, T, T)
    p += np.triu(np.full((T, T), -np.inf, p.dtype), 1)  # the future: e^-inf is 0
    _softmax(p)
    factor = _kept(p.shape, rate) * p.dtype.type(1 / (1 - rate)) if rate else None
    o = np.empty((B, T, NH, HS), p.dtype).swapaxes(1, 2)  # so that the heads lie side by side without a copy
    np.matmul(p * factor if rate else p, v, out=o)

    def derive(do):
        """dv = pᵀ do, dp = do vᵀ, ds = p · (dp - Σ dp · p), dq = ds k / sqrt(HS), dk = dsᵀ q / sqrt(HS)"""
        dqkv = np.empty_like(qkv.data)  # with the memory in the order of qkv's
        dq, dk, dv = dqkv
        np.matmul((p * factor if rate else p).swapaxes(-1, -2), do, out=dv)
        ds = do @ v.swapaxes(-1, -2)  # as yet dp
        if rate:
            ds *= factor
        ds -= np.einsum("...s,...s->...", ds, p)[..., None]
        ds *= p
        ds *= scale
        np.matmul(ds, k, out=dq)
        np.matmul(ds.swapaxes(-1, -2), q, out=dk)
        return (dqkv,)

    return record(o, (qkv,), derive)


# ---- several graphs


def total(parts: list[Tensor], run: Callable[[Callable, list], Iterable] = map) -> Tensor:
    """The sum of losses whose graphs have only leaves in common, so that `run` may go back through them in threads."""
    leaves, nodes = sources(parts), [part.node for part in parts]

    def derive(dy):
        found = list(run(lambda node: backpropagate(node, dy), nodes))
        return [_sum_in_order([gradients[leaf] for gradients in found if leaf in gradients]) for leaf in leaves]

    return remember(np.sum([part.data for part in parts], axis=0, dtype=parts[0].data.dtype), leaves, derive)


def _sum_in_order(arrays):
    first, *others = arrays
    for array in others:
        first = first + array
    return first


# ---- what Tensor gets from here: operators and methods

for name, function in {
    "__add__": add,
    "__radd__": add,
    "__sub__": lambda a, b: a + (-b),
    "__rsub__": lambda a, b: -a + b,
    "__neg__": lambda a: a * -1,
    "__mul__": mul,
    "__rmul__": mul,
    "__truediv__": div,
    "__rtruediv__": lambda a, b: div(constant(b, a), a),
    "__pow__": power,
    "__matmul__": matmul,
    "__rmatmul__": lambda a, b: matmul(constant(b, a), a),
    "__getitem__": take,
}.items():
    setattr(Tensor, name, function)
for function in (exp, log, tanh, reshape, transpose, sum, mean, max):
    setattr(Tensor, function.__name__, function)
