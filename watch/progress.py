"""The sink for a person: a bar on a terminal, plain lines elsewhere."""

import math
import sys

from tqdm import tqdm

from base.errors import FULL
from run.log import Row
from watch.watch import Sink


def line(row: Row) -> str:
    """`step 50 | loss 2.3101 | val 2.3411 ± 0.0040 | lr 1.0e-03 | …`; without `val` where nothing was validated."""
    val = [] if row.val is None else [f"val {row.val:.4f} ± {row.val_error:.4f}"]
    return " | ".join([
        f"step {row.step}",
        f"loss {row.loss:.4f}",
        *val,
        f"lr {row.lr:.1e}",
        f"grad {row.grad_norm:.2f}",
        f"scale {row.scale:.10g}",
        f"skipped {row.skipped}",
        f"{thousands(row.tokens_per_second)} tok/s",
    ])  # fmt: skip


def short(row: Row) -> str:
    """The same numbers in 70 characters, for the line of the bar; a scale that is a power of two as 2^15."""
    val = "" if row.val is None else f"val {row.val:.3f} "
    exponent = math.log2(row.scale) if row.scale > 0 else math.nan
    scale = f"2^{exponent:.0f}" if exponent % 1 == 0 else f"{row.scale:.4g}"
    return (
        f"loss {row.loss:.3f} {val}lr {row.lr:.2g} grad {row.grad_norm:.1f} "
        f"scale {scale} skip {row.skipped} {thousands(row.tokens_per_second)} tok/s"
    )


def thousands(x: float) -> str:
    """13100 -> 13.1k"""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if math.isfinite(x) and x >= 0.99995 * size:  # 999,960 is 1.0M
            return f"{x / size:.1f}{unit}"
    return f"{x:.0f}"


class Progress(Sink):
    """Moves a bar at each step, and shows each row: beside the bar on a terminal, as a line of its own elsewhere."""

    name = "progress"

    def __init__(self, first_step: int, steps: int):
        self.first_step, self.steps = first_step, steps
        self.last_val: float | None = None

    def begin(self) -> None:
        self.terminal = sys.stdout.isatty() and sys.stderr.isatty()
        form = "{percentage:3.0f}% {bar}{remaining} {desc}"  # the bar fills the room that the numbers leave
        self.bar = tqdm(
            total=self.steps,
            initial=self.first_step,
            disable=not self.terminal,
            dynamic_ncols=True,
            bar_format=form,
        )

    def step(self) -> None:
        self.bar.update(1)

    def row(self, row: Row) -> None:
        if row.val is not None:
            self.last_val = row.val
        if row.val is not None or not self.terminal:
            _write(line(row))
        if self.terminal:
            self.bar.set_description_str(short(row._replace(val=self.last_val)))

    def event(self, text: str) -> None:
        _write(f"note    {text}")

    def end(self) -> None:
        self.bar.close()


def _write(text: str) -> None:
    """Prints a line above the bar. A full disk under redirected output is ignored: later lines may find room."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
