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
    """Writes a PNG of the rows of a log to `path`: the loss, the learning rate, and the loss scale with its skips."""
    from matplotlib.figure import Figure  # on demand: the import takes a second that a failing run need not spend

    figure = Figure(figsize=(8, 7), layout="constrained")  # no pyplot: a notebook's backend stays as it is
    loss, lr, scale = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    steps = [row.step for row in rows]
    loss.plot(steps, [row.loss for row in rows], color="tab:blue", linewidth=0.8, label="training (one step)")
    _draw_validation(loss, [row for row in rows if row.val is not None])
    loss.set_ylabel("loss (nats per token)")
    loss.set_title(title, parse_math=False)
    loss.legend()
    lr.plot(steps, [row.lr for row in rows], color="tab:green")
    lr.set_ylabel("learning rate")
    scale.step(steps, [row.scale for row in rows], where="post", color="tab:purple")
    _draw_skips(scale, [after for before, after in pairwise(rows) if (after.skipped or 0) > (before.skipped or 0)])
    scale.set(ylabel="loss scale", xlabel="step")
    scale.set_yscale("log", base=2)
    for axes in (loss, lr, scale):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw_validation(axes, rows: list[Row]) -> None:
    """Validation losses with their standard errors; the best one is written beside its point."""
    if not rows:
        return
    points = [(row.step, row.val) for row in rows if row.val is not None]
    steps, losses = zip(*points, strict=True)
    style = dict(color="tab:orange", marker="o", capsize=3, label="validation ± standard error")
    axes.errorbar(steps, losses, yerr=[math.nan if row.val_error is None else row.val_error for row in rows], **style)
    step, best = min(points, key=lambda point: math.inf if math.isnan(point[1]) else point[1])
    axes.annotate(f"{best:.3f}", (step, best), textcoords="offset points", xytext=(0, 8), ha="center")


def _draw_skips(axes, rows: list[Row]) -> None:
    """Draws a red cross at each row that follows skipped steps."""
    if rows:
        axes.plot(
            [row.step for row in rows], [row.scale for row in rows], "rx", label="steps skipped since the last row"
        )
        axes.legend()
