"""Drawing tokens from a model, one after the other."""

from collections.abc import Callable, Iterator

import numpy as np

from base.errors import BadInput


def probabilities(logits: np.ndarray, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """Logits (V,) -> probabilities (V,), fp64: softmax of logits / temperature; the top k; of those the top p.

    The token with which the sum reaches `top_p` is kept (Holtzman et al. 2020, "nucleus sampling"); what is left sums
    to 1 again. BadInput where a logit is NaN or inf.
    """
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise BadInput("the model's logits are not finite: its weights are damaged or its training diverged")
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    with np.errstate(over="ignore"):  # a temperature of next to nothing: e^-inf is 0
        p = np.exp((logits - logits.max()) / temperature)
    likeliest = np.argsort(-p, kind="stable")
    if top_k is not None:
        p[likeliest[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[likeliest]) - p[likeliest]  # the probability of all likelier tokens
    p[likeliest[before >= top_p]] = 0
    return p / p.sum()


def generate(
    logits: Callable[[np.ndarray], np.ndarray],
    tokens: np.ndarray,
    block_size: int,
    count: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | list[int] = 0,
) -> Iterator[int]:
    """Yields `count` tokens, each drawn from the model's distribution given at most the last `block_size` before it.

    logits: int64 (1, T) -> (1, V), of the last position. tokens: the prompt, int (n,), n >= 1.
    """
    random, context = np.random.default_rng(seed), [int(token) for token in tokens]
    context = context[-block_size:]
    for _ in range(count):
        if len(context) > block_size:  # full: drop the oldest half, so that a cache is filled again only now and then
            context = context[-max(1, block_size // 2) :]
        row = logits(np.array([context], dtype=np.int64))[0]  # (V,)
        token = int(random.choice(len(row), p=probabilities(row, temperature, top_k, top_p)))
        context.append(token)
        yield token


def start_of_text(tokenizer) -> np.ndarray:
    """What an empty prompt starts from: a newline, or the first token where the vocabulary has none."""
    try:
        return tokenizer.encode("\n")
    except BadInput:
        return np.zeros(1, dtype=np.int32)
