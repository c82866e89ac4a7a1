"""Draws tokens from a model, one after the other."""

from collections.abc import Iterator

import numpy as np

from base.errors import BadInput
from model.backends import Logits


def probabilities(logits: np.ndarray, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """Probabilities (V,), fp64, from logits (V,): softmax(logits / temperature), cut to the likeliest tokens.

    First the `top_k` likeliest tokens are kept. Of those, the likeliest are kept until their sum reaches `top_p`, with
    the token that reaches it (Holtzman et al. 2020, "nucleus sampling"). All other tokens get 0, and the sum is made 1
    again. Temperature 0 gives the likeliest token 1. BadInput where a logit is NaN or inf.
    """
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise BadInput("the model's logits are not finite: its weights are damaged or its training diverged")
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf, and e^-inf is 0
        p = np.exp((logits - logits.max()) / temperature)
    likeliest = np.argsort(-p, kind="stable")
    if top_k is not None:
        p[likeliest[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[likeliest]) - p[likeliest]  # the sum over all likelier tokens
    p[likeliest[before >= top_p]] = 0
    return p / p.sum()


def generate(
    logits: Logits,
    tokens: np.ndarray,
    block_size: int,
    count: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | list[int] = 0,
) -> Iterator[int]:
    """Yields `count` tokens, each drawn from the model's distribution given at most the last `block_size` before it.

    tokens: the prompt, whole numbers (n,), n >= 1. The same seed draws the same tokens.
    """
    random = np.random.default_rng(seed)
    context = [int(token) for token in tokens][-block_size:]
    for _ in range(count):
        if len(context) > block_size:  # drop the older half at once, so that a KV cache is seldom filled anew
            context = context[-max(1, block_size // 2) :]
        row = logits(np.array([context], dtype=np.int64))[0]  # (V,)
        token = int(random.choice(len(row), p=probabilities(row, temperature, top_k, top_p)))
        context.append(token)
        yield token


def start_of_text(tokenizer) -> np.ndarray:
    """The tokens that an empty prompt starts from: a newline, or token 0 where the vocabulary has no newline."""
    try:
        return tokenizer.encode("\n")
    except BadInput:
        return np.zeros(1, dtype=np.int32)
