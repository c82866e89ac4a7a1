"""Bad input is told in one line each, all of it at once, with exit status 2 and no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

import request
import train
from base.errors import BadInput
from settings import PRESETS, Settings

ROOT = Path(__file__).resolve().parent.parent


def read(*argv: str) -> request.Request:
    return request.read(list(argv))


def faults(*argv: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        read(*argv)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--batch-size -1", "--batch-size -1: must be at least 1"),
        ("--accumulation 0", "--accumulation 0: must be at least 1"),
        ("--n-layer 0", "--n-layer 0: must be at least 1"),
        ("--n-embd 130", "--n-embd 130: not divisible by --n-head 4"),
        ("--dropout 1", "--dropout 1.0: must be in [0, 1)"),
        ("--dropout nan", "--dropout nan: must be in [0, 1)"),
        ("--lr 0", "--lr 0.0: must be a finite number above 0"),
        ("--lr nan", "--lr nan: must be a finite number above 0"),
        ("--lr inf", "--lr inf: must be a finite number above 0"),
        ("--min-lr 1", "--min-lr 1.0: must be between 0 and --lr 0.001"),
        ("--warmup -1", "--warmup -1: must not be negative"),
        ("--lr -1e-3", "--lr -0.001: must be a finite number above 0"),
        ("--block-size 1000000000000", "--block-size 1000000000000: must be at most 1048576"),
        ("--out=", "--out: is empty: name a folder"),
        ("--beta2 1", "--beta2 1.0: must be in [0, 1)"),
        ("--clip -1", "--clip -1.0: must be a finite number, not negative; 0 is no clipping"),
        ("--seed -1", "--seed -1: must be between 0 and 2^63 - 1"),
        ("--max-skips -1", "--max-skips -1: must not be negative"),
        ("--steps two", "--steps two: not a whole number"),
        ("--steps 2.5", "--steps 2.5: not a whole number"),
        ("--lr fast", "--lr fast: not a number"),
        ("--dtype fp8", "--dtype fp8: use one of auto, adopted, fp32, bf16, fp16"),
        ("--backend jax", "--backend jax: use one of torch, numpy, engine"),
        ("--device tpu", "--device tpu: unknown device, use auto, cpu, cuda, cuda:N or mps"),
        ("--corpus nowhere.txt", "--corpus nowhere.txt: no such file (names without a file: tinyshakespeare, stdlib)"),
        ("--corpus .", "--corpus .: not a file: use a text file, or tinyshakespeare, stdlib"),
        ("--batchsize 3", "unknown argument --batchsize: did you mean --batch-size?"),
        ("--batch 3", "unknown argument --batch: did you mean --batch-size?"),
        ("--steps", "argument --steps: expected one argument (--help lists all)"),
        ("--out a --overwrite --resume b", "--overwrite: cannot be combined with --resume, which continues the run"),
        (
            "--resume nowhere",
            "--resume nowhere: no checkpoint there: neither latest.json of a run nor config.json of a model",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv, line):
    assert line in faults("--lr", "0.001", *argv.split())


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--vocab-size 100", "--vocab-size"),
        ("--dtype fp32 --init-scale 8", "--init-scale"),
        ("--loss-scaling off --growth-interval 8", "--growth-interval"),
        ("--dtype fp32 --emulation on", "--emulation on"),
        ("--overwrite", "--overwrite"),
        ("--tokenizer byte --vocab-size 300", "--vocab-size"),
        ("--emulation on --compile", "--compile"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(argv, flag):
    assert [line for line in faults(*argv.split()) if line.startswith(flag)]


def test_all_faults_are_told_together():
    assert len(faults("--steps", "0", "--lr", "x", "--dropout", "2", "--corpus", "nowhere", "--nonsense")) == 5


def test_cuda_asked_for_and_absent(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert faults("--device", "cuda")[0].startswith("--device cuda: ")


def test_out_that_is_a_file_or_below_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "run"):
        assert faults("--out", str(out)) == [f"--out {out}: cannot be written, {file} is not a folder"]


def test_out_that_holds_a_run(tmp_path):
    (tmp_path / "latest.json").write_text("")
    assert faults("--out", str(tmp_path))[0].startswith(f"--out {tmp_path}: holds a run")
    assert read("--out", str(tmp_path), "--overwrite").settings.overwrite


def test_nothing_is_auto_after_reading():
    s = read("--corpus", "stdlib").settings
    assert s.device in ("cpu", "cuda")
    assert s.preset in PRESETS
    assert s.dtype in ("bf16", "fp16")
    assert s.loss_scaling == "on"
    assert s.min_lr == s.lr / 10
    assert s.save_every == s.eval_every


def test_flags_go_before_the_preset_and_the_preset_before_defaults():
    assert read("--preset", "gpu").settings.n_embd == 384
    assert read("--preset", "gpu", "--n-embd", "36").settings.n_embd == 36
    assert read("--preset", "gpu").settings.clip == Settings.clip


def test_fp32_needs_no_loss_scaling():
    assert read("--dtype", "fp32").settings.loss_scaling == "off"
    assert read("--dtype", "fp32", "--loss-scaling", "on").settings.loss_scaling == "on"


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')} " in text for name in Settings.__dataclass_fields__)


def test_main_prints_the_faults_and_returns_2(capsys):
    assert train.main(["--steps", "0", "--lr", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "train.py: error: --steps 0: must be at least 1",
        "train.py: error: --lr 0.0: must be a finite number above 0",
    ]


def test_the_process_ends_with_2_and_without_a_traceback(tmp_path):
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"abc \xe9t\xe9 " * 100)
    run = subprocess.run(
        [sys.executable, ROOT / "train.py", "--corpus", bad], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 2
    assert run.stderr == f"train.py: error: {bad}: not UTF-8: byte 0xe9 at offset 4: convert the file to UTF-8\n"
    assert list(tmp_path.iterdir()) == [bad]  # no run folder was left behind


def test_bpe_learns_as_many_tokens_as_asked():
    assert read("--tokenizer", "bpe").settings.vocab_size == 4096
    assert read("--tokenizer", "bpe", "--vocab-size", "300").settings.vocab_size == 300
    assert faults("--tokenizer", "bpe", "--vocab-size", "255")[0].startswith("--vocab-size 255: must be between 256")


def test_a_checkpoint_keeps_every_setting_that_is_not_of_one_process():
    asked = read("--corpus", "stdlib").asked
    assert set(asked) == set(Settings.__dataclass_fields__) - set(request.NOT_SAVED)
    assert asked["seed"] == 1337
    assert asked["min_lr"] is None  # derived anew, should --lr change
