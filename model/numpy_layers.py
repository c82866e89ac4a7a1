"""The layers of GPT-2 by hand: each is a function, and its derivative is the function below it.

B batch · T time · N tokens (B · T) · C channels · V vocabulary · NH heads · HS head size (C / NH)

The gradient of the loss by `x` is `dx`. A layer's forward returns its result, and further arrays if its backward needs
more than inputs and result. Tokens lie flat, (N, C), so that a product over a batch is one product.

`low` is the compute dtype. Operands of products are kept narrow: in 16 bits, as amp/formats.py's `narrow` keeps them.
For the product they are widened to fp32, and its result and its gradients are rounded (the table of amp/policy.py). All
other arithmetic is fp32. With low = "fp32" nothing is rounded, and arrays in fp64 stay fp64.
"""

import math
from functools import lru_cache

import numpy as np

from amp.formats import narrow, round_to, widen

GELU_SCALE, GELU_CUBIC = (2 / math.pi) ** 0.5, 0.044715


def round_if_low(x, low):
    """x with its values rounded to bf16 or fp16, still as an fp32 array. In fp32 x itself, so fp64 stays fp64."""
    return x if low == "fp32" else round_to(x, low)


# ---- residual: y = x + f(x), hence dx = dy + what comes back through f. It needs no function.


# ---- dropout


def dropout(x, rate, random):
    """y = x · mask / (1 - rate), and the mask: 1 with probability 1 - rate. Without a generator x itself, and None."""
    if rate == 0 or random is None:
        return x, None
    mask = random.random(x.shape, dtype=np.float32) >= rate
    return x * mask * (1 / (1 - rate)), mask


def dropout_backward(dy, rate, mask):
    """dx = dy · mask / (1 - rate)"""
    return dy if mask is None else dy * mask * (1 / (1 - rate))


# ---- embedding


def embedding(tokens, wte, wpe):  # (B, T), (V, C), (block size, C)
    """x[b, t] = wte[token] + wpe[t]"""
    x = wte[tokens] + wpe[: tokens.shape[1]]  # (B, T, C)
    return x.reshape(-1, wte.shape[1])  # (N, C)


def embedding_backward(dx, tokens, wte, wpe):  # (N, C)
    """A row of dwte is the sum of dx over all places where its token stands, a row of dwpe the sum over the batch."""
    B, T = tokens.shape
    dwte, dwpe = np.zeros_like(wte), np.zeros_like(wpe)
    order = np.argsort(tokens.ravel(), kind="stable")  # equal tokens side by side: one sum for each
    seen, starts = np.unique(tokens.ravel()[order], return_index=True)
    dwte[seen] = np.add.reduceat(dx[order], starts)
    dwpe[:T] = dx.reshape(B, T, -1).sum(0)
    return dwte, dwpe


# ---- LayerNorm (Ba et al. 2016)


def layer_norm(x, weight, bias, eps=1e-5):  # (N, C)
    """y = weight · x̂ + bias, x̂ = (x - mean) · rstd, rstd = 1 / sqrt(variance + eps), over the channels of a token

    Returns y (N, C), and x̂ (N, C) and rstd (N, 1) for the backward pass.
    """
    xhat = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(_mean_of_products(xhat, xhat) + eps)  # (N, 1)
    xhat *= rstd
    return xhat * weight + bias, (xhat, rstd)


def layer_norm_backward(dy, weight, xhat, rstd):
    """dx = rstd · (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂)), with dx̂ = dy · weight

    x reaches y by three ways, a term for each: by itself, through the mean, and through rstd.
    """
    dweight, dbias = np.einsum("nc,nc->c", dy, xhat), dy.sum(0)
    dxhat = dy * weight
    by_rstd = xhat * _mean_of_products(dxhat, xhat)
    dx = dxhat - dxhat.mean(-1, keepdims=True)
    dx -= by_rstd
    dx *= rstd
    return dx, dweight, dbias


def _mean_of_products(a, b):  # (N, C) -> (N, 1)
    return np.einsum("nc,nc->n", a, b)[:, None] / a.shape[1]


# ---- linear


def linear(x, weight, bias, low):  # (N, in), (out, in), (out,) or None, all narrow
    """y = x Wᵀ + b"""
    y = widen(x) @ widen(weight).T
    if bias is not None:
        y += widen(bias)
    return narrow(y, low)  # (N, out)


def linear_backward(dy, x, weight, low):
    """dx = dy W, dW = dyᵀ x, db = sum of dy over the tokens.

    dW and db stay in fp32: they are sums over a part of the batch. They are rounded when the parts have been added.
    """
    dy = round_if_low(dy, low)
    return round_if_low(dy @ widen(weight), low), dy.T @ widen(x), dy.sum(0)


# ---- GELU, GPT-2's approximation by tanh (Hendrycks & Gimpel 2016)


def gelu(x, low):  # (N, 4C), narrow
    """y = x / 2 · (1 + tanh(u)), u = sqrt(2/π) · (x + 0.044715 x³)"""
    x = widen(x)
    y = _gelu_tanh(x, x * x)
    y += 1
    y *= x
    y *= 0.5
    return narrow(y, low)


def gelu_backward(dy, x):
    """dy/dx = (1 + tanh(u)) / 2 + x / 2 · (1 - tanh²(u)) · du/dx, du/dx = sqrt(2/π) · (1 + 3 · 0.044715 x²)"""
    x = widen(x)
    xx = x * x
    dx = (3 * GELU_SCALE * GELU_CUBIC) * xx  # in place from here on: the arrays of this layer are the largest
    dx += GELU_SCALE  # du/dx
    dx *= x
    tanh = _gelu_tanh(x, xx)
    dx *= 1 - tanh * tanh
    dx += tanh
    dx += 1
    dx *= dy
    dx *= 0.5
    return dx


def _gelu_tanh(x, xx):
    """tanh(u), written into the memory of xx = x²"""
    xx *= GELU_SCALE * GELU_CUBIC
    xx += GELU_SCALE
    xx *= x
    return np.tanh(xx, out=xx)


# ---- causal multi-head self-attention (Vaswani et al. 2017)


def attention(qkv, B, NH, low, rate, random):  # (N, 3C), narrow
    """o = p v, p = softmax(s), s = q kᵀ / sqrt(HS) for each head; a token sees itself and those before it.

    s stays in fp32, as in a fused kernel; p is rounded, since it is an operand of the second product. Returns o (N, C)
    and p (B, NH, T, T), both narrow, and dropout's mask of p.
    """
    q, k, v = _heads(widen(qkv), B, NH, 3)  # (B, NH, T, HS) each
    T, HS = q.shape[2:]
    p = (q * HS**-0.5) @ k.swapaxes(-1, -2)  # (B, NH, T, T), so far s
    p += _future(T)  # e^-inf is 0
    p -= p.max(-1, keepdims=True)  # e^x cannot overflow then, and the softmax is the same
    np.exp(p, out=p)
    p /= np.einsum("bhts->bht", p)[..., None]
    p = narrow(p, low)
    dropped, mask = dropout(widen(p), rate, random)
    o = np.empty((len(qkv), NH * HS), dtype=dropped.dtype)  # (N, C)
    _heads(o, B, NH)[0][...] = (dropped if mask is None else round_if_low(dropped, low)) @ v
    return narrow(o, low), p, mask


def attention_backward(do, qkv, p, mask, B, NH, low, rate):  # (N, C)
    """dv = pᵀ do, dp = do vᵀ; by the softmax ds = p · (dp - Σ dp · p); dq = ds k / sqrt(HS), dk = dsᵀ q / sqrt(HS).

    The sum goes over the tokens that one token sees. A token in the future has p = 0, hence ds = 0. dq, dk and dv
    (N, 3C) are not rounded here: linear_backward rounds what it is given.
    """
    q, k, v = _heads(widen(qkv), B, NH, 3)  # (B, NH, T, HS) each
    (do,) = _heads(do, B, NH)
    p = widen(p)
    dropped = p if mask is None else round_if_low(dropout_backward(p, rate, mask), low)
    ds = dropout_backward(do @ v.swapaxes(-1, -2), rate, mask)  # (B, NH, T, T), so far dp
    ds -= np.einsum("bhts,bhts->bht", ds, p)[..., None]
    ds *= p
    ds *= q.shape[-1] ** -0.5
    ds = round_if_low(ds, low)
    dqkv = np.empty(qkv.shape, dtype=ds.dtype)  # (N, 3C)
    dq, dk, dv = _heads(dqkv, B, NH, 3)
    dq[...] = ds @ k
    dk[...] = ds.swapaxes(-1, -2) @ q
    dv[...] = dropped.swapaxes(-1, -2) @ do
    return dqkv


@lru_cache(maxsize=1)
def _future(T):
    """Attention's causal mask (T, T): -inf where a token would see one after it, else 0."""
    return np.triu(np.full((T, T), -np.inf, dtype=np.float32), 1)


def _heads(x, B, NH, n=1):
    """(N, n C) -> n views (B, NH, T, HS): queries, keys and values lie side by side in the channels."""
    return x.reshape(B, len(x) // B, n, NH, -1).transpose(2, 0, 3, 1, 4)


# ---- softmax and cross-entropy in one layer: their common derivative is simpler than each of the two


def cross_entropy(logits, targets):  # (N, V) narrow, (N,)
    """loss = log Σ e^z - z[target] for each token, and p = softmax(z)"""
    z = widen(logits)
    z = z - z.max(-1, keepdims=True)
    p = np.exp(z)
    total = p.sum(-1, keepdims=True)  # (N, 1)
    losses = np.log(total[:, 0]) - z[np.arange(len(z)), targets]  # (N,)
    p /= total
    return losses, p


def cross_entropy_backward(dlosses, p, targets):  # (N,)
    """dz = (p - 1 at the target) · dloss"""
    dlogits = p.copy()
    dlogits[np.arange(len(p)), targets] -= 1
    dlogits *= dlosses[:, None]
    return dlogits
