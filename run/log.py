"""What a program reads: log.csv, one row every --log-every steps and one for each validation."""

import csv
import io
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


class Log:
    """Appends rows to a CSV file, each written through; a resumed run first drops the rows after its checkpoint.

    What a full disk refuses waits in memory, and is written with the next row or at the end. `seconds` is that of the
    last row kept. BadInput where the file cannot be written at all.
    """

    def __init__(self, path: Path, first_step: int = 0):
        kept = [row for row in _read_or_set_aside(path) if row.step <= first_step] if first_step else []
        self.seconds, self.waiting = kept[-1].seconds if kept else 0.0, b""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # so that a crash here loses no row
        try:
            temporary.write_bytes(b"".join(map(_line, [Row._fields, *kept])))
            temporary.replace(path)
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115, closed in __exit__
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise BadInput(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, row: Row) -> None:
        self.waiting += _line(row)
        self.write_waiting()

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


def _line(row: Iterable) -> bytes:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(["" if value is None else value for value in row])
    return line.getvalue().encode()


def _read_or_set_aside(path: Path) -> list[Row]:
    """The rows; of a log that cannot be read, none, and the file stays as log.csv.damaged."""
    try:
        return read_log(path) if path.exists() else []
    except (ValueError, TypeError, csv.Error):
        path.replace(path.with_name(path.name + ".damaged"))
        return []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}): move it away") from None


def read_log(path: Path) -> list[Row]:
    """The rows of a log.csv, with every digit that was written."""
    whole = {"step", "skipped", "tokens"}

    def value(name: str, text: str):
        if text == "" and name in ("val", "val_error"):
            return None
        if name == "kernel":
            return text
        number = int(text) if name in whole else float(text)
        if name == "seconds" and not math.isfinite(number):
            raise ValueError(f"{text} seconds of training")
        return number

    with open(path, newline="", encoding="utf-8") as file:
        return [
            Row(**{name: value(name, text) for name, text in row.items()})
            for row in csv.DictReader(file)
            if None not in row.values()
        ]
