"""The ops of a GPT's layers, each with its backward below its forward. The elementary ops are in tensor.py.

B batch · T time · C channels · V vocabulary · NH heads · HS head size; the gradient of `x` is `dx`
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import ArrayLike

from engine.graph import backpropagate, sources
from engine.tensor import Tensor, op, record, record_nodes

GELU_SCALE = (2 / math.pi) ** 0.5
GELU_CUBIC = 0.044715

_generator: ContextVar[np.random.Generator | None] = ContextVar("dropout draws from", default=None)


@op("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None):  # (..., in), (out, in), (out,)
    """y = x Wᵀ + b, of shape (..., out)."""
    shape = x.shape
    flat = x.data.reshape(-1, shape[-1])  # one product for the whole batch
    y = flat @ weight.data.T
    if bias is not None:
        y += bias.data

    def backward(dy):
        dy = dy.reshape(-1, dy.shape[-1])
        dx = (dy @ weight.data).reshape(shape)
        dweight = dy.T @ flat
        return (dx, dweight) if bias is None else (dx, dweight, dy.sum(0))

    return record(y.reshape(*shape[:-1], -1), (x, weight) if bias is None else (x, weight, bias), backward)


@op("gelu")
def gelu(x: Tensor):
    """y = x / 2 · (1 + tanh(u)), u = sqrt(2/π) · (x + 0.044715 x³); GPT-2's (Hendrycks & Gimpel 2016)."""
    data = x.data
    u = data * data  # in place from here on: these arrays are the largest of a step
    u *= GELU_SCALE * GELU_CUBIC
    u += GELU_SCALE
    u *= data
    tanh = np.tanh(u, out=u)
    y = tanh + 1
    y *= data
    y *= 0.5

    def backward(dy):
        """dy/dx = (1 + tanh(u) + x · (1 - tanh²(u)) · du/dx) / 2, du/dx = sqrt(2/π) · (1 + 3 · 0.044715 x²)"""
        dx = data * data
        dx *= 3 * GELU_SCALE * GELU_CUBIC
        dx += GELU_SCALE  # du/dx
        dx *= data
        dx *= 1 - tanh * tanh
        dx += tanh
        dx += 1
        dx *= dy
        dx *= 0.5
        return (dx,)

    return record(y, (x,), backward)


@op("softmax")
def softmax(x: Tensor):
    """p = e^x / Σ e^x, over the last axis."""
    p = softmax_in_place(x.data.copy())

    def backward(dp):
        """dx = p · (dp - Σ dp · p)"""
        return (p * (dp - (dp * p).sum(-1, keepdims=True)),)

    return record(p, (x,), backward)


def softmax_in_place(x: np.ndarray) -> np.ndarray:
    """Overwrites x with its softmax. Without its maximum x has the same softmax, and e^x cannot overflow."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= np.einsum("...i->...", x)[..., None]
    return x


@op("layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5):  # (..., C), (C,), (C,)
    """y = weight · x̂ + bias, x̂ = (x - mean) · rstd, rstd = 1 / sqrt(variance + eps) (Ba et al. 2016)."""
    xhat = x.data - x.data.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(mean_of_products(xhat, xhat) + eps)  # (..., 1)
    xhat *= rstd

    def backward(dy):
        """dx = rstd · (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂)): x acts directly, through the mean, through rstd."""
        flat = dy.reshape(-1, dy.shape[-1])
        dweight = np.einsum("nc,nc->c", flat, xhat.reshape(flat.shape))
        dbias = flat.sum(0)
        dxhat = dy * weight.data
        through_rstd = xhat * mean_of_products(dxhat, xhat)
        dxhat -= dxhat.mean(-1, keepdims=True)
        dxhat -= through_rstd
        dxhat *= rstd
        return dxhat, dweight, dbias

    return record(xhat * weight.data + bias.data, (x, weight, bias), backward)


def mean_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # (..., C), (..., C) -> (..., 1)
    return np.einsum("...c,...c->...", a, b)[..., None] / a.shape[-1]


@op("embedding")
def embedding(weight: Tensor, indices: ArrayLike):  # (V, C), whole numbers (...) -> (..., C)
    """y[i] = weight[indices[i]]. IndexError for an index below 0 or above V - 1."""
    indices = checked_indices(indices, len(weight.data), "embedding")

    def backward(dy):
        """A row gets the sum over all places where it was looked up. Sorted, equal indices are neighbours."""
        order = np.argsort(indices, axis=None, kind="stable")
        looked_up, starts = np.unique(indices.ravel()[order], return_index=True)
        dweight = np.zeros_like(weight.data)
        dweight[looked_up] = np.add.reduceat(dy.reshape(indices.size, -1)[order], starts)
        return (dweight,)

    return record(weight.data[indices], (weight,), backward)


@op("cross_entropy")
def cross_entropy(logits: Tensor, targets: ArrayLike):  # (..., V), whole numbers (...) -> (...)
    """loss = log Σ e^z - z[target] of each token, in nats. It contains the softmax, so that dz is p - 1[target]."""
    targets = checked_indices(targets, logits.shape[-1], "cross_entropy")[..., None]
    z = logits.data - logits.data.max(-1, keepdims=True)
    losses = -np.take_along_axis(z, targets, -1)
    p = np.exp(z, out=z)
    sum_of_exp = p.sum(-1, keepdims=True)
    losses += np.log(sum_of_exp)
    p /= sum_of_exp

    def backward(dloss):
        """dz = (p - 1[target]) · dloss"""
        np.put_along_axis(p, targets, np.take_along_axis(p, targets, -1) - 1, -1)
        return (p * dloss[..., None],)

    return record(losses[..., 0], (logits,), backward)


def checked_indices(indices: ArrayLike, size: int, name: str) -> np.ndarray:
    """The indices as an array. IndexError, naming the op, unless all are from 0 to size - 1."""
    indices = np.asarray(indices)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        lowest, highest = indices.min(), indices.max()
        raise IndexError(f"{name}: indices from {lowest} to {highest}, but there are {size} rows")
    return indices


@op("attention")
def attention(qkv: Tensor, rate: float = 0.0):  # (3, B, NH, T, HS): queries, keys, values -> (B, NH, T, HS)
    """o = p v, p = softmax(q kᵀ / sqrt(HS)), for each head. A token sees itself and the tokens before it.

    `rate` is the share of p's entries that dropout sets to 0. Source: Vaswani et al. 2017, equation 1.
    """
    q, k, v = qkv.data
    B, NH, T, HS = q.shape
    scale = HS**-0.5
    p = (q * scale) @ k.swapaxes(-1, -2)  # (B, NH, T, T)
    p += np.triu(np.full((T, T), -np.inf, p.dtype), 1)  # the future: e^-inf is 0
    softmax_in_place(p)
    mask = draw_kept(p.shape, rate) * p.dtype.type(1 / (1 - rate)) if rate else None
    o = np.empty((B, T, NH, HS), p.dtype).swapaxes(1, 2)  # in memory (B, T, NH, HS): to join heads needs no copy
    np.matmul(p if mask is None else p * mask, v, out=o)

    def backward(do):
        """dv = pᵀ do, dp = do vᵀ, ds = p · (dp - Σ dp · p), dq = ds k / sqrt(HS), dk = dsᵀ q / sqrt(HS)"""
        dqkv = np.empty_like(qkv.data)  # also in qkv's order of memory
        dq, dk, dv = dqkv
        np.matmul((p if mask is None else p * mask).swapaxes(-1, -2), do, out=dv)
        dp = do @ v.swapaxes(-1, -2)
        if mask is not None:
            dp *= mask
        ds = dp  # in place: (B, NH, T, T) is large
        ds -= np.einsum("...s,...s->...", dp, p)[..., None]
        ds *= p
        ds *= scale
        np.matmul(ds, k, out=dq)
        np.matmul(ds.swapaxes(-1, -2), q, out=dk)
        return (dqkv,)

    return record(o, (qkv,), backward)


# ---- dropout, and the generator that it draws from


@op()
def dropout(x: Tensor, rate: float):
    """y = x · kept / (1 - rate), kept = 1 with probability 1 - rate (Srivastava et al. 2014)."""
    if rate == 0:
        return x
    kept = draw_kept(x.shape, rate)
    return record(x.data * kept * (1 / (1 - rate)), (x,), lambda dy: (dy * kept * (1 / (1 - rate)),))


def draw_kept(shape: tuple[int, ...], rate: float) -> np.ndarray:
    """A bool array: True with probability 1 - rate. RuntimeError outside a block of `drawing`."""
    generator = current_generator()
    if generator is None:
        raise RuntimeError("dropout has nothing to draw from: use it inside `with drawing(generator)`")
    return generator.random(shape, dtype=np.float32) >= rate


@contextmanager
def drawing(generator: np.random.Generator | None):
    """Inside the block dropout draws from this generator. After the block the former one returns."""
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


def current_generator() -> np.random.Generator | None:
    return _generator.get()


# ---- the loss of a batch whose rows were computed in several threads


def sum_losses(losses: Sequence[Tensor], map_in_threads: Callable[..., Iterable] = map) -> Tensor:
    """The sum of losses whose graphs share only leaves. Backward visits the graphs by `map_in_threads`.

    The gradients of a leaf are added in the order of the losses, so the number of threads changes no bit.
    """
    nodes = [loss.node for loss in losses if loss.node is not None]
    leaves = sources(nodes)

    def backward(dy):
        gradients = list(map_in_threads(lambda node: backpropagate(node, dy), nodes))  # one dict a loss
        return [add_in_order([of_loss[leaf] for of_loss in gradients if leaf in of_loss]) for leaf in leaves]

    loss = np.sum([loss.data for loss in losses], axis=0, dtype=losses[0].data.dtype)
    return record_nodes(loss, leaves, backward)


def add_in_order(arrays: Sequence[np.ndarray]) -> np.ndarray:
    first, *others = arrays
    for array in others:
        first = first + array
    return first
