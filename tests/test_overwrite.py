"""--overwrite and pointers: once the new run has saved, no reader takes the old one."""

import errno
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import train
from base import files
from run import checkpoint
from run.checkpoint import NotSaved
from run.folder import (
    clear_leftovers,
    find,
    find_intact,
    finish_overwrite,
    holds_run,
    save,
)
from run.log import read_log
from tests.checkpoints import (
    ABOUT,
    CONFIG,
    TOKENIZER,
    arrays,
    assert_same,
    content,
    fails_at_write,
    folders,
    pointed,
    save_step,
)
from tests.conftest import numbers

# ---- removing a run


def test_a_checkpoint_is_recognised_and_a_log_or_a_killed_save_is_none(tmp_path):
    (tmp_path / "log.csv").touch()
    (tmp_path / ".step-2.4711.tmp").mkdir()
    assert not holds_run(tmp_path)
    save_step(tmp_path, 1)
    (tmp_path / "latest.json").unlink()
    assert holds_run(tmp_path)


def replace(out: Path, step: int) -> Path:
    """The first checkpoint of a run that overwrites the one in `out`."""
    saved = save(out, step, arrays(7), asdict(CONFIG), TOKENIZER, ABOUT, replace=True)
    finish_overwrite(out)
    return saved


def test_replacing_a_run_removes_all_of_it_but_the_new_log(tmp_path):
    save_step(tmp_path, 30, best=True)
    for name in ("log.csv", "loss.png", "log.csv.old"):
        (tmp_path / name).touch()
    for name in (".step-2.4711.tmp", "step-40.damaged"):
        shutil.copytree(tmp_path / "step-30", tmp_path / name)
    replace(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"step-20", "latest.json", "log.csv"}
    assert pointed(tmp_path, "latest.json") == 20


@pytest.mark.parametrize("call", range(5))
def test_a_run_is_not_replaced_before_the_new_checkpoint_is_whole(tmp_path, monkeypatch, call):
    save_step(tmp_path, 30, best=True)
    before = content(tmp_path)
    fails_at_write(monkeypatch, call)
    with pytest.raises(checkpoint.NotSaved):
        replace(tmp_path, 20)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "step-1.txt", "mine/log.csv", "step-by-step/notes.txt", "step-7/mine.txt"]
)
def test_replacing_a_run_leaves_foreign_files(tmp_path, name):
    save_step(tmp_path, 1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    replace(tmp_path, 2)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "step-1").exists()


# ---- a pointer that cannot be written


def fails_for_pointers(monkeypatch) -> None:
    write = files.write

    def full(path: Path, content: bytes):
        if path.name.startswith((".latest", ".best")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(files, "write", full)


def test_a_step_without_its_pointer_is_told_and_goes_on(tmp_path, monkeypatch):
    save_step(tmp_path, 1, best=True)
    with monkeypatch.context() as full_disk:
        fails_for_pointers(full_disk)
        with pytest.raises(NotSaved, match=f"step 2 is saved, but nothing in {tmp_path} points at it: No space"):
            save_step(tmp_path, 2, best=True)
    assert pointed(tmp_path, "latest.json") == pointed(tmp_path, "best.json") == 1
    assert find_intact(str(tmp_path)) == (tmp_path / "step-2", [])


@pytest.mark.parametrize("step", [20, 30])
def test_a_run_is_deleted_last(tmp_path, monkeypatch, step):
    """The disk is full when the pointers of the new run are written: the old run stays as it was."""
    save_step(tmp_path, 30, best=True)
    before = content(tmp_path)
    fails_for_pointers(monkeypatch)
    why = f"step {step} is not saved: No space left on device: the run in {tmp_path} stays"
    with pytest.raises(NotSaved, match=why):
        replace(tmp_path, step)
    assert content(tmp_path) == before
    assert folders(tmp_path) == {"step-30"}


# ---- --overwrite, killed at each moment


def overwriting(out: Path) -> None:
    """An old run of steps 20 (the best) and 30, and a new one that has just saved step 10; nothing is deleted yet."""
    save_step(out, 20, best=True)
    save_step(out, 30)
    (out / "log.csv.old").write_text("old")
    (out / "log.csv").write_text("new")
    save(out, 10, arrays(10), asdict(CONFIG), TOKENIZER, ABOUT, replace=True)


def test_a_folder_is_the_new_run_s_as_soon_as_its_first_checkpoint_is_saved(tmp_path):
    overwriting(tmp_path)
    assert find_intact(str(tmp_path)) == (tmp_path / "step-10", [])
    assert find(str(tmp_path), pointers=("best.json", "latest.json")) == tmp_path / "step-10"


@pytest.mark.parametrize("deleted", [[], ["step-20"], ["step-30"], ["step-20", "step-30"], ["step-20", "log.csv.old"]])
def test_a_kill_while_the_old_run_is_deleted_leaves_the_new_run(tmp_path, deleted):
    overwriting(tmp_path)
    for name in deleted:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert find_intact(str(tmp_path)) == (tmp_path / "step-10", [])
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "latest.json", "log.csv"}
    assert (tmp_path / "log.csv").read_text() == "new"
    save_step(tmp_path, 11)
    clear_leftovers(tmp_path)
    assert folders(tmp_path) == {"step-10", "step-11"}


def test_a_kill_before_the_pointers_gives_the_old_run_its_step_back(tmp_path):
    """The new run has replaced step 30 of the old one, and no pointer is written."""
    save_step(tmp_path, 30, best=True)
    (tmp_path / "log.csv.old").write_text("old")
    checkpoint.write(tmp_path, 30, arrays(7), asdict(CONFIG), TOKENIZER, ABOUT, keep_replaced=True)
    clear_leftovers(tmp_path)
    assert_same(checkpoint.load(tmp_path / "step-30")[0], arrays(30))
    assert (tmp_path / "log.csv").read_text() == "old"


def test_an_old_run_that_cannot_be_deleted_costs_a_note(train_run, monkeypatch, capsys):
    out, _ = train_run("run", "--steps 6")

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "step-6"))

    monkeypatch.setattr("run.folder.finish_overwrite", refuse)  # at each save
    train_run("run", "--steps 3 --overwrite --eval-every 1")
    assert "step-6: of the run before, cannot be deleted (Permission denied)" in capsys.readouterr().out
    assert find(str(out)).name == "step-3"
    assert checkpoint.damage(out / "step-3") is None


def test_the_new_run_goes_on_after_a_kill_in_the_deletion(train_run, monkeypatch):
    """All of train.py --resume, which also looks for newer checkpoints before it opens the folder."""
    out, _ = train_run("run", "--steps 6 --save-every 3")
    with monkeypatch.context() as patched:
        patched.setattr("run.folder.finish_overwrite", lambda out: None)
        _, rows = train_run("run", "--steps 2 --overwrite --seed 5")
    assert {"step-2", "step-6"} <= folders(out)
    assert train.main(["--resume", str(out), "--steps", "4", "--device", "cpu"]) == 0
    assert folders(out) == {"step-2", "step-4"}
    assert numbers(read_log(out / "log.csv"))[:2] == numbers(rows)
    assert checkpoint.read_manifest(out / "step-4")["settings"]["seed"] == 5


def test_an_old_step_that_cannot_be_deleted_is_never_taken_for_the_new_run_s(train_run, monkeypatch, capsys):
    out, _ = train_run("run", "--steps 6 --save-every 3")
    rmtree = shutil.rmtree

    def refuse(path, *arguments, **options):
        if Path(path).name == "step-6":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rmtree(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        _, rows = train_run("run", "--steps 4 --overwrite --seed 5 --save-every 2")
        assert "step-6: of the run before, cannot be deleted" in capsys.readouterr().out
        assert folders(out) == {"step-2", "step-4", "step-6"}
        assert find_intact(str(out)) == (out / "step-4", [])
        assert train.main(["--resume", str(out), "--steps", "5", "--device", "cpu"]) == 0
    assert numbers(read_log(out / "log.csv"))[:4] == numbers(rows)
    assert train.main(["--resume", str(out), "--steps", "7", "--device", "cpu"]) == 0
    assert folders(out) == {"step-6", "step-7"}  # the new run has come to a step 6 of its own
    assert checkpoint.read_manifest(out / "step-6")["settings"]["seed"] == 5


def test_a_pointer_that_names_other_folders_deletes_none(tmp_path):
    save_step(tmp_path, 3)
    for name in ("mine", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    pointer = {"step": 3, "overwrote": ["mine", "notes.txt", "../elsewhere", 5]}
    (tmp_path / "latest.json").write_text(json.dumps(pointer))
    before = content(tmp_path) | {"latest.json": b""}
    finish_overwrite(tmp_path)
    assert content(tmp_path) | {"latest.json": b""} == before


def test_a_folder_named_like_the_picture_does_not_stop_a_run(train_run):
    out, _ = train_run("run", "--steps 3")
    (out / "loss.png").unlink()
    (out / "loss.png").mkdir()
    train_run("run", "--steps 2 --overwrite")
    assert train.main(["--resume", str(out), "--steps", "4", "--device", "cpu"]) == 0
    assert [row.step for row in read_log(out / "log.csv")] == [1, 2, 3, 4]
