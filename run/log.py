"""What a program reads: log.csv, one row every --log-every steps and one for each validation."""

import csv
import os
from pathlib import Path
from typing import NamedTuple


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
    seconds: float  # of training since this process started, without validation and saving


class Log:
    """Appends rows to a CSV file, each flushed; a resumed run first drops the rows after its checkpoint."""

    def __init__(self, path: Path, first_step: int = 0):
        kept = [row for row in _read_or_set_aside(path) if row.step <= first_step] if first_step else []
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # so that a crash here loses no row
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *map(_cells, kept)])
        temporary.replace(path)
        self.file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115, closed in __exit__
        self.writer = csv.writer(self.file)

    def write(self, row: Row) -> None:
        self.writer.writerow(_cells(row))
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()


def _cells(row: Row) -> list:
    return ["" if value is None else value for value in row]


def _read_or_set_aside(path: Path) -> list[Row]:
    """The rows; of a log that cannot be read, none, and the file stays as log.csv.damaged."""
    try:
        return read_log(path) if path.exists() else []
    except (ValueError, TypeError, csv.Error):
        path.replace(path.with_name(path.name + ".damaged"))
        return []


def read_log(path: Path) -> list[Row]:
    """The rows of a log.csv, with every digit that was written."""
    whole = {"step", "skipped", "tokens"}

    def value(name: str, text: str):
        if text == "" or name == "kernel":
            return text or None
        return int(text) if name in whole else float(text)

    with open(path, newline="", encoding="utf-8") as file:
        return [
            Row(**{name: value(name, text) for name, text in row.items()})
            for row in csv.DictReader(file)
            if None not in row.values()
        ]
