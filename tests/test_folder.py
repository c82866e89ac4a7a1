"""The folder of a run: who may write in it, which checkpoint is used, which stay."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from base.errors import BadInput
from run import checkpoint
from run.folder import (
    Lock,
    clear_leftovers,
    find,
    find_intact,
    open_folder,
    set_aside_newer,
)
from run.log import read_log
from tests.checkpoints import (
    altered,
    arrays,
    assert_same,
    content,
    folders,
    pointed,
    save_step,
)
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
    if how == "--out":  # a run that has not saved yet: otherwise request.py refuses it before
        shutil.rmtree(out / "step-2")
        for pointer in ("latest.json", "best.json"):
            (out / pointer).unlink()
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
    assert find_intact(str(out)) == (out / "step-6", [])
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


# ---- pointers, and which checkpoints stay


def test_latest_follows_each_save_and_best_only_the_best(tmp_path):
    save_step(tmp_path, 1, best=True)
    save_step(tmp_path, 2)
    assert pointed(tmp_path, "latest.json") == 2
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 1, "val": 1 / 3}
    save_step(tmp_path, 3, best=True)
    assert pointed(tmp_path, "latest.json") == pointed(tmp_path, "best.json") == 3


def test_the_newest_two_and_the_best_stay(tmp_path):
    save_step(tmp_path, 9)
    save_step(tmp_path, 10, best=True)
    for step in (11, 100, 101):  # as words, "100" sorts before "11"
        save_step(tmp_path, step)
    assert folders(tmp_path) == {"step-10", "step-100", "step-101"}
    save_step(tmp_path, 102, best=True)
    assert folders(tmp_path) == {"step-101", "step-102"}


def test_the_step_just_saved_stays_also_among_later_ones(tmp_path):
    save_step(tmp_path, 50)
    save_step(tmp_path, 60)
    save_step(tmp_path, 10)  # a run resumed from an early checkpoint
    assert pointed(tmp_path, "latest.json") == 10
    assert_same(checkpoint.load(find(str(tmp_path)))[0], arrays(10))


def test_a_damaged_pointer_does_not_end_a_run(tmp_path):
    save_step(tmp_path, 1, best=True)
    (tmp_path / "best.json").write_text("")
    for step in (2, 3, 4):
        save_step(tmp_path, step)
    assert find(str(tmp_path)).name == "step-4"


# ---- finding


def test_a_run_folder_means_its_latest_step(tmp_path):
    save_step(tmp_path, 2)
    save_step(tmp_path, 10)
    assert find(str(tmp_path)) == tmp_path / "step-10"


def test_a_step_folder_means_itself(tmp_path):
    save_step(tmp_path, 2)
    save_step(tmp_path, 10)
    assert find(str(tmp_path / "step-2")) == tmp_path / "step-2"


def test_auto_means_the_run_in_out(tmp_path):
    save_step(tmp_path / "one", 1)
    save_step(tmp_path / "other", 2)
    assert find("auto", str(tmp_path / "one")) == tmp_path / "one" / "step-1"


def test_auto_without_out_means_the_newest_run_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["empty", "newest", "older"]):
        run = Path("runs", name)
        run.mkdir(parents=True)
        if name != "empty":
            save_step(run, 4 + age)
            os.utime(run / "latest.json", (1e9 - age, 1e9 - age))
    assert find("auto") == Path("runs", "newest", "step-5")


@pytest.mark.parametrize(
    ("wanted", "out", "named"),
    [("auto", None, "runs"), ("auto", "out", "out"), ("missing", None, "missing"), ("empty", None, "empty")],
)
def test_where_there_is_no_checkpoint_the_place_is_named(tmp_path, monkeypatch, wanted, out, named):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(BadInput, match="no checkpoint") as error:
        find(wanted, out)
    assert named in str(error.value)


def test_a_pointer_to_a_step_that_is_gone_is_refused(tmp_path):
    shutil.rmtree(save_step(tmp_path, 3))
    with pytest.raises(BadInput, match="step-3"):
        checkpoint.load(find(str(tmp_path)))


# ---- going on


def damaged_run(out: Path) -> Path:
    """Checkpoints 1 (best), 2 and 3, of which the newest has one other byte."""
    for step in (1, 2, 3):
        save_step(out, step, best=step == 1)
    next(altered(out / "step-3" / "model.safetensors", masks=[1], places=[500]))
    return out


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole_and_the_damaged_is_named(tmp_path):
    folder, (line,) = find_intact(str(damaged_run(tmp_path)))
    assert folder == tmp_path / "step-2"
    assert str(tmp_path / "step-3" / "model.safetensors") in line


def test_where_no_checkpoint_is_whole_each_is_named(tmp_path):
    damaged_run(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "manifest.json").unlink()
    with pytest.raises(BadInput) as error:
        find_intact("auto", str(tmp_path))
    assert [f"step-{step}" in line for step, line in zip((3, 2, 1), str(error.value).splitlines(), strict=True)]


@pytest.mark.parametrize("pointer", [None, b"", b'{"step": 1}'])
def test_a_run_goes_on_from_its_newest_checkpoint_whatever_the_pointer_says(tmp_path, pointer):
    """A kill may come between the checkpoint and latest.json."""
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    (tmp_path / "latest.json").unlink()
    if pointer is not None:
        (tmp_path / "latest.json").write_bytes(pointer)
    assert find_intact("auto", str(tmp_path)) == (tmp_path / "step-2", [])


def test_the_damaged_newest_is_set_aside_and_the_pointers_follow(tmp_path):
    save_step(damaged_run(tmp_path), 3, best=True)
    next(altered(tmp_path / "step-3" / "optimizer.safetensors", masks=[1], places=[500]))
    set_aside_newer(tmp_path, 2)
    assert folders(tmp_path) == {"step-2", "step-3.damaged"}
    assert pointed(tmp_path, "latest.json") == 2
    assert not (tmp_path / "best.json").exists()


def test_a_whole_newer_checkpoint_is_not_set_aside(tmp_path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    with pytest.raises(BadInput, match="step-2 is newer"):
        set_aside_newer(tmp_path, 1)
    assert folders(tmp_path) == {"step-1", "step-2"}


def test_what_killed_saves_left_is_cleared(tmp_path):
    before = content(save_step(tmp_path, 1).parent)
    for name in (".step-2.4711.tmp", ".step-1.4711.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    for name in (".latest.json.4711.tmp", ".log.csv.4711.tmp"):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert content(tmp_path) == before
    assert folders(tmp_path) == {"step-1"}


def test_a_step_that_was_being_replaced_when_the_process_died_comes_back(tmp_path):
    save_step(tmp_path, 1).rename(tmp_path / ".step-1.4711.old")
    clear_leftovers(tmp_path)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(1))


def test_the_log_of_a_run_that_was_not_replaced_after_all_comes_back(tmp_path):
    (tmp_path / "log.csv.old").write_text("old")
    (tmp_path / "log.csv").write_text("new")
    clear_leftovers(tmp_path)
    assert content(tmp_path) == {"log.csv": b"old"}
