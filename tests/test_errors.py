"""How scripts end: closed streams, a full disk, a reader who leaves."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import say

ROOT = Path(__file__).resolve().parent.parent
HELLO = "import sys; from base.errors import run_script; "
HELLO += "sys.exit(run_script('x', lambda: print('hello', sys.stdin.read())))"


class Refusing(io.StringIO):
    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def flush(self):
        raise OSError(self.number, "refused")


def test_a_full_disk_under_a_redirected_output_is_no_reason_to_end(monkeypatch):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        monkeypatch.setattr(sys, "stdout", Refusing(number))
        say("hello")
    monkeypatch.setattr(sys, "stdout", Refusing(errno.EIO))
    with pytest.raises(OSError, match="refused"):
        say("hello")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed):
    command = ["bash", "-c", f'{sys.executable} -c "{HELLO}" {closed}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input="")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_who_leaves_ends_a_script_quietly():
    many = "[print('x' * 99, flush=True) for _ in range(10**4)]"
    many = f"import sys; from base.errors import run_script; sys.exit(run_script('x', lambda: {many}))"
    command = ["bash", "-c", f'{sys.executable} -c "{many}" | head -c 10; echo ${{PIPESTATUS[0]}}']
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("xxxxxxxxxx141", "")


def test_a_reader_who_leaves_in_the_middle_of_buffered_lines_ends_a_script_quietly():
    many = "[print('x' * 99) for _ in range(10**4)]"  # without a flush: Python writes the rest at its end
    many = f"import sys; from base.errors import run_script; sys.exit(run_script('x', lambda: {many}))"
    command = ["bash", "-c", f'{sys.executable} -c "{many}" | head -c 10; echo ${{PIPESTATUS[0]}}']
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("xxxxxxxxxx141", "")
