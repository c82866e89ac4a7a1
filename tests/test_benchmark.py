"""benchmark.py from its command line, on sizes that take a moment."""

import json
import shutil
import subprocess

import pytest
import torch

import benchmark
from benchmarks import decode, gemv, gpu_check, profile, report, step, time_to_loss
from csrc import build
from settings import PRESETS


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (report, gemv):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def kernels():
    try:
        return build.load()
    except build.Unavailable as error:
        pytest.skip(f"the kernels cannot be built here: {error}")


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_gemv(results, kernels, monkeypatch, capsys):
    monkeypatch.setattr(gemv, "SHAPES", ((24, 40), (7, 33)))
    monkeypatch.setattr(gemv, "PAST_CACHES", 2**16)
    monkeypatch.setattr(
        gemv, "seconds", lambda calls, blocks: {name: [call() is None or 1.0] for name, call in calls.items()}
    )
    assert benchmark.main(["--blocks", "1"]) == 0
    cases = {(row["case"], row["against"]) for row in last_line(capsys)["rows"]}
    against = ("fp32", "bf16", "numpy", "bandwidth")
    shapes = ("24x40", "7x33")
    assert cases == {(f"gemv/cpu/{w}/{s}", a) for w in ("fp32", "bf16") for s in shapes for a in against}
    assert (results / "gemv.png").is_file()


def test_what_is_wrong_is_not_timed(kernels):
    x, weight = torch.ones(8), torch.ones(3, 8)
    gemv.check("right", torch.full((3,), 8.0), weight, x, True)
    with pytest.raises(RuntimeError, match="wrong is wrong"):
        gemv.check("wrong", torch.full((3,), 8.01), weight, x, True)


def test_decode(results, kernels, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "cpu", PRESETS["cpu"] | {"n_layer": 1, "n_embd": 16})
    monkeypatch.setattr(decode, "VOCABULARY", 60)
    monkeypatch.setattr(decode, "read_bandwidth", lambda device, blocks: 30.0)
    assert benchmark.main(["decode", "--preset", "cpu", "--tokens", "5", "--blocks", "1"]) == 0
    rows = last_line(capsys)["rows"]
    assert {row["case"] for row in rows} == {"decode/cpu/bf16", "decode/cpu/fp32"}
    assert {row["against"] for row in rows} >= {"fp32", "bandwidth"}


def test_decoding_checks_its_text():
    row = torch.tensor([[0.0, 1.0, 0.999]]).numpy()
    decode.check([0, 2], [0, 1], lambda tokens: row)  # nearer than the rounding
    with pytest.raises(RuntimeError, match="token 1"):
        decode.check([0, 0], [0, 1], lambda tokens: row)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_traffic_is_counted_from_the_command_line(results, monkeypatch, capsys):
    from benchmarks import traffic

    monkeypatch.setattr(traffic, "measured", lambda: [])
    assert benchmark.main(["traffic"]) == 0
    assert last_line(capsys)["benchmark"] == "traffic"


def test_step_compares_processes(results, monkeypatch, capsys):
    monkeypatch.setattr(step, "WARM_UP", 3)
    flags = ["--dtype", "fp32", "--batch-size", "2", "--blocks", "2", "--seconds", "0.001"]
    assert benchmark.main(["step", *flags]) == 0
    rows = {(row["case"], row["against"]): row for row in last_line(capsys)["rows"]}
    assert {("step/torch/fp32", "eager"), ("memory/torch/fp32", "eager"), ("scaler/fp32", "step")} <= rows.keys()
    assert rows["step/torch/fp32", "eager"]["ours"] > 0
    assert rows["scaler/fp32", "step"]["ratio"] > 1


def test_step_of_the_engine_is_compared_with_other_autograd_libraries(results, monkeypatch, capsys):
    pytest.importorskip("autograd")
    monkeypatch.setattr(step, "WARM_UP", 3)
    monkeypatch.setenv("CC", "no-compiler")  # tinygrad compiles for minutes
    flags = ["--backend", "engine", "--dtype", "fp32", "--batch-size", "2", "--blocks", "2", "--seconds", "0.001"]
    assert benchmark.main(["step", *flags]) == 0
    against = {row["against"] for row in last_line(capsys)["rows"] if row["case"] == "step/engine/fp32"}
    assert against >= {"eager", "autograd"}
    assert "tinygrad" not in against


def test_recomputation_is_measured_from_the_command_line(results, capsys):
    flags = ["--backend", "engine", "--dtype", "fp32", "--batch-size", "12", "--blocks", "1"]
    assert benchmark.main(["step", "--recompute", *flags]) == 0
    rows = {row["case"]: row["ratio"] for row in last_line(capsys)["rows"]}
    assert rows["recompute/engine/fp32/1/memory"] > 1.2


def test_sides_whose_losses_differ_are_not_timed():
    dtypes = {"ours/fp32": "fp32", "eager/fp32": "fp32", "ours/bf16": "bf16"}
    right = {"ours/fp32": [4.0, 3.9], "eager/fp32": [4.00001, 3.88], "ours/bf16": [4.002, 3.9]}
    step.check(right, dtypes)
    for name, losses in (("eager/fp32", [4.001, 3.9]), ("eager/fp32", [4.0, 3.0]), ("ours/bf16", [float("nan"), 3.9])):
        with pytest.raises(RuntimeError, match=f"{name}: loss"):
            step.check(right | {name: losses}, dtypes)


def test_a_side_that_dies_is_named(monkeypatch):
    worker = step.start(dict(side="nobody", preset="cpu", batch_size=1))
    with pytest.raises(RuntimeError, match="nobody ended with status 1"):
        step.ask("nobody", worker, 1)


def test_every_part_of_a_step_has_a_kind():
    names = {
        "aten::mm": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::gelu_backward": "GELU",
        "aten::_fused_adamw_": "optimizer",
        "aten::_amp_foreach_non_finite_check_and_unscale_": "scaler",
        "aten::native_layer_norm_backward": "normalisation",
        "minigpt::bf16_linear": "matrix products",
        "aten::add_": "the rest",
    }
    assert {name: profile.kind_of(name) for name in names} == names


def test_the_time_to_a_loss_is_read_between_validations():
    curve = [(100, 10.0, 2.4), (200, 20.0, 2.0), (300, 30.0, 1.8)]
    assert time_to_loss.reaches(curve, 1.9) == pytest.approx(25.0)
    assert time_to_loss.reaches(curve, 2.5) == 10.0
    assert time_to_loss.reaches(curve, 1.7) is None


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nothing"], "nothing: no such benchmark: use one of gemv, decode, step, precision, traffic"),
        (["gemv", "--blocks", "0"], "--blocks 0: must be at least 1"),
        (["decode", "--preset", "cpu", "--tokens", "64"], "--tokens 64: must be below the context of 64"),
        (["traffic", "--blocks", "3"], "unknown argument --blocks"),
        (["step", "--recompute", "--backend", "numpy"], "--recompute: --backend numpy keeps all that backward needs"),
        (["step", "--recompute", "--profile"], "--recompute: cannot be combined with --profile or --time-to-loss"),
    ],
)
def test_bad_input_is_one_line(argv, line, capsys):
    assert benchmark.main(argv) == 2
    assert line in capsys.readouterr().err


def test_the_gpu_check_takes_a_benchmarks_last_line_or_says_what_became_of_it(monkeypatch):
    def ends(**done):
        monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, **done))

    ends(returncode=0, stdout='a table\n{"benchmark": "gemv", "rows": []}\n')
    assert gpu_check.measure("cuda", ["gemv"]) == {"benchmark": "gemv", "rows": []}
    ends(returncode=1, stdout="")
    assert gpu_check.measure("cuda", ["gemv"]) == {"benchmark": "gemv", "failed": 1}

    def too_long(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_long)
    assert "longer than" in gpu_check.measure("cuda", ["gemv"])["failed"]
