"""Text from a trained model."""

from collections.abc import Callable, Iterator

import numpy as np

from run.errors import BadInput


def generate(
    logits: Callable[[np.ndarray], np.ndarray],
    tokens: list[int],
    block_size: int,
    count: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[int]:
    """Yields `count` tokens, each drawn from the model's distribution given all before it.

    logits: int64 (1, T) -> (1, V). Temperature 0 takes the likeliest token. BadInput where logits are NaN or inf.
    """
    random = np.random.default_rng(seed)
    context = list(tokens)
    for _ in range(count):
        row = logits(np.array([context[-block_size:]], dtype=np.int64))[0].astype(np.float64)  # (V,)
        if not np.isfinite(row).all():
            raise BadInput("the model's logits are not finite: its weights are damaged or the run diverged")
        if temperature == 0:
            token = int(row.argmax())
        else:
            p = np.exp((row - row.max()) / temperature)
            token = int(random.choice(len(p), p=p / p.sum()))
        context.append(token)
        yield token
