"""Learning rate: linear warm-up, then half a cosine (Loshchilov & Hutter 2017, "SGDR", without restarts)."""

import math


def learning_rate(step: int, steps: int, lr: float, min_lr: float | None, warmup: int) -> float:
    """The learning rate of `step`, which counts from 0 to steps - 1.

    In the first `warmup` steps the rate climbs to `lr` in equal parts, from above 0. Then it falls along half a cosine,
    and the last step has `min_lr`. A warm-up as long as the run, or longer, ends one step before the run does. The only
    step of a run of one has `lr`. min_lr: None means a tenth of `lr`.
    """
    warmup = min(warmup, steps - 1)
    if step < warmup:
        return lr * (step + 1) / warmup
    decay_steps = steps - 1 - warmup
    progress = (step - warmup) / decay_steps if decay_steps else float(steps > 1)
    last_lr = lr / 10 if min_lr is None else min_lr
    return last_lr + 0.5 * (lr - last_lr) * (1 + math.cos(math.pi * progress))
