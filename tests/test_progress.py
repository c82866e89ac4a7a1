"""The bar and the lines that a person sees."""

import errno
import io
import os
import sys

import pytest

from run.log import Row
from watch.progress import Progress, line, short, thousands
from watch.watch import Watch

ROW = Row(
    step=50,
    loss=2.31009,
    val=None,
    val_error=None,
    lr=1e-3,
    grad_norm=0.4967,
    scale=32768.0,
    skipped=2,
    tokens=38400,
    tokens_per_second=13100.0,
    kernel="cpu/library/library",
    seconds=3.0,
)
LINE = "step 50 | loss 2.3101 | lr 1.0e-03 | grad 0.50 | scale 32768 | skipped 2 | 13.1k tok/s"
VALIDATED = ROW._replace(val=2.34106, val_error=0.00402)
VALIDATED_LINE = (
    "step 50 | loss 2.3101 | val 2.3411 ± 0.0040 | lr 1.0e-03 | grad 0.50 | scale 32768 | skipped 2 | 13.1k tok/s"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch) -> tuple[Terminal, Terminal]:
    """stdout and stderr of a terminal."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def test_a_line_without_validation():
    assert line(ROW) == LINE


def test_a_line_with_validation():
    assert line(VALIDATED) == VALIDATED_LINE


def test_the_scale_is_written_out():
    assert "| scale 16777216 |" in line(ROW._replace(scale=2.0**24))
    assert "| scale 0.5 |" in line(ROW._replace(scale=0.5))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0"),
        (999.4, "999"),
        (1000, "1.0k"),
        (13_100, "13.1k"),
        (999_900, "999.9k"),
        (1_000_000, "1.0M"),
        (2_340_000, "2.3M"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_thousands(x, text):
    assert thousands(x) == text


def test_elsewhere_each_row_is_a_plain_line_and_nothing_else(capsys):
    with Watch([Progress(0, 100)]) as progress:
        for row in (ROW, VALIDATED):
            progress.step()
            progress.row(row)
    written = capsys.readouterr()
    assert written.out == f"{LINE}\n{VALIDATED_LINE}\n"
    assert written.err == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_on_one_side_only_gets_plain_lines(monkeypatch, capsys, stream):
    only = Terminal()
    monkeypatch.setattr(sys, stream, only)
    with Watch([Progress(0, 100)]) as progress:
        progress.row(ROW)
    written = capsys.readouterr()
    assert only.getvalue() + written.out + written.err == LINE + "\n"


def test_on_a_terminal_there_is_a_bar_with_the_numbers_beside_it(monkeypatch):
    out, err = terminal(monkeypatch)
    with Watch([Progress(10, 40)]) as progress:
        for _ in range(10):
            progress.step()
        progress.row(ROW)
        shown = err.getvalue().split("\r")[-1]
    assert out.getvalue() == ""
    assert shown.startswith(" 50% ")
    assert "#####" in shown or "█████" in shown
    assert shown.endswith(short(ROW))


def test_on_a_terminal_a_validation_is_a_line_and_stays_beside_the_bar(monkeypatch):
    out, err = terminal(monkeypatch)
    with Watch([Progress(0, 100)]) as progress:
        progress.row(VALIDATED)
        progress.row(ROW._replace(loss=1.5))
        shown = err.getvalue().split("\r")[-1]
    assert out.getvalue() == VALIDATED_LINE + "\n"
    assert "loss 1.500 val 2.341 lr" in shown


def test_a_resumed_run_begins_its_bar_where_it_begins(monkeypatch):
    _, err = terminal(monkeypatch)
    with Watch([Progress(30, 40)]):
        pass
    assert " 75% " in err.getvalue()


def test_the_short_form_fits_beside_a_bar_in_80_columns():
    assert short(ROW._replace(val=2.34)) == "loss 2.310 val 2.340 lr 0.001 grad 0.5 scale 2^15 skip 2 13.1k tok/s"
    assert short(ROW._replace(scale=1.0)).count("scale 2^0 ") == 1
    assert short(ROW._replace(scale=24.0)).count("scale 24 ") == 1
    assert len(short(ROW._replace(val=2.34))) < 80 - len(" 50% 00:20 ")


class Broken(io.StringIO):
    """An output that takes nothing."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


def test_lines_go_on_when_a_full_disk_has_room_again(monkeypatch, capsys):
    with Watch([Progress(0, 40)]) as progress:
        with monkeypatch.context() as full_disk:
            full_disk.setattr(sys, "stdout", Broken(errno.ENOSPC))
            progress.row(ROW)
        progress.row(VALIDATED)
    assert capsys.readouterr() == (f"{VALIDATED_LINE}\n", "")


def test_lines_end_with_a_note_when_nobody_reads_them(monkeypatch, capsys):
    with Watch([Progress(0, 40)]) as progress:
        with monkeypatch.context() as reader_left:
            reader_left.setattr(sys, "stdout", Broken(errno.EPIPE))
            progress.row(ROW)
        progress.row(VALIDATED)
    assert capsys.readouterr() == ("", "note    no progress: [Errno 32] Broken pipe\n")
