"""log.csv, which programs read: one row every --log-every steps and one for each validation.

The format only grows. A later version may add columns: this version reads the columns that Row has, and the others stay
in the file. In a log that is older than a column of Row, the column is empty.
"""

import csv
import io
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from base import files
from base.errors import BadInput, say


class Row(NamedTuple):
    """One row. Losses in nats per token; `val` is None where nothing was validated."""

    step: int  # steps done
    loss: float  # mean over the micro-batches of this step
    val: float | None
    val_error: float | None  # standard error of val
    lr: float
    grad_norm: float  # before clipping
    scale: float
    skipped: int  # steps skipped since the start
    tokens: int
    tokens_per_second: float  # since the row before
    kernel: str  # who computed mlp.c_proj: forward/dx/dW
    seconds: float  # of training since the start, without validation and saving


WHOLE = {"step", "skipped", "tokens"}  # columns of whole numbers


class Log:
    """Appends rows to a CSV file, each written through; a resumed run first drops the rows after its checkpoint.

    Rows that a full disk refuses wait in memory, and are written with the next row or at the end. `seconds` is that of
    the last row kept. BadInput where the file cannot be written at all.
    """

    def __init__(self, path: Path, first_step: int = 0):
        self.columns, kept = list(Row._fields), []
        if first_step:
            self.columns, lines = _read_or_set_aside(path)
            kept = [line for line in lines if int(line["step"]) <= first_step]
        self.seconds = float(kept[-1].get("seconds") or 0) if kept else 0.0
        self.waiting = b""
        try:
            files.replace({path: _line(self.columns) + b"".join(map(self._cells, kept))})  # a crash here loses no row
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115, closed in __exit__
        except OSError as error:
            raise BadInput(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, row: Row) -> None:
        self.waiting += self._cells(row._asdict())
        self.write_waiting()

    def _cells(self, row: dict) -> bytes:
        return _line(row.get(column) for column in self.columns)

    def write_waiting(self) -> None:
        with suppress(OSError):
            while self.waiting:  # a disk that is nearly full takes a part
                self.waiting = self.waiting[self.file.write(self.waiting) :]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.write_waiting()
        if lost := self.waiting.splitlines():
            say(f"note    {self.file.name}: its last {len(lost)} rows could not be written")
        self.file.close()


class Clock:
    """Measures the seconds of training alone: it stands still while a run validates, logs and saves."""

    def __init__(self, seconds: float, first_step: int, tokens_per_step: int):
        self.seconds = seconds  # of training since the start of the run
        self.seconds_before, self.first_step = seconds, first_step  # of earlier processes
        self.tokens_per_step = tokens_per_step
        self.start(first_step)

    def start(self, done: int) -> None:
        """Starts the clock when `done` steps are done."""
        self.started, self.started_at_step = time.perf_counter(), done

    def stop(self, done: int) -> float:
        """Stops the clock when `done` steps are done. Returns tokens per second since its start."""
        elapsed = time.perf_counter() - self.started
        self.seconds += elapsed
        return (done - self.started_at_step) * self.tokens_per_step / elapsed

    def mean_tokens_per_second(self, done: int) -> float:
        """The mean speed of this process."""
        return (done - self.first_step) * self.tokens_per_step / (self.seconds - self.seconds_before)


def _line(cells: Iterable) -> bytes:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(["" if cell is None else cell for cell in cells])
    return line.getvalue().encode()


def read_log(path: Path) -> list[Row]:
    """The rows of a log.csv, with every digit that was written. A column that the file lacks is None."""
    return [_row(cells) for cells in _read(path)[1]]


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns of a log and its rows as text. A last row without its end, as a full disk leaves it, is left out."""
    with open(path, newline="", encoding="utf-8") as file:
        whole_lines = [line for line in file if line.endswith("\n")]
    reader = csv.DictReader(whole_lines)
    return list(reader.fieldnames or []), [cells for cells in reader if None not in cells.values()]


def _row(cells: dict[str, str]) -> Row:
    """One row from its text. ValueError where a cell is not a number, or there are more cells than columns."""
    if None in cells:
        raise ValueError("a row with more cells than there are columns")
    values: dict[str, Any] = {column: _value(column, cells.get(column, "")) for column in Row._fields}
    row = Row(**values)
    if row.step is None:
        raise ValueError("a row without its step")
    if row.seconds is not None and not math.isfinite(row.seconds):
        raise ValueError(f"{row.seconds} seconds of training")
    return row


def _value(column: str, text: str):
    if text == "":
        return None
    if column == "kernel":
        return text
    return int(text) if column in WHOLE else float(text)


def _read_or_set_aside(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Returns the columns and the rows as text. Columns of Row that the file lacks come after its own.

    A log that cannot be parsed is renamed to log.csv.damaged; then there are no rows.
    """
    columns: list[str] = []
    lines: list[dict[str, str]] = []
    try:
        if path.exists():
            columns, lines = _read(path)
        for line in lines:
            _row(line)
    except (ValueError, TypeError, csv.Error):
        path.replace(path.with_name(path.name + ".damaged"))
        columns, lines = [], []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}): move it away") from None
    return [*columns, *(column for column in Row._fields if column not in columns)], lines
