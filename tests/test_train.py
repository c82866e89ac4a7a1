"""The training loop, from the command line to the checkpoint, on a text and a model that take a second."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from base import files
from run import checkpoint
from run.folder import find_intact
from run.log import read_log
from tests.conftest import TINY, numbers

ROOT = Path(__file__).resolve().parent.parent


def test_a_run_shows_and_leaves_all_that_the_readme_promises(train_run, capsys):
    out, rows = train_run("run", "--steps 40 --lr 1e-2 --eval-every 20 --log-every 10")
    shown = capsys.readouterr().out
    for start in (
        "model   ",
        "device  cpu",
        "dtype   bf16: ",
        "scaling dynamic",
        "data ",
        "run     steps 1 to 40",
        "done    val",
        "go on ",
    ):
        assert start in shown
    number = r"\d+\.\d{4}"
    line = (
        rf"step 20 \| loss {number} \| val {number} ± {number} \| lr \d\.\de-\d\d \| grad \d+\.\d\d \| scale 32768 "
        r"\| skipped 0 \| [\d.]+[kM]? tok/s"
    )
    assert re.search(f"^{line}$", shown, re.MULTILINE)
    assert f"--resume {out} --steps 80" in shown
    assert sorted(p.name for p in out.iterdir()) == [
        ".lock",
        "best.json",
        "latest.json",
        "log.csv",
        "loss.png",
        "step-20",
        "step-40",
    ]
    assert [row.step for row in rows] == [1, 10, 20, 30, 40]
    assert rows[-1].tokens == 40 * 8 * 16
    assert rows[-1].val < rows[0].loss - 0.5


@pytest.mark.parametrize("flags", ["--dtype fp32", "--dtype bf16 --emulation on", "--dtype fp16 --emulation on"])
def test_the_loss_falls_in_every_precision(train_run, flags):
    _, rows = train_run("run", f"--steps 60 --lr 1e-2 {flags}")
    assert rows[-1].val < rows[0].loss - 1


def test_the_clip_works_on_unscaled_gradients(train_run):
    """A power of two as scale moves only exponents, so every number must be what it is without scaling."""
    _, scaled = train_run("scaled", "--dtype fp32 --steps 4 --clip 0.05 --loss-scaling on --init-scale 16384")
    _, plain = train_run("plain", "--dtype fp32 --steps 4 --clip 0.05 --loss-scaling off")
    assert [row.scale for row in scaled] == [16384] * 4
    assert numbers([row._replace(scale=1.0) for row in scaled]) == numbers(plain)
    assert min(row.grad_norm for row in plain) > 0.05  # so that the clip had work to do


def test_a_clip_before_the_unscale_would_be_noticed(tmp_path, corpus):
    """The same two runs by a copy of train.py in which the two lines have changed places must differ."""
    lines = (ROOT / "train.py").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if "scaler.unscale_(optimizer)" in line)
    assert "clip_grad_norm_" in lines[at + 1]
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    (tmp_path / "train_clipping_first.py").write_text("\n".join(lines), encoding="utf-8")
    losses = []
    for name, scaling in (("scaled", "on --init-scale 16384"), ("plain", "off")):
        flags = f"{TINY} --dtype fp32 --steps 4 --clip 0.05 --loss-scaling {scaling} --corpus {corpus}"
        flags += f" --out {tmp_path / name}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, tmp_path / "train_clipping_first.py", *flags.split()]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        losses.append([row.loss for row in read_log(tmp_path / name / "log.csv")])
    assert losses[0] != losses[1]


def test_accumulation_sees_the_same_rows(train_run):
    _, whole = train_run("whole", "--dtype fp32 --steps 5 --batch-size 8")
    _, parts = train_run("parts", "--dtype fp32 --steps 5 --batch-size 2 --accumulation 4")
    # fp32 sums in another order: 1e-6 a step, a few steps through AdamW's division
    assert np.allclose([row.loss for row in whole], [row.loss for row in parts], rtol=1e-5)
    assert np.allclose([row.grad_norm for row in whole], [row.grad_norm for row in parts], rtol=1e-4)


def test_validation_does_not_touch_training(train_run):
    _, often = train_run("often", "--steps 6 --dropout 0.1 --eval-every 1")
    _, never = train_run("never", "--steps 6 --dropout 0.1")
    assert [row.loss for row in often] == [row.loss for row in never]
    assert often[-1].val == never[-1].val


@pytest.mark.parametrize("dtype", ["fp32", "bf16 --emulation on", "fp16 --emulation on"])
def test_a_diverged_run_ends_with_1_and_names_a_parameter(train_run, capsys, dtype):
    out, rows = train_run(
        "run", f"--dtype {dtype} --steps 20 --lr 1e38 --clip 0 --max-skips 3 --eval-every 2", status=1
    )
    error = capsys.readouterr().err
    assert re.search(r"stopped: 4 steps in a row had an inf or NaN gradient, the last in (wte|wpe|h\.\d)", error)
    assert rows[-1].skipped == 3  # logged until the one that was too many
    assert not (out / "best.json").exists()  # NaN weights are never the best


def test_out_is_kept_unless_overwritten_and_foreign_files_stay(train_run, capsys):
    out, _ = train_run("run", "--steps 2")
    (out / "notes.txt").write_text("mine")
    assert train.main(["--out", str(out)]) == 2
    assert "holds a run" in capsys.readouterr().err
    train_run("run", "--steps 3 --overwrite")
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "step-2").exists()


def test_runs_without_out_never_collide(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train.main([*TINY.split(), "--steps", "1", "--corpus", str(corpus)]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert train.main(["--resume", "auto", "--steps", "2"]) == 0


def test_text_too_short_names_what_it_has_and_needs(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh")
    assert train.main([*TINY.split(), "--corpus", str(short), "--out", str(tmp_path / "run")]) == 2
    assert "text too short: 8 tokens, a block of 16 needs 19" in capsys.readouterr().err
    short.write_text("abcdefgh" * 2 + "abc")
    assert train.main([*TINY.split(), "--steps", "2", "--corpus", str(short), "--out", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_a_compiled_run_computes_the_same(train_run):
    _, compiled = train_run("compiled", "--dtype fp32 --steps 3 --compile")
    _, eager = train_run("eager", "--dtype fp32 --steps 3")
    assert np.allclose([row.loss for row in compiled], [row.loss for row in eager], rtol=1e-5)


@pytest.mark.slow
def test_the_gpu_check_runs_from_end_to_end_on_a_cpu(tmp_path):
    command = f"-m benchmarks.gpu_check --device cpu --preset cpu --steps 30 --results {tmp_path}"
    command += " --skip-tests --skip-benchmarks"
    output = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert result == json.loads(output.splitlines()[-1])
    assert [row["case"] for row in result["rows"]] == ["train/cpu/bf16", "train/cpu/fp16"]
    assert all(row["val"] < row["first_loss"] - 0.5 for row in result["rows"])


def test_a_diverged_model_does_not_push_out_the_last_good_one(train_run, capsys):
    out, rows = train_run(
        "run", "--dtype fp32 --steps 8 --lr 1e30 --warmup 4 --save-every 1 --eval-every 1 --clip 0", status=1
    )
    assert not np.isfinite(rows[-1].val)
    assert "lower --lr" in capsys.readouterr().err
    assert not list(out.glob("step-[2-8]"))


def test_numpy_out_of_memory_is_one_line(train_run, monkeypatch, capsys):
    monkeypatch.setattr("data.batches.Batches.get", lambda *_: np.empty(2**60, np.uint8))
    train_run("run", "--steps 1", status=1)
    assert capsys.readouterr().err.splitlines()[-1].startswith("train.py: out of memory: ")


def test_a_picture_that_cannot_be_drawn_costs_a_note(train_run, monkeypatch, capsys):
    def full_disk(*arguments):
        raise OSError("no space")

    monkeypatch.setattr("watch.plot.plot", full_disk)
    train_run("run", "--steps 1")
    assert capsys.readouterr().err == "note    no picture: no space\n"


def test_a_terminal_without_unicode_is_no_reason_to_lose_a_run(tmp_path, corpus):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [
        sys.executable,
        ROOT / "train.py",
        *TINY.split(),
        "--steps",
        "1",
        "--corpus",
        corpus,
        "--out",
        tmp_path / "r",
    ]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "\\xb1" in shown


def test_runs_that_stop_early_leave_their_picture(train_run):
    out, _ = train_run("run", "--dtype fp16 --emulation on --steps 20 --lr 1e38 --clip 0 --max-skips 2", status=1)
    assert (out / "loss.png").stat().st_size > 0


def test_the_learning_rate_reaches_the_optimizer_in_its_step(train_run):
    """Two runs that differ only in the rate of the second step agree in two losses and differ in the third."""
    _, slow = train_run("slow", "--dtype fp32 --steps 3 --warmup 0 --lr 1e-3 --min-lr 1e-3")
    _, fast = train_run("fast", "--dtype fp32 --steps 3 --warmup 3 --lr 2e-3 --min-lr 2e-3")
    assert [row.lr for row in slow] == [1e-3] * 3
    assert [row.lr for row in fast] == [1e-3, 2e-3, 2e-3]
    assert [row.loss for row in slow][:2] == [row.loss for row in fast][:2]
    assert slow[2].loss != fast[2].loss


def test_the_scale_is_bounded_and_off_means_1(train_run):
    _, bounded = train_run(
        "bounded", "--dtype fp32 --loss-scaling on --steps 4 --init-scale 8388608 --growth-interval 1"
    )
    assert [row.scale for row in bounded] == [2.0**24] * 4
    _, off = train_run("off", "--dtype fp32 --steps 3")
    assert [row.scale for row in off] == [1.0] * 3


# ---- a full disk


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(*steps): the disk is full while these steps are saved."""
    write = files.write

    def full_at(*steps: int) -> None:
        def writing(path: Path, content: bytes):
            if any(f"step-{step}." in str(path) for step in steps) and path.name == "optimizer.safetensors":
                path.write_bytes(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, content)

        monkeypatch.setattr(files, "write", writing)

    return full_at


def test_a_full_disk_costs_a_line_and_a_checkpoint(train_run, full_disk, capsys):
    full_disk(4, 6)
    out, rows = train_run("run", "--steps 8 --save-every 2 --eval-every 2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    need = r"No space left on device: [\d,]+ bytes needed, [\d,]+ free in "
    assert len(lines) == 2
    assert re.fullmatch(f"note    step 4 is not saved: {need}{out}", lines[0])
    assert [row.step for row in rows] == list(range(1, 9))
    assert {path.name for path in out.glob("*step-*")} == {"step-2", "step-8"}
    assert json.loads((out / "best.json").read_text())["step"] == 8


def test_the_last_save_decides_how_a_run_ends(train_run, full_disk, capsys):
    full_disk(4)
    out, _ = train_run("run", "--steps 4 --save-every 2", status=1)
    error = capsys.readouterr().err
    assert error.startswith("train.py: stopped: step 4 is not saved: No space left on device: ")
    assert len(error.splitlines()) == 1
    assert find_intact(str(out)) == (out / "step-2", [])
    assert [path.name for path in out.glob(".step*")] == []


def test_a_best_that_was_not_saved_is_not_the_best(train_run, full_disk):
    """Of 2.9 (step 2), 2.7 (step 4, not saved) and 2.8 (step 6) the last is the best that there is on disk."""
    vals = iter([2.9, 2.7, 2.8])
    full_disk(4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "mean_loss", lambda *arguments: (next(vals), 0.1))
        out, _ = train_run("run", "--steps 6 --eval-every 2")
    assert json.loads((out / "best.json").read_text()) == {"step": 6, "val": 2.8}


TMPFS = "mount -t tmpfs -o size={size} none {out} && {train}; status=$?; cp -r {out}/. {copy}; exit $status"


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk in a namespace of its own")
def test_a_disk_that_is_full_for_real(corpus, tmp_path):
    """Each checkpoint has about 0.35 MB, the disk 1 MB: two fit, the third does not while two are kept."""
    out, copy = tmp_path / "disk", tmp_path / "copy"
    for folder in (out, copy):
        folder.mkdir()
    flags = f"{TINY} --dtype fp32 --steps 8 --save-every 2 --corpus {corpus} --out {out}"
    script = TMPFS.format(size="900k", out=out, copy=copy, train=f"{sys.executable} {ROOT / 'train.py'} {flags}")
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, f"mount -t tmpfs none {out}"]).returncode:
        pytest.skip("this machine lets nobody mount")
    done = subprocess.run([*unshare, script], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "stopped: step 8 is not saved: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in copy.glob("*step-*")} == {"step-2", "step-4"}
    assert [checkpoint.damage(path) for path in copy.glob("step-*")] == [None, None]
    assert len(read_log(copy / "log.csv")) == 8
