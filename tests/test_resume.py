"""Runs that go on: exactly, or with a line that says what changed; or not at all."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import data.corpus
import train
from model.backends import Hardware, Kernel
from run import checkpoint, resume
from run.folder import find, find_intact
from run.log import read_log
from tests.conftest import TINY, numbers

ROOT = Path(__file__).resolve().parent.parent


def in_a_new_process(*flags) -> None:
    command = [sys.executable, ROOT / "train.py", *map(str, flags)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    for key in ("scaler", "skipped", "consecutive_skips", "best_val"):
        assert checkpoint.read_manifest(one)[key] == checkpoint.read_manifest(other)[key], key


def test_40_steps_are_20_and_a_new_process_and_20(train_run):
    flags = "--steps 40 --dtype fp16 --emulation on --dropout 0.1 --accumulation 2 --eval-every 20"
    flags += " --init-scale 4194304 --growth-interval 3"
    whole, rows = train_run("whole", f"{flags} --save-every 0")
    scales = [row.scale for row in rows]
    assert 0 < rows[19].skipped < rows[39].skipped < 40  # steps skipped and steps taken, in both halves
    for half in (scales[:20], scales[20:]):
        assert any(b < a for a, b in pairwise(half))
        assert any(b > a for a, b in pairwise(half))
    stopped, _ = train_run("stopped", f"{flags} --save-every 20")
    shutil.rmtree(stopped / "step-40")  # as a kill in the second half leaves it, with rows in the log after step 20
    in_a_new_process("--resume", stopped, "--device", "cpu")
    assert numbers(read_log(stopped / "log.csv")) == numbers(rows)
    assert_same_checkpoint(stopped / "step-40", whole / "step-40")


def test_a_log_line_more_often_is_not_written_for_a_resume(train_run):
    """Rows are a function of the step: the first step of a resumed run has one only where it would have had one."""
    out, _ = train_run("run", "--steps 8 --log-every 4 --save-every 2")
    shutil.rmtree(out / "step-8")
    assert train.main(["--resume", str(out)]) == 0
    assert [row.step for row in read_log(out / "log.csv")] == [1, 2, 4, 6, 8]


def test_seconds_go_on_from_the_last_row(train_run):
    out, rows = train_run("run", "--steps 3")
    assert train.main(["--resume", str(out), "--steps", "5"]) == 0
    seconds = [row.seconds for row in read_log(out / "log.csv")]
    assert seconds[2] == rows[2].seconds
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_goes_on(train_run, capsys, file):
    out, rows = train_run("run", "--steps 6 --save-every 2")
    content = (out / "step-6" / file).read_bytes()
    (out / "step-6" / file).write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    assert train.main(["--resume", str(out)]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert str(out / "step-6" / file) in note
    assert note.endswith("going on from step-4")
    assert numbers(read_log(out / "log.csv")) == numbers(rows)
    assert {path.name for path in out.glob("step-*")} == {"step-4", "step-6", "step-6.damaged"}


# ---- what is refused


def test_another_architecture_and_another_tokenizer_are_shown_and_refused(train_run, capsys):
    out, _ = train_run("run", "--steps 2")
    assert train.main(["--resume", str(out), "--steps", "4", *["--n-layer", "3", "--tokenizer", "byte"]]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"train.py: error: --n-layer 3: the checkpoint in {out / 'step-2'} has 2",
        f"train.py: error: --tokenizer byte: the checkpoint in {out / 'step-2'} has char",
    ]


def test_another_text_is_shown_and_refused(train_run, corpus, tmp_path, capsys):
    out, _ = train_run("run", "--steps 2")
    other = tmp_path / "other.txt"
    other.write_text("another text, long enough " * 20)
    assert train.main(["--resume", str(out), "--steps", "4", "--corpus", str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for path in (corpus, other):
        text = path.read_text()
        assert f"{path} ({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})" in line


def test_a_finished_run_is_refused(train_run, capsys):
    out, _ = train_run("run", "--steps 2")
    assert train.main(["--resume", str(out)]) == 2
    assert "all 2 steps are done: ask for more with --steps" in capsys.readouterr().err


def test_a_run_on_tiny_shakespeare_does_not_go_on_with_another_text(train_run, corpus, capsys, monkeypatch):
    monkeypatch.setattr(data.corpus, "_tiny_shakespeare", lambda: (corpus.read_bytes(), ()))
    out, _ = train_run("run", "--steps 2 --corpus tinyshakespeare")

    def no_network():
        raise data.corpus.NoDownload("Name or service not known")

    monkeypatch.setattr(data.corpus, "_tiny_shakespeare", no_network)
    assert train.main(["--resume", str(out), "--steps", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for words in ("no Tiny Shakespeare (Name or service not known)", "try again with a network", "MINIGPT_DATA"):
        assert words in line


def test_resume_never_overwrites_another_run_nor_newer_steps(train_run, capsys):
    first, _ = train_run("first", "--steps 3 --save-every 1")
    second, rows = train_run("second", "--steps 4")
    assert train.main(["--resume", str(first), "--steps", "5", "--out", str(second)]) == 2
    assert train.main(["--resume", str(first / "step-2"), "--steps", "5"]) == 2
    error = capsys.readouterr().err
    assert f"--out {second}: holds a run" in error
    assert "step-3 is newer" in error
    assert read_log(second / "log.csv") == rows
    fork = first.parent / "fork"
    assert train.main(["--resume", str(first / "step-2"), "--steps", "5", "--out", str(fork)]) == 0
    assert (fork / "step-5").is_dir()


# ---- what is allowed, and said


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--steps 8", "--steps 8 (was 4): the learning rate goes from 4.0e-04 to 2.2e-03 at step 5"),
        (
            "--steps 6 --lr 1e-2",
            "--steps 6 (was 4), --lr 0.01 (was 0.004): the learning rate goes from 4.0e-04 to 2.3e-03",
        ),
        ("--steps 6 --dtype fp16", "--dtype fp16 (was fp32): weights and moments are fp32 and go on as they are"),
        ("--steps 6 --seed 7", "--seed 7 (was 1337): goes on, but not as the saved run would have"),
    ],
)
def test_a_changed_flag_is_allowed_and_its_effect_said(train_run, capsys, flags, note):
    out, _ = train_run("run", "--steps 4 --dtype fp32 --warmup 1")
    capsys.readouterr()
    assert train.main(["--resume", str(out), *flags.split()]) == 0
    assert note in capsys.readouterr().out


def test_a_run_that_goes_on_as_it_was_says_nothing(train_run, capsys):
    out, _ = train_run("run", "--steps 4 --save-every 2")
    shutil.rmtree(out / "step-4")
    capsys.readouterr()
    assert train.main(["--resume", str(out), "--log-every", "2"]) == 0
    assert "note" not in capsys.readouterr().out


def test_another_machine_or_library_is_said(train_run, capsys):
    out, _ = train_run("run", "--steps 2")
    manifest = checkpoint.read_manifest(out / "step-2")
    manifest["versions"]["torch"] = "1.0"
    manifest["digest"] = checkpoint._digest(manifest)
    (out / "step-2" / "manifest.json").write_text(json.dumps(manifest))
    assert train.main(["--resume", str(out), "--steps", "3"]) == 0
    assert "(was 1.0): goes on, but perhaps not bit for bit" in capsys.readouterr().out


def test_a_shorter_growth_interval_on_resume_grows(train_run):
    out, _ = train_run("run", "--steps 5")
    assert train.main(["--resume", str(out), "--steps", "12", "--growth-interval", "2", "--log-every", "1"]) == 0
    assert [row.scale for row in read_log(out / "log.csv")][4:8] == [2**15, 2**16, 2**16, 2**17]


def test_the_best_survives_a_resume(train_run):
    out, _ = train_run("run", "--dtype fp32 --steps 30 --lr 1e-2")
    best = (out / "best.json").read_text()
    assert train.main(["--resume", str(out), "--steps", "33", "--lr", "10", "--min-lr", "10"]) in (0, 1)
    assert (out / "best.json").read_text() == best


# ---- kill -9


KILLS = 50
STEPS = 12 * KILLS  # more than fifty lives can do


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
def test_a_run_that_is_killed_fifty_times_is_the_run_that_was_not(train_run, corpus, tmp_path):
    """Every life starts where the last checkpoint was, and the end is, bit for bit, that of a run without a kill."""
    flags = f"--steps {STEPS} --dtype fp16 --emulation on --dropout 0.1 --growth-interval 5 --save-every 1"
    whole, rows = train_run("whole", f"{flags} --save-every 0")
    out, moment = tmp_path / "killed", random.Random(5)
    context = multiprocessing.get_context("forkserver")  # real processes, without importing torch in each
    context.set_forkserver_preload(["train", "model.minigpt", "torch._inductor"])
    first = [*TINY.split(), "--corpus", str(corpus), "--out", str(out), *flags.split()]
    saved = 0
    for life in range(KILLS):
        argv = ["--resume", str(out), "--device", "cpu"] if saved else first
        process = context.Process(target=train.main, args=(argv,))
        process.start()
        while process.is_alive() and newest_step(out) == saved:
            time.sleep(0.001)
        time.sleep(moment.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"life {life} ended by itself with {process.exitcode}"
        folder, damaged = find_intact(str(out))
        step = int(folder.name.removeprefix("step-"))
        assert damaged == []
        assert step > saved
        saved = step
    assert train.main(["--resume", str(out), "--device", "cpu", "--save-every", "0"]) == 0
    assert numbers(read_log(out / "log.csv")) == numbers(rows)
    assert_same_checkpoint(out / f"step-{STEPS}", whole / f"step-{STEPS}")
    assert [path.name for path in out.iterdir() if path.name.endswith((".tmp", ".old"))] == []


def newest_step(out: Path) -> int:
    return max([0, *(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))])


def test_a_library_that_this_backend_does_not_use_is_no_change():
    """As torch's for a run that goes on in NumPy, in a process that never imports it."""
    hardware = Hardware("cpu", "a CPU", "fp32", False, "")
    kernel = Kernel("numpy/numpy/numpy", "NumPy's products")
    compute = hardware._asdict() | {"kernel": kernel.code}
    manifest = {"settings": {}, "step": 1, "compute": compute, "versions": {"torch": "2.13", "numpy": "2.4"}}
    assert resume.notes(None, {}, hardware, kernel, {"numpy": "2.4"}, manifest) == []
    assert "2.5 (was 2.4)" in resume.notes(None, {}, hardware, kernel, {"numpy": "2.5"}, manifest)[0]
    other = kernel._replace(code="cpu/library/library")
    assert "cpu/library/library (was numpy" in resume.notes(None, {}, hardware, other, {}, manifest)[0]


def test_a_copy_of_a_step_is_not_taken_for_a_later_one(train_run):
    out, _ = train_run("copied", "--steps 4 --save-every 2")
    shutil.copytree(out / "step-4", out / "step-99")
    folder, faults = find_intact(str(out))
    assert folder == out / "step-4"
    assert "step-99: holds step 4" in faults[0]


def test_a_step_folder_by_another_name_leads_to_its_run(train_run, monkeypatch, tmp_path):
    out, _ = train_run("linked", "--steps 4 --save-every 2")
    (tmp_path / "link").symlink_to(out / "step-4")
    assert find(str(tmp_path / "link")) == out / "step-4"
    monkeypatch.chdir(out / "step-4")
    assert find(".") == out / "step-4"
