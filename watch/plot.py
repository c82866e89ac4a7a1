"""The picture of a run: loss and validation, learning rate, loss scale with its skipped steps."""

import math
from itertools import pairwise
from pathlib import Path

from run.log import Row, read_log
from watch.watch import Sink


class Picture(Sink):
    """Draws loss.png when a run ends, however it ends."""

    name = "picture"

    def __init__(self, out: Path):
        self.out = out

    def end(self) -> None:
        if (self.out / "log.csv").exists():  # otherwise the run ended before there was a row
            plot(read_log(self.out / "log.csv"), self.out / "loss.png", self.out.name)


def plot(rows: list[Row], path: Path, title: str = "") -> None:
    """Rows as run/log.py reads them -> a PNG at `path`."""
    import matplotlib  # here, not above: importing it takes a second that a failing run need not spend

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row.step for row in rows]
    figure, (loss, lr, scale) = plt.subplots(
        3, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1, 1), layout="constrained"
    )
    loss.plot(steps, [row.loss for row in rows], color="tab:blue", linewidth=0.8, label="training (one step)")
    validated = [row for row in rows if row.val is not None]
    if validated:
        errors = [row.val_error for row in validated]
        points = [row.step for row in validated], [row.val for row in validated]
        loss.errorbar(
            *points, yerr=errors, color="tab:orange", marker="o", capsize=3, label="validation ± standard error"
        )
        best = min(validated, key=lambda row: math.inf if math.isnan(row.val) else row.val)
        loss.annotate(f"{best.val:.3f}", (best.step, best.val), textcoords="offset points", xytext=(0, 8), ha="center")
    loss.set(ylabel="loss (nats per token)", title=title)
    loss.legend()
    lr.plot(steps, [row.lr for row in rows], color="tab:green")
    lr.set(ylabel="learning rate")
    scale.step(steps, [row.scale for row in rows], where="post", color="tab:purple")
    skipped = [after for before, after in pairwise(rows) if after.skipped > before.skipped]
    if skipped:
        at = [row.step for row in skipped], [row.scale for row in skipped]
        scale.plot(*at, "rx", label="steps skipped since the last row")
        scale.legend()
    scale.set(ylabel="loss scale", xlabel="step")
    scale.set_yscale("log", base=2)
    for axes in (loss, lr, scale):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
