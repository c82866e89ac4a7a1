"""Rows of tokens as a pure function of (seed, split, step, row): nothing to save, nothing to restore.

Row r = micro * batch_size + b of a step starts where the r-th number of that step's random stream says. So 4
micro-batches of 8 are the same rows as one batch of 32, and a resumed run sees the rows it would have seen anyway.
"""

from collections.abc import Iterator

import numpy as np

from base.errors import BadInput

SPLITS = ("train", "val")


class Batches:
    """Training rows and validation windows of one corpus.

    tokens: int array (n,), the first 90 % for training, the rest for validation. block_size: T. batch_size: B.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int):
        cut = len(tokens) * 9 // 10
        self.tokens = {"train": tokens[:cut], "val": tokens[cut:]}
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        if len(self.tokens["train"]) < block_size + 1 or len(self.tokens["val"]) < 2:
            raise BadInput(
                f"text too short: {len(tokens)} tokens, a block of {block_size} needs {smallest_text(block_size)} "
                f"({block_size + 1} in the 90 % for training, 2 in the rest): use a longer text or a smaller block size"
            )

    def get(self, split: str, step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs x and targets y (x shifted by one token), int64, both (B, T)."""
        tokens, rows = self.tokens[split], (micro + 1) * self.batch_size
        # Philox is counter-based (Salmon et al. 2011): a stream for each (seed, split, step), element r for row r.
        stream = np.random.Philox(key=[self.seed, SPLITS.index(split)], counter=[0, step, 0, 0])
        draws = stream.random_raw(rows)[-self.batch_size :]
        starts = (draws % np.uint64(len(tokens) - self.block_size)).astype(np.int64)
        rows = tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)  # (B, T+1)
        return rows[:, :-1], rows[:, 1:]

    def windows(self, split: str, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every token of the split once, as (x, y) of at most `batch_size` windows; the ragged last one comes alone."""
        tokens, T = self.tokens[split].astype(np.int64), self.block_size
        whole = (len(tokens) - 1) // T
        x, y = tokens[: whole * T].reshape(whole, T), tokens[1 : whole * T + 1].reshape(whole, T)
        for start in range(0, whole, batch_size):
            yield x[start : start + batch_size], y[start : start + batch_size]
        if whole * T < len(tokens) - 1:
            yield tokens[None, whole * T : -1], tokens[None, whole * T + 1 :]


def smallest_text(block_size: int) -> int:
    """Tokens that a corpus needs at least for this block size: both splits must hold something to predict."""
    for_training = -(-(block_size + 1) * 10 // 9)  # the least n with 9 n / 10, rounded down, of block_size + 1
    return max(for_training, 11)  # of 11, 2 remain for validation


def mean_loss(evaluate, windows) -> tuple[float, float]:
    """Mean loss per token over all windows, and its standard error, in nats.

    evaluate(x, y) -> (B,) mean loss of each window. Windows are the sampling unit: tokens of one are not independent.
    """
    losses, weights = [], []
    for x, y in windows:
        losses.append(np.asarray(evaluate(x, y), dtype=np.float64))
        weights.append(np.full(len(x), x.shape[1], dtype=np.float64))
    losses, weights = np.concatenate(losses), np.concatenate(weights)
    weights /= weights.sum()
    mean = float((weights * losses).sum())
    n = len(losses)
    error = float(np.sqrt((weights**2 * (losses - mean) ** 2).sum() * n / (n - 1))) if n > 1 else float("nan")
    return mean, error
