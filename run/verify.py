"""The proof that a run resumes exactly: a few steps in one go, against half of them and a new process for the rest."""

import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from run import checkpoint
from run.log import read_log

STEPS, HALF = 4, 2
OF_TIME = ("tokens_per_second", "seconds")  # columns of the log that are never the same twice


class NotExact(RuntimeError):
    """The two ways differ, or one of them did not come to its end."""


def verify_resume(script: str, flags: list[str], flags_of_process: list[str]) -> str:
    """Runs `script` three times and returns a line that says "bit-exact", or raises NotExact with the first difference.

    flags: of the run to try. flags_of_process: those among them that a checkpoint does not keep.
    """
    few = ["--steps", str(STEPS), "--eval-every", "0", "--log-every", "1"]
    with _ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="minigpt-verify-") as folder:
        whole, half, rest = (Path(folder, name) for name in ("whole", "half", "rest"))
        _run(script, [*flags, *few, "--save-every", "0", "--out", str(whole)])
        _run(script, [*flags, *few, "--save-every", str(HALF), "--out", str(half)])
        _run(script, ["--resume", str(half / f"step-{HALF}"), "--out", str(rest), *flags_of_process])
        if difference := first_difference(whole, rest, HALF, STEPS):
            raise NotExact(f"not exact: {STEPS} steps in one go differ from {HALF} + a new process: {difference}")
        skipped = read_log(whole / "log.csv")[-1].skipped
        if skipped == STEPS:
            raise NotExact(f"not proven: all {STEPS} steps overflowed and were skipped: try a smaller --init-scale")
    same = f"{STEPS} steps in one go are {HALF} + a new process + {STEPS - HALF}"
    return f"bit-exact: {same}: weights, moments, scaler and log ({skipped} of the steps skipped)"


@contextmanager
def _ending_on_sigterm():
    """SIGTERM unwinds the block, so that it ends the run that is going on and clears the folder."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(script: str, flags: list[str]) -> None:
    status = subprocess.run([sys.executable, script, *flags], stdout=subprocess.DEVNULL).returncode
    if status:
        raise NotExact(f"not proven: {' '.join(flags)} ended with exit status {status}")


def first_difference(whole: Path, rest: Path, half: int, steps: int) -> str | None:
    """Compares two run folders, of which `rest` has the steps after `half` alone. None where all is the same."""
    (ours, _, manifest), (theirs, _, other) = (checkpoint.load(out / f"step-{steps}") for out in (whole, rest))
    for kind in ours:
        for name, array in ours[kind].items():
            if array.tobytes() != theirs[kind][name].tobytes():
                apart = np.abs(array.astype(np.float64) - theirs[kind][name])
                return f"{kind} {name}: {np.count_nonzero(apart)} of {array.size} values, by up to {apart.max():.3g}"
    for key in ("scaler", "skipped", "consecutive_skips", "best_val"):
        if manifest[key] != other[key]:
            return f"{key}: {manifest[key]} and {other[key]}"
    rows = [row for row in read_log(whole / "log.csv") if row.step > half]
    for row, resumed in zip(rows, read_log(rest / "log.csv"), strict=True):
        for name in row._fields:
            if name not in OF_TIME and repr(getattr(row, name)) != repr(getattr(resumed, name)):
                return f"log, step {row.step}, {name}: {getattr(row, name)} and {getattr(resumed, name)}"
    return None
