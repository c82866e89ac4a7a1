"""Learning rate: linear warm-up, then half a cosine (Loshchilov & Hutter 2017, "SGDR", without restarts)."""

import math


def learning_rate(step: int, steps: int, lr: float, min_lr: float, warmup: int) -> float:
    """Learning rate of `step` (0 to steps - 1). The first is above 0, the last is `min_lr` (of one step only: `lr`).

    `warmup` steps climb to `lr` in equal parts; a warm-up longer than the run ends one step before it.
    """
    warmup = min(warmup, steps - 1)
    if step < warmup:
        return lr * (step + 1) / warmup
    decay_steps = steps - 1 - warmup
    progress = (step - warmup) / decay_steps if decay_steps else float(steps > 1)
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * progress))
