"""The proof that a run resumes exactly: 4 steps in one go, against 2 steps and a new process for the other 2."""

import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from run import checkpoint
from run.log import read_log
from settings import Settings, switches

STEPS, HALF = 4, 2
COLUMNS_OF_TIME = ("tokens_per_second", "seconds")  # of the log: never the same twice


class NotExact(RuntimeError):
    """The two ways differ, or one of them did not come to its end."""


def verify_resume(script: str, argv: list[str], settings: Settings) -> str:
    """Runs `script` three times and returns a line that says "bit-exact", or raises NotExact with the first difference.

    argv: the user's command line, of which `settings` were made.
    """
    flags = [word for word in argv if word != "--verify-resume"]
    of_this_process = ["--device", settings.device, *switches(settings)]  # a checkpoint does not keep these
    few = ["--steps", str(STEPS), "--eval-every", "0", "--log-every", "1"]
    with _ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="minigpt-verify-") as folder:
        whole, half, rest = (Path(folder, name) for name in ("whole", "half", "rest"))
        _run(script, [*flags, *few, "--save-every", "0", "--out", str(whole)])
        _run(script, [*flags, *few, "--save-every", str(HALF), "--out", str(half)])
        _run(script, ["--resume", str(half / f"step-{HALF}"), "--out", str(rest), *of_this_process])
        if difference := first_difference(whole, rest, HALF, STEPS):
            raise NotExact(f"not exact: {STEPS} steps in one go differ from {HALF} + a new process: {difference}")
        skipped = read_log(whole / "log.csv")[-1].skipped
        if skipped == STEPS:
            raise NotExact(f"not proven: all {STEPS} steps overflowed and were skipped: try a smaller --init-scale")
    same = f"{STEPS} steps in one go are {HALF} + a new process + {STEPS - HALF}"
    return f"bit-exact: {same}: weights, moments, scaler and log ({skipped} of the steps skipped)"


@contextmanager
def _ending_on_sigterm():
    """Inside the block SIGTERM raises SystemExit, so that the subprocess is ended and the folder removed."""
    handler_before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before)


def _run(script: str, flags: list[str]) -> None:
    status = subprocess.run([sys.executable, script, *flags], stdout=subprocess.DEVNULL).returncode
    if status:
        raise NotExact(f"not proven: {' '.join(flags)} ended with exit status {status}")


def first_difference(whole: Path, rest: Path, half: int, steps: int) -> str | None:
    """Compares two run folders and names the first tensor, number or log cell that differs. None where all is equal.

    The log of `rest` has only the steps after `half`.
    """
    arrays, _, manifest = checkpoint.load(whole / f"step-{steps}")
    other_arrays, _, other_manifest = checkpoint.load(rest / f"step-{steps}")
    for kind in arrays:
        for name, array in arrays[kind].items():
            other = other_arrays[kind][name]
            if array.tobytes() != other.tobytes():
                apart = np.abs(array.astype(np.float64) - other)
                return f"{kind} {name}: {np.count_nonzero(apart)} of {array.size} values, by up to {apart.max():.3g}"
    for key in ("scaler", "skipped", "consecutive_skips", "best_val"):
        if manifest[key] != other_manifest[key]:
            return f"{key}: {manifest[key]} and {other_manifest[key]}"
    rows = [row for row in read_log(whole / "log.csv") if row.step > half]
    for row, other_row in zip(rows, read_log(rest / "log.csv"), strict=True):
        for column in row._fields:
            cell, other_cell = getattr(row, column), getattr(other_row, column)
            if column not in COLUMNS_OF_TIME and repr(cell) != repr(other_cell):  # repr: NaN is NaN
                return f"log, step {row.step}, {column}: {cell} and {other_cell}"
    return None
