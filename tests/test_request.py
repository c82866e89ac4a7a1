"""Bad input is told in one line each, all of it at once, with exit status 2 and no traceback."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiktoken

import request
import settings
import train
from base.errors import BadInput
from base.flags import flag
from data.tokenizers import WORDS, GPT2Tokenizer
from run import checkpoint, resume
from settings import PRESETS, Settings, saved_flags

ROOT = Path(__file__).resolve().parent.parent
OLD_RUN = ROOT / "tests" / "old_run"
LACKING = object()


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
        ("--batch-size -1", "--batch-size -1: must be at least 1 and at most 1048576"),
        ("--accumulation 0", "--accumulation 0: must be at least 1 and at most 1048576"),
        ("--n-layer 0", "--n-layer 0: must be at least 1 and at most 1048576"),
        ("--n-embd 130", "--n-embd 130: not divisible by --n-head 4"),
        ("--dropout 1", "--dropout 1: must be at least 0 and below 1"),
        ("--dropout nan", "--dropout nan: must be at least 0 and below 1"),
        ("--lr 0", "--lr 0: must be a finite number, above 0"),
        ("--lr nan", "--lr nan: must be a finite number, above 0"),
        ("--lr inf", "--lr inf: must be a finite number, above 0"),
        ("--min-lr 1", "--min-lr 1.0: must be at most --lr 0.001"),
        ("--warmup -1", "--warmup -1: must be at least 0"),
        ("--lr -1e-3", "--lr -0.001: must be a finite number, above 0"),
        ("--block-size 1000000000000", "--block-size 1000000000000: must be at least 1 and at most 1048576"),
        ("--out=", "--out: is empty: name a folder"),
        ("--beta2 1", "--beta2 1: must be at least 0 and below 1"),
        ("--clip -1", "--clip -1: must be a finite number, at least 0"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808: must be below 2^63"),
        ("--max-skips -1", "--max-skips -1: must be at least 0"),
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
        ("--n-layer 1 --recompute", "--recompute: the only layer"),
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
        "train.py: error: --lr 0: must be a finite number, above 0",
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
    assert faults("--tokenizer", "bpe", "--vocab-size", "255")[0].startswith("--vocab-size 255: must be at least 256")


def test_a_checkpoint_keeps_what_was_asked_and_not_what_was_derived():
    asked = read("--corpus", "stdlib").asked
    assert list(asked) == saved_flags()
    assert asked["seed"] == 1337
    assert asked["min_lr"] is None  # a tenth of --lr, also should --lr change


def test_the_preset_gpt2_trains_on_gpt2_s_tokens(monkeypatch, tmp_path, capsys):
    corpus = tmp_path / "text.txt"
    corpus.write_text("a few words to train on, " * 40)
    sizes = "--n-layer 1 --n-head 1 --n-embd 8 --block-size 16 --batch-size 1 --accumulation 1 --steps 1 --dtype fp32"
    argv = f"--preset gpt2 {sizes} --device cpu --corpus {corpus} --out {tmp_path / 'run'}".split()
    cache = tmp_path / "tiktoken"
    cache.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    assert train.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: error: --tokenizer gpt2: no network (no route)")
    assert not (tmp_path / "run").exists()

    for key in ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"):
        (cache / key).write_text("")
    monkeypatch.setattr("tiktoken.get_encoding", stand_in_for_gpt2)
    assert train.main(argv) == 0
    assert checkpoint.read_manifest(tmp_path / "run" / "step-1")["config"]["vocab_size"] == 50257


def no_network(url, timeout):
    raise OSError("no route")


def stand_in_for_gpt2(name: str) -> tiktoken.Encoding:
    """As many tokens as GPT-2 has, by tiktoken's own code, without GPT-2's files: single bytes and pairs of them."""
    every = [bytes([byte]) for byte in range(256)]
    tokens = (every + [left + right for left in every for right in every])[: GPT2Tokenizer.vocab_size]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})


# ---- flags come and go, and checkpoints stay readable


@pytest.fixture
def old_run(tmp_path) -> Path:
    return shutil.copytree(OLD_RUN, tmp_path / "old_run")


def change_settings(run_folder: Path, **changes) -> None:
    """Other settings in the manifest of step 8. A value of LACKING removes the field."""
    path = run_folder / "step-8" / "manifest.json"
    manifest = json.loads(path.read_text())
    saved = {name: value for name, value in (manifest["settings"] | changes).items() if value is not LACKING}
    manifest["settings"] = saved
    path.write_text(json.dumps(manifest | {"digest": checkpoint._digest(manifest)}))


def resumed(run_folder: Path, *argv: str) -> request.Request:
    return read("--resume", str(run_folder), "--corpus", str(OLD_RUN / "corpus.txt"), *argv)


def test_a_flag_that_an_older_checkpoint_lacks_has_its_default_and_is_named(old_run):
    change_settings(old_run, clip=LACKING, save_every=LACKING)
    resumed_run = resumed(old_run)
    assert (resumed_run.settings.clip, resumed_run.asked["save_every"]) == (Settings.clip, None)
    (note,) = resumed_run.notes
    assert "older than these flags, so their defaults count: " in note
    assert {"--clip 1.0", "--save-every None"} <= set(note.split(": ")[-1].split(", "))


def test_a_flag_that_came_later_has_its_default_and_not_that_of_the_preset(old_run):
    change_settings(old_run, preset="gpu", dropout=LACKING)
    assert PRESETS["gpu"]["dropout"] != Settings.dropout
    assert resumed(old_run).settings.dropout == Settings.dropout


def test_a_flag_of_a_later_version_is_named_and_kept(old_run, capsys):
    change_settings(old_run, rotary=True)
    assert resumed(old_run).notes[0].endswith("does not know these settings, and keeps them: rotary")
    assert train.main(["--resume", str(old_run), "--corpus", str(OLD_RUN / "corpus.txt"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("rotary") == 1
    assert checkpoint.read_manifest(old_run / "step-12")["settings"]["rotary"] is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lr": "fast"}, "damaged, lr is 'fast'"),
        ({"steps": True}, "damaged, steps is True"),
        ({"steps": 1.5}, "damaged, steps is 1.5"),
        ({"n_layer": None}, "damaged, n_layer is None"),
        ({"lr": 10**400}, "damaged, lr is 1000"),
        ({"kernel": "v1"}, "kernel is 'v1', and this version knows auto, own, library, off, require: choose one with"),
        ({"tokenizer": "words"}, "tokenizer is 'words', and this version knows char, byte, bpe, gpt2"),
    ],
)
def test_a_saved_value_that_cannot_be_is_told(old_run, changes, why):
    change_settings(old_run, **changes)
    (line,) = [line for line in faults("--resume", str(old_run)) if "manifest.json" in line]
    assert why in line


def test_all_saved_values_that_cannot_be_are_told_together(old_run):
    change_settings(old_run, steps=1.5, dropout="much", backend="jax")
    assert len([line for line in faults("--resume", str(old_run)) if "manifest.json" in line]) == 3


def test_a_flag_replaces_a_saved_choice_that_this_version_does_not_have(old_run):
    change_settings(old_run, kernel="v1")
    assert resumed(old_run, "--kernel", "auto").settings.kernel == "auto"


def test_a_run_outlives_the_preset_that_it_began_with(old_run):
    change_settings(old_run, preset="tiny", n_embd=16)
    resumed_run = resumed(old_run)
    assert (resumed_run.settings.preset, resumed_run.settings.n_embd) == ("tiny", 16)


def test_a_whole_number_may_stand_for_a_float(old_run):
    change_settings(old_run, clip=2)
    assert repr(resumed(old_run).settings.clip) == "2.0"
    assert resumed(old_run).notes == ()


def test_a_saved_value_out_of_bounds_is_told_as_on_the_command_line(old_run):
    change_settings(old_run, dropout=1.5)
    assert "--dropout 1.5: must be at least 0 and below 1" in faults("--resume", str(old_run))


def test_a_new_flag_is_one_line(monkeypatch, old_run, tmp_path, capsys):
    """A dataclass with one more line: the command line, its help, bounds, checkpoints and resumed runs follow."""

    @dataclass(frozen=True)
    class Extended(Settings):
        window: int = flag(5, "tokens that attention sees", at_least=1, on_resume="fixed")

    for module in (request, resume, settings):
        monkeypatch.setattr(module, "Settings", Extended)
    with pytest.raises(SystemExit):
        read("--help")
    assert "--window N tokens that attention sees [5]" in " ".join(capsys.readouterr().out.split())
    assert read("--window", "7").settings.window == 7
    assert faults("--window", "0") == ["--window 0: must be at least 1"]
    assert read().asked["window"] == 5
    assert resumed(old_run).settings.window == 5
    assert resumed(old_run).notes[0].endswith("their defaults count: --window 5")
    assert faults("--resume", str(old_run), "--window", "6")[0].startswith("--window 6: the checkpoint in ")
    argv = ["--corpus", str(OLD_RUN / "corpus.txt"), "--device", "cpu"]
    assert train.main(["--resume", str(old_run), *argv]) == 0
    assert checkpoint.read_manifest(old_run / "step-12")["settings"]["window"] == 5
    assert read("--resume", str(old_run), *argv, "--steps", "13").notes == ()  # no checkpoint of an older version now
