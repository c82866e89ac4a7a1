"""The layers of GPT-2 by hand: each is a function, and its derivative is the function below it.

B batch · T time · N tokens (B · T) · C channels · V vocabulary · NH heads · HS head size (C / NH)

The gradient of the loss by `x` is `dx`. A layer's forward returns its result, and what its backward needs where that is
more than inputs and result. Tokens lie flat, (N, C), so that a product over a batch is one product.

`low` is the compute dtype. Operands of products are kept narrow, in 16 bits, and widened to fp32 for the product; its
result and its gradients are rounded (the table of amp/policy.py). All other arithmetic is fp32. Where low is "fp32"
nothing is rounded, so arrays in fp64 go through in fp64.
"""

import math
from functools import lru_cache

import numpy as np

from amp.formats import narrow, round_to, widen

GELU_SCALE, GELU_CUBIC = (2 / math.pi) ** 0.5, 0.044715


def rounded(x, low):
    """Rounds to the compute dtype; the storage stays as it is."""
    return x if low == "fp32" else round_to(x, low)


# ---- residual: y = x + f(x), hence dx = dy + what comes back through f. It needs no function.


# ---- dropout


def dropout(x, rate, random):
    """y = x · kept / (1 - rate), kept = 1 with probability 1 - rate. No generator: x itself."""
    if rate == 0 or random is None:
        return x, None
    kept = random.random(x.shape, dtype=np.float32) >= rate
    return x * kept * (1 / (1 - rate)), kept


def dropout_backward(dy, rate, kept):
    return dy if kept is None else dy * kept * (1 / (1 - rate))


# ---- embedding


def embedding(tokens, wte, wpe):  # (B, T), (V, C), (block size, C)
    """x[b, t] = wte[token] + wpe[t]"""
    x = wte[tokens] + wpe[: tokens.shape[1]]  # (B, T, C)
    return x.reshape(-1, wte.shape[1])  # (N, C)


def embedding_backward(dx, tokens, wte, wpe):  # (N, C)
    """A row of wte gets the sum of dx over all places where its token stands, a row of wpe over the batch."""
    B, T = tokens.shape
    dwte, dwpe = np.zeros_like(wte), np.zeros_like(wpe)
    order = np.argsort(tokens.ravel(), kind="stable")  # equal tokens side by side: one sum for each
    seen, starts = np.unique(tokens.ravel()[order], return_index=True)
    dwte[seen] = np.add.reduceat(dx[order], starts)
    dwpe[:T] = dx.reshape(B, T, -1).sum(0)
    return dwte, dwpe


# ---- LayerNorm (Ba et al. 2016)


def layer_norm(x, weight, bias, eps=1e-5):  # (N, C)
    """y = weight · x̂ + bias, x̂ = (x - mean) · rstd, rstd = 1 / sqrt(variance + eps), over the channels of a token"""
    xhat = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(_mean_of_products(xhat, xhat) + eps)  # (N, 1)
    xhat *= rstd
    return xhat * weight + bias, (xhat, rstd)


def layer_norm_backward(dy, weight, xhat, rstd):
    """x reaches y by three ways: itself, the mean, and rstd. With dx̂ = dy · weight,

    dx = rstd · (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂))
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

    dW and db stay in fp32: they are the sums of a part of the batch, and are rounded when the parts are added.
    """
    dy = rounded(dy, low)
    return rounded(dy @ widen(weight), low), dy.T @ widen(x), dy.sum(0)


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
    """tanh(u); in the memory of xx = x²"""
    xx *= GELU_SCALE * GELU_CUBIC
    xx += GELU_SCALE
    xx *= x
    return np.tanh(xx, out=xx)


# ---- causal multi-head self-attention (Vaswani et al. 2017)


def attention(qkv, B, NH, low, rate, random):  # (N, 3C), narrow
    """o = p v, p = softmax(s), s = q kᵀ / sqrt(HS) for each head; a token sees itself and those before it.

    As a fused kernel does it, s stays in fp32, and p is rounded, as an operand of the second product.
    """
    q, k, v = _heads(widen(qkv), B, NH, 3)  # (B, NH, T, HS) each
    T, HS = q.shape[2:]
    p = (q * HS**-0.5) @ k.swapaxes(-1, -2)  # (B, NH, T, T), as yet s
    p += _future(T)  # e^-inf is 0
    p -= p.max(-1, keepdims=True)  # e^x cannot overflow then, and the softmax is the same
    np.exp(p, out=p)
    p /= np.einsum("bhts->bht", p)[..., None]
    p = narrow(p, low)
    dropped, kept = dropout(widen(p), rate, random)
    o = np.empty((len(qkv), NH * HS), dtype=dropped.dtype)  # (N, C)
    _heads(o, B, NH)[0][...] = (dropped if kept is None else rounded(dropped, low)) @ v
    return narrow(o, low), p, kept


def attention_backward(do, qkv, p, kept, B, NH, low, rate):  # (N, C)
    """dv = pᵀ do, dp = do vᵀ; by the softmax ds = p · (dp - Σ dp · p); dq = ds k / sqrt(HS), dk = dsᵀ q / sqrt(HS).

    The sum goes over the tokens that one token sees. What no token sees has p = 0, hence ds = 0. dq, dk and dv are
    rounded where linear_backward takes them.
    """
    q, k, v = _heads(widen(qkv), B, NH, 3)  # (B, NH, T, HS) each
    (do,) = _heads(do, B, NH)
    p = widen(p)
    dropped = p if kept is None else rounded(dropout_backward(p, rate, kept), low)
    ds = dropout_backward(do @ v.swapaxes(-1, -2), rate, kept)  # (B, NH, T, T), as yet dp
    ds -= np.einsum("bhts,bhts->bht", ds, p)[..., None]
    ds *= p
    ds *= q.shape[-1] ** -0.5
    ds = rounded(ds, low)
    dqkv = np.empty(qkv.shape, dtype=ds.dtype)  # (N, 3C)
    dq, dk, dv = _heads(dqkv, B, NH, 3)
    dq[...] = ds @ k
    dk[...] = ds.swapaxes(-1, -2) @ q
    dv[...] = dropped.swapaxes(-1, -2) @ do
    return dqkv


@lru_cache(maxsize=1)
def _future(T):
    """(T, T): -inf where a token would see one after it, else 0."""
    return np.triu(np.full((T, T), -np.inf, dtype=np.float32), 1)


def _heads(x, B, NH, n=1):
    """(N, n C) -> n views (B, NH, T, HS): queries, keys and values lie side by side in the channels."""
    return x.reshape(B, len(x) // B, n, NH, -1).transpose(2, 0, 3, 1, 4)


# ---- softmax and cross-entropy, in one: together their derivative is simple


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
