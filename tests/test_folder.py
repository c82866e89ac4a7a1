"""Whose the run folder is."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from base.errors import BadInput
from run import checkpoint
from run.folder import Lock, open_folder
from run.log import read_log
from tests.conftest import TINY, numbers

ROOT = Path(__file__).resolve().parent.parent
HOLDER = (
    "import time; from pathlib import Path; from run.folder import Lock\nwith Lock(Path({!r})):\n    print(flush=True)"
)


@pytest.fixture
def holder():
    """holder(folder) is another process that holds the lock on it."""
    processes = []

    def start(folder) -> subprocess.Popen:
        script = HOLDER.format(str(folder)) + "\n    time.sleep(60)"
        processes.append(subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_the_lock_of_a_process_dies_with_it(tmp_path, holder):
    process = holder(tmp_path)
    with pytest.raises(BadInput, match="another process is training there"):
        Lock(tmp_path)
    process.kill()
    process.wait()
    with Lock(tmp_path):
        assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize("how", ["--out", "--overwrite --out", "--resume"])
def test_a_second_run_is_refused_and_changes_nothing(train_run, holder, corpus, capsys, how):
    out, _ = train_run("run", "--steps 2")
    if how == "--out":  # a run that has not saved yet: else settings.py refuses it before
        checkpoint._remove_others(out, 0)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    holder(out)
    flags = ["--steps", "3", *how.split(), str(out)]
    assert train.main(flags if how == "--resume" else [*TINY.split(), "--corpus", str(corpus), *flags]) == 2
    why = "another process is training there: wait for its end, or name another folder"
    assert capsys.readouterr().err == f"train.py: error: --out {out}: {why}\n"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_two_runs_after_each_other_need_no_cleaning(train_run):
    for flags in ("--steps 1 --max-skips 0", "--steps 2 --overwrite"):
        train_run("run", flags)


def test_what_killed_processes_left_is_cleared_at_the_start(tmp_path):
    (tmp_path / f".step-3.{os.getpid()}.tmp").mkdir()
    settings = SimpleNamespace(out=str(tmp_path), overwrite=False)
    out, lock = open_folder(settings, "fp32", None, 0)
    with lock:
        assert [path.name for path in out.iterdir()] == [".lock"]


def test_overwrite_keeps_the_old_run_until_the_new_one_saves(train_run, monkeypatch):
    """The new run dies before its first checkpoint: the old one goes on as if there had been none."""
    out, rows = train_run("run", "--steps 6")
    with monkeypatch.context() as patched:
        patched.setattr(train, "mean_loss", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run("run", "--steps 3 --seed 1 --overwrite")
    assert checkpoint.find_intact(str(out)) == (out / "step-6", [])
    assert train.main(["--resume", str(out), "--steps", "7"]) == 0
    assert numbers(read_log(out / "log.csv"))[:6] == numbers(rows)


def test_overwrite_leaves_nothing_of_the_old_run(train_run):
    out, _ = train_run("run", "--steps 6 --save-every 2")
    train_run("run", "--steps 3 --overwrite")
    assert {path.name for path in out.iterdir()} == {
        ".lock",
        "best.json",
        "latest.json",
        "log.csv",
        "loss.png",
        "step-3",
    }
    assert [row.step for row in read_log(out / "log.csv")] == [1, 2, 3]


def test_a_run_that_went_on_since_its_checkpoint_was_chosen_is_not_rolled_back(train_run):
    out, _ = train_run("run", "--steps 4 --save-every 2")
    settings = SimpleNamespace(out=None, overwrite=False)
    with pytest.raises(BadInput, match="step-4 is newer: start again"):
        open_folder(settings, "fp32", out / "step-2", 2)
