"""Rows of tokens as a pure function of (seed, split, step, row): there is nothing to save and nothing to restore.

Row r = micro * batch_size + b of a step starts where the r-th number of that step's random stream says. So 4
micro-batches of 8 are the same rows as one batch of 32, and a resumed run sees the rows it would have seen anyway.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from base.errors import BadInput

SPLITS = ("train", "val")
Batch = tuple[np.ndarray, np.ndarray]  # inputs x and targets y: x shifted by one token; int64, one shape


class Batches:
    """Training rows and validation windows of one corpus.

    tokens: int array (n,), the first 90 % for training, the rest for validation. block_size: T. batch_size: B.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int):
        cut = len(tokens) * 9 // 10
        self.tokens = {"train": tokens[:cut], "val": tokens[cut:]}
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        if len(self.tokens["train"]) < block_size + 1 or len(self.tokens["val"]) < 2:
            raise BadInput(
                f"text too short: {len(tokens)} tokens, a block of {block_size} needs {smallest_text(block_size)} "
                f"({block_size + 1} in the 90 % for training, 2 in the rest): use a longer text or a smaller block size"
            )

    def get(self, split: str, step: int, micro: int) -> Batch:
        """Returns x and y of one micro-batch, both (B, T)."""
        tokens = self.tokens[split]
        # Philox is counter-based (Salmon et al. 2011): a stream for each (seed, split, step), number r for row r.
        stream = np.random.Philox(key=[self.seed, SPLITS.index(split)], counter=[0, step, 0, 0])
        numbers = stream.random_raw((micro + 1) * self.batch_size)[-self.batch_size :]  # (B,)
        starts = (numbers % np.uint64(len(tokens) - self.block_size)).astype(np.int64)
        rows = tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)  # (B, T+1)
        return rows[:, :-1], rows[:, 1:]

    def windows(self, split: str, batch_size: int) -> Iterator[Batch]:
        """Yields every token of the split once, as x and y of at most `batch_size` windows: (≤ batch_size, T).

        The last window is shorter where T does not divide the tokens. That window comes alone.
        """
        tokens = self.tokens[split].astype(np.int64)
        T = self.block_size
        whole = (len(tokens) - 1) // T
        x = tokens[: whole * T].reshape(whole, T)
        y = tokens[1 : whole * T + 1].reshape(whole, T)
        for start in range(0, whole, batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]
        if whole * T < len(tokens) - 1:
            yield tokens[None, whole * T : -1], tokens[None, whole * T + 1 :]


def smallest_text(block_size: int) -> int:
    """Returns how many tokens a corpus needs for this block size, so that both splits have something to predict."""
    for_training = -(-(block_size + 1) * 10 // 9)  # the least n for which 9 n / 10, rounded down, is block_size + 1
    return max(for_training, 11)  # 11 tokens leave 2 for validation


def mean_loss(
    evaluate: Callable[[np.ndarray, np.ndarray], np.ndarray], windows: Iterable[Batch]
) -> tuple[float, float]:
    """Returns the mean loss per token over all windows, and its standard error, in nats.

    evaluate(x, y) returns the mean loss of each window, (B,). A window is the sampling unit, since the tokens of one
    window are not independent. One window alone has no standard error: NaN.
    """
    per_window, token_counts = [], []
    for x, y in windows:
        per_window.append(np.asarray(evaluate(x, y), dtype=np.float64))
        token_counts.append(np.full(len(x), x.shape[1], dtype=np.float64))
    losses = np.concatenate(per_window)
    weights = np.concatenate(token_counts)
    weights /= weights.sum()
    mean = float((weights * losses).sum())
    n = len(losses)
    if n == 1:
        return mean, float("nan")
    variance = (weights**2 * (losses - mean) ** 2).sum() * n / (n - 1)
    return mean, float(np.sqrt(variance))
