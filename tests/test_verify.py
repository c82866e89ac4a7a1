"""--verify-resume, and what it would find."""

import os
import shutil
import signal
import tempfile

import numpy as np
import pytest

import train
from run import checkpoint, verify
from run.folder import save
from run.log import read_log
from run.verify import first_difference
from settings import Settings
from tests.conftest import TINY

FLAGS = f"{TINY} --dtype fp16 --emulation on --dropout 0.1 --accumulation 2 --init-scale 65536"


@pytest.mark.slow
def test_a_run_is_proven_to_resume_exactly(corpus, capsys):
    assert train.main([*FLAGS.split(), "--corpus", str(corpus), "--verify-resume"]) == 0
    assert capsys.readouterr().out.startswith("bit-exact: 4 steps in one go are 2 + a new process + 2: ")


@pytest.fixture
def in_this_process(monkeypatch):
    """The three runs without the seconds that three processes take, so that what they call can be replaced."""
    monkeypatch.setattr(verify, "_run", lambda script, flags: train.main(flags))


def test_a_trainer_that_forgets_nothing_is_exact(in_this_process, corpus, capsys):
    assert train.main([*FLAGS.split(), "--corpus", str(corpus), "--verify-resume"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("bit-exact: ")


def test_a_trainer_that_forgets_the_scaler_is_found_out(in_this_process, corpus, capsys, monkeypatch):
    monkeypatch.setattr(train.resume, "restore_scaler", lambda *arguments: None)
    flags = f"{TINY} --dtype fp32 --loss-scaling on --init-scale 1024 --growth-interval 1 --corpus {corpus}"
    assert train.main([*flags.split(), "--verify-resume"]) == 1
    assert "differ from 2 + a new process: scaler: {'scale': 16384.0, " in capsys.readouterr().err


def test_a_trainer_that_forgets_the_moments_is_found_out(in_this_process, corpus, capsys, monkeypatch):
    load = checkpoint.load

    def forgetful(folder):
        arrays, description, manifest = load(folder)
        if folder.name == "step-2":
            arrays["optimizer"] = {name: np.zeros_like(moment) for name, moment in arrays["optimizer"].items()}
        return arrays, description, manifest

    monkeypatch.setattr(checkpoint, "load", forgetful)
    assert train.main([*FLAGS.split(), "--corpus", str(corpus), "--verify-resume"]) == 1
    assert "differ from 2 + a new process: model " in capsys.readouterr().err


def test_steps_that_were_all_skipped_prove_nothing(in_this_process, corpus, capsys):
    assert train.main([*FLAGS.split(), "--init-scale", "16777216", "--corpus", str(corpus), "--verify-resume"]) == 1
    assert "not proven: all 4 steps overflowed" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out x", "--resume x", "--out x --overwrite"])
def test_flags_about_a_run_folder_are_refused(flag, capsys):
    assert train.main(["--verify-resume", *flag.split()]) == 2
    named = flag.split()[0]
    assert f"{named}: cannot be combined with --verify-resume" in capsys.readouterr().err


@pytest.fixture
def pair(train_run, tmp_path):
    """Two folders of the same run, 4 steps long."""
    out, _ = train_run("run", "--steps 4")
    shutil.copytree(out, tmp_path / "copy")
    lines = (out / "log.csv").read_text().splitlines(keepends=True)
    (tmp_path / "copy" / "log.csv").write_text("".join([lines[0], *lines[3:]]))
    return out, tmp_path / "copy"


def test_the_first_tensor_that_differs_is_named_with_how_far(pair):
    whole, rest = pair
    assert first_difference(whole, rest, 2, 4) is None
    arrays, tokenizer, manifest = checkpoint.load(rest / "step-4")
    arrays["optimizer"]["exp_avg.h.1.mlp.c_fc.bias"][3] += np.float32(0.5)
    save(rest, 4, arrays, manifest["config"], tokenizer, manifest)
    assert first_difference(whole, rest, 2, 4) == "optimizer exp_avg.h.1.mlp.c_fc.bias: 1 of 128 values, by up to 0.5"


def test_a_log_that_differs_is_named_by_step_and_column(pair):
    whole, rest = pair
    row = read_log(rest / "log.csv")[1]
    log = (rest / "log.csv").read_text()
    (rest / "log.csv").write_text(log.replace(str(row.grad_norm), "0.25"))
    assert first_difference(whole, rest, 2, 4) == f"log, step 4, grad_norm: {row.grad_norm} and 0.25"


def test_sigterm_ends_the_proof_and_clears_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(verify, "_run", lambda script, flags: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        verify.verify_resume("train.py", [], Settings(device="cpu"))
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
