"""log.csv."""

import errno
import math
import os
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.errors import BadInput
from run.log import Log, Row, read_log

ROW = Row(
    step=10,
    loss=1 / 3,
    val=2.5 + 2**-50,
    val_error=0.1 + 0.2,
    lr=1e-3 / 7,
    grad_norm=5e-324,
    scale=2.0**24,
    skipped=3,
    tokens=10**15,
    tokens_per_second=12345.678901234567,
    kernel="cpu/library/library",
    seconds=1e300,
)
UNVALIDATED = ROW._replace(val=None, val_error=None)


def write(path, rows: list[Row], first_step: int = 0) -> bytes:
    """What the file holds after these rows."""
    with Log(path, first_step) as log:
        for row in rows:
            log.write(row)
    return path.read_bytes()


def rows(*steps: int) -> list[Row]:
    """Rows with digits of their own, each second one validated."""
    return [(ROW if step % 2 else UNVALIDATED)._replace(step=step, loss=1 / step, lr=1e-3 / step) for step in steps]


def test_rows_come_back_with_all_digits_and_their_types(tmp_path):
    write(tmp_path / "log.csv", [ROW, UNVALIDATED])
    again = read_log(tmp_path / "log.csv")
    assert again == [ROW, UNVALIDATED]
    assert [type(value) for row in again for value in row] == [
        type(value) for row in (ROW, UNVALIDATED) for value in row
    ]


@settings(deadline=None)
@given(loss=st.floats(width=64), val=st.none() | st.floats())
def test_any_number_comes_back(tmp_path_factory, loss, val):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    write(path, [ROW._replace(loss=loss, val=val)])
    (row,) = read_log(path)
    for got, expected in ((row.loss, loss), (row.val, val)):
        if expected is None or math.isnan(expected):
            assert (got is None) == (expected is None)
            assert got is None or math.isnan(got)
        else:
            assert struct.pack("d", got) == struct.pack("d", expected)


def test_the_header_names_the_columns_of_a_row(tmp_path):
    header = write(tmp_path / "log.csv", []).decode().strip()
    assert header == "step,loss,val,val_error,lr,grad_norm,scale,skipped,tokens,tokens_per_second,kernel,seconds"


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with Log(tmp_path / "log.csv") as log:
        log.write(ROW)
        assert read_log(tmp_path / "log.csv") == [ROW]


def test_a_resumed_run_drops_the_rows_after_its_checkpoint_and_keeps_the_bytes_of_those_before(tmp_path):
    path = tmp_path / "log.csv"
    before = write(path, rows(1, 2, 3))
    write(path, rows(1, 2, 3, 4, 5))
    assert write(path, [], first_step=3) == before
    assert write(path, rows(4, 6), first_step=3).startswith(before)
    assert read_log(path) == rows(1, 2, 3, 4, 6)


def test_a_new_run_starts_an_empty_log(tmp_path):
    write(tmp_path / "log.csv", rows(1, 2))
    write(tmp_path / "log.csv", rows(7))
    assert read_log(tmp_path / "log.csv") == rows(7)


def test_a_resumed_run_without_a_log_starts_one(tmp_path):
    write(tmp_path / "log.csv", rows(4), first_step=3)
    assert read_log(tmp_path / "log.csv") == rows(4)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_row_cut_off_by_a_full_disk_does_not_stop_a_resume(tmp_path, share):
    path = tmp_path / "log.csv"
    before = write(path, rows(1, 2, 3))
    whole = write(path, rows(1, 2, 3, 4))
    path.write_bytes(whole[: len(before) + int(share * (len(whole) - len(before)))])
    assert write(path, [], first_step=3) == before


class NearlyFull:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file, room: int):
        self.file, self.room, self.name = file, room, file.name

    def write(self, content: bytes) -> int:
        if content and not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def close(self) -> None:
        self.file.close()


def test_rows_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path):
    expected = write(tmp_path / "expected.csv", rows(1, 2, 3))
    with Log(tmp_path / "log.csv") as log:
        log.file = NearlyFull(log.file, 20)
        log.write(rows(1)[0])
        log.write(rows(2)[0])
        assert len((tmp_path / "log.csv").read_bytes().splitlines()[1]) == 20
        log.file.room = 10_000
        log.write(rows(3)[0])
    assert (tmp_path / "log.csv").read_bytes() == expected


def test_rows_that_were_lost_are_counted(tmp_path, capsys):
    with Log(tmp_path / "log.csv") as log:
        log.file = NearlyFull(log.file, 0)
        for row in rows(1, 2):
            log.write(row)
    assert capsys.readouterr().out == f"note    {tmp_path / 'log.csv'}: its last 2 rows could not be written\n"


def test_a_log_that_cannot_be_written_at_all_is_bad_input(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(BadInput, match=r"log\.csv: cannot be written"):
        Log(tmp_path / "log.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_resumed_log_knows_the_seconds_of_its_last_row(tmp_path):
    write(tmp_path / "log.csv", [row._replace(seconds=10.0 * row.step) for row in rows(1, 2, 3)])
    with Log(tmp_path / "log.csv", first_step=2) as log:
        assert log.seconds == 20.0


def test_a_log_is_plain_csv(tmp_path):
    lines = write(tmp_path / "log.csv", rows(1, 2)).decode().splitlines()
    assert [len(line.split(",")) for line in lines] == [12, 12, 12]
    assert re.fullmatch(r"2,0\.5,,,.*", lines[2])


@pytest.mark.parametrize(("column", "text"), [("step", ""), ("step", "1.5"), ("seconds", "inf"), ("loss", "four")])
def test_a_row_without_a_number_sets_the_log_aside(tmp_path, column, text):
    path = tmp_path / "log.csv"
    lines = write(path, rows(1, 2)).decode().splitlines()
    cells = lines[2].split(",")
    cells[Row._fields.index(column)] = text
    path.write_text("\n".join([*lines[:2], ",".join(cells)]) + "\n")
    with Log(path, first_step=2) as log:
        assert log.seconds == 0.0
    assert (tmp_path / "log.csv.damaged").is_file()


def test_a_log_that_is_a_folder_is_bad_input(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(BadInput, match="cannot be read"):
        Log(tmp_path / "log.csv", first_step=2)


# ---- columns that came later


def test_a_log_without_a_column_goes_on_and_the_column_is_empty(tmp_path):
    """As a log is that was written before there was a column."""
    path = tmp_path / "log.csv"
    write(path, rows(1, 2))
    without = [re.sub(r",[^,]*,([^,]*)$", r",\1", line) for line in path.read_text().splitlines()]  # the last but one
    path.write_text("\n".join(without) + "\n")
    assert "kernel" not in path.read_text()
    write(path, rows(3), first_step=2)
    older = [row._replace(kernel=None) for row in rows(1, 2)]
    assert read_log(path) == [*older, *rows(3)]
    write(path, rows(4), first_step=3)
    assert read_log(path) == [*older, *rows(3, 4)]
    assert not (tmp_path / "log.csv.damaged").exists()


def test_a_column_of_a_later_version_stays(tmp_path):
    path = tmp_path / "log.csv"
    write(path, rows(1, 2))
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"memory,{header}", *(f"{n} MB,{line}" for n, line in enumerate(lines))]) + "\n")
    before = path.read_bytes()
    assert read_log(path) == rows(1, 2)
    write(path, rows(3), first_step=2)
    assert path.read_bytes().replace(b"\r", b"").startswith(before)
    assert read_log(path) == rows(1, 2, 3)
    assert path.read_text().splitlines()[-1].startswith(",3,")


def test_a_row_with_too_many_cells_sets_the_log_aside(tmp_path):
    path = tmp_path / "log.csv"
    write(path, rows(1, 2))
    path.write_text(path.read_text().rstrip() + ",one more\n")
    write(path, rows(3), first_step=2)
    assert read_log(path) == rows(3)
    assert (tmp_path / "log.csv.damaged").is_file()
