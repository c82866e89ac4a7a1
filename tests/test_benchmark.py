"""benchmark.py from its command line, on sizes that take a moment."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmark
import train
from benchmarks import decode, gemv, gpu_check, profile, report, step, time_to_loss, traffic, worker
from csrc import build
from csrc.cuda_on_cpu.emulator import COMPILER
from settings import PRESETS

ROOT = Path(benchmark.__file__).parent
SPEC = dict(backend="numpy", device="cpu", emulation="auto", kernel="auto", preset="cpu", batch_size=2, compiled=False)


@pytest.fixture
def measure(tmp_path, capsys):
    """measure("step", "--flag …") runs benchmark.py and returns its JSON line."""

    def run_benchmark(name: str, flags: str = "") -> dict:
        assert benchmark.main([name, *flags.split(), "--results", str(tmp_path / "results")]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert json.loads((tmp_path / "results" / f"{result['benchmark']}.json").read_text()) == result
        return result

    return run_benchmark


@pytest.fixture
def kernels():
    try:
        return build.load()
    except build.Unavailable as error:
        pytest.skip(f"the kernels cannot be built here: {error}")


# ---- benchmark.py


def test_help_lists_every_benchmark_and_loads_none(capsys):
    script = "import sys, benchmark; benchmark.main(['--help']); print([m for m in sys.modules if 'benchmarks' in m])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    *text, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    for name, about in benchmark.BENCHMARKS.items():
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
        assert f"  {name:<10} {about}" in text


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ("nothing", ["nothing: no such benchmark: use one of gemv, decode, step, precision, traffic"]),
        ("gemv --blocks 0", ["--blocks 0: must be at least 1"]),
        (
            "decode --preset cpu --tokens 64 --blocks 0",
            ["--blocks 0: must be at least 1", "--tokens 64: must be below the context of 64"],
        ),
        ("traffic --blocks 3", ["unknown argument --blocks: --help lists all"]),
        (
            "step --recompute --profile --backend numpy --seconds 0",
            [
                "--seconds 0: must be above 0 and below 3600",
                "--profile: cannot be combined with --seconds",
                "--profile: cannot be combined with --recompute",
                "--recompute: cannot be combined with --seconds",
                "--recompute: --backend numpy keeps all that backward needs: use --backend engine or torch",
            ],
        ),
        ("step --time-to-loss --preset gpu", ["--time-to-loss: cannot be combined with --preset"]),
        ("step --profile --backend numpy", ["--profile: looks into PyTorch, --backend numpy has its time elsewhere"]),
    ],
)
def test_bad_input_is_a_line_for_each_fault(argv, lines, capsys):
    assert benchmark.main(argv.split()) == 2
    assert capsys.readouterr().err.splitlines() == [f"benchmark.py: error: {line}" for line in lines]


@pytest.mark.parametrize(
    ("argv", "table"),
    [
        ("gemv", "gemv"),
        ("decode", "decode"),
        ("traffic", "traffic"),
        ("precision", "precision"),
        ("step", "step-torch"),
        ("step --backend numpy", "step-numpy"),
        ("step --recompute --backend engine", "recompute-engine"),
        ("step --time-to-loss", "time-to-loss"),
    ],
)
def test_a_table_without_a_place_is_told_before_anything_is_measured(argv, table, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(traffic, "COMPILER", "g++")
    monkeypatch.setattr(build, "load", lambda: None)
    assert benchmark.main([*argv.split(), "--readme"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"<!-- {table} -->" in line


# ---- the kernel's benchmarks


def test_gemv_compares_every_shape_with_every_library(measure, tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(gemv, "SHAPES", ((24, 40), (7, 33)))
    monkeypatch.setattr(gemv, "PAST_CACHES", 2**16)
    monkeypatch.setattr(
        gemv, "time_in_turns", lambda calls, blocks: {name: [call() is None or 1.0] for name, call in calls.items()}
    )
    cases = {(row["case"], row["against"]) for row in measure("gemv", "--blocks 1 --profile")["rows"]}
    against = ("fp32", "bf16", "numpy", "bandwidth")
    shapes = ("24x40", "7x33")
    assert cases == {(f"gemv/cpu/{w}/{s}", a) for w in ("fp32", "bf16") for s in shapes for a in against}
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"gemv.json", "gemv.png", "gemv-trace.json"}


def test_a_product_that_is_wrong_is_not_timed():
    x, weight = torch.ones(8), torch.ones(3, 8)
    gemv.check("right", torch.full((3,), 8.0), weight, x, True)
    with pytest.raises(RuntimeError, match="wrong is wrong"):
        gemv.check("wrong", torch.full((3,), 8.01), weight, x, True)


def test_decoding_is_compared_with_fp32_and_the_bandwidth(measure, kernels, monkeypatch):
    monkeypatch.setitem(PRESETS, "cpu", PRESETS["cpu"] | {"n_layer": 1, "n_embd": 16})
    monkeypatch.setattr(decode, "VOCABULARY", 60)
    monkeypatch.setattr(decode, "read_bandwidth", lambda device, blocks: 30.0)
    rows = measure("decode", "--preset cpu --tokens 5 --blocks 1")["rows"]
    assert {row["case"] for row in rows} == {"decode/cpu/bf16", "decode/cpu/fp32"}
    assert {row["against"] for row in rows} >= {"fp32", "bandwidth"}


def test_a_text_that_is_wrong_is_not_timed():
    logits = np.array([[0.0, 1.0, 0.999]])
    decode.check([0, 2], [0, 1], lambda tokens: logits)  # nearer than the rounding
    with pytest.raises(RuntimeError, match="token 1"):
        decode.check([0, 0], [0, 1], lambda tokens: logits)


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_traffic_is_counted_from_the_command_line(measure, monkeypatch):
    monkeypatch.setattr(traffic, "measured", lambda: [])
    assert measure("traffic")["benchmark"] == "traffic"


# ---- a step


def test_no_benchmark_has_a_training_loop_of_its_own():
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    assert [name for name, source in sources.items() if ".backward(" in source] == []


def test_our_side_trains_by_the_step_of_train_py(monkeypatch):
    settings = worker.settings_of(SPEC | {"dtype": "bf16"})
    x, y = np.random.default_rng(0).integers(0, worker.VOCABULARY, (2, 2, 64))
    numbers = []

    def recorded(backend, scaler, batches, settings, number, real=train.step):
        numbers.append(number)
        return real(backend, scaler, batches, settings, number)

    monkeypatch.setattr(train, "step", recorded)
    take_step, take_timed_step = worker.ours(settings, worker.config_of("cpu"))
    first, (second, scaler_seconds) = take_step(x, y), take_timed_step(x, y)
    assert numbers == [0, 1]
    assert second < first
    assert scaler_seconds > 0


def test_the_loss_is_scaled_below_fp32_alone():
    scaling = {dtype: worker.settings_of(SPEC | {"dtype": dtype}).loss_scaling for dtype in step.DTYPES}
    assert scaling == {"fp32": "off", "bf16": "on", "fp16": "on"}


def test_the_optimizer_is_no_part_of_the_scalers_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock[0])

    class Scaler:
        """Each call takes another time, and says what it was given."""

        def scale(self, loss):
            clock[0] += 1
            return "scaled", loss

        def unscale_(self, optimizer):
            clock[0] += 2

        def step(self, optimizer):
            clock[0] += 100
            return "stepped", optimizer

        def update(self):
            clock[0] += 4

    timed = worker.TimedScaler(Scaler(), "cpu")
    assert timed.scale("loss") == ("scaled", "loss")
    timed.unscale_("optimizer")
    assert timed.step("optimizer") == ("stepped", "optimizer")
    timed.update()
    assert timed.seconds == 1 + 2 + 4


def test_the_sides_of_a_step_are_processes_that_are_compared(measure, monkeypatch):
    monkeypatch.setattr(step, "WARM_UP", 3)
    result = measure("step", "--dtype fp32 --batch-size 2 --blocks 2 --seconds 0.001")
    rows = {(row["case"], row["against"]): row for row in result["rows"]}
    assert {("step/torch/fp32", "eager"), ("memory/torch/fp32", "eager"), ("scaler/fp32", "step")} <= rows.keys()
    assert rows["step/torch/fp32", "eager"]["ours"] > 0
    assert rows["scaler/fp32", "step"]["ratio"] > 1


def test_a_step_of_the_engine_is_compared_with_other_autograd_libraries(measure, monkeypatch):
    pytest.importorskip("autograd")
    monkeypatch.setattr(step, "WARM_UP", 3)
    monkeypatch.setenv("CC", "no-compiler")  # tinygrad compiles for minutes
    rows = measure("step", "--backend engine --dtype fp32 --batch-size 2 --blocks 2 --seconds 0.001")["rows"]
    against = {row["against"] for row in rows if row["case"] == "step/engine/fp32"}
    assert against >= {"eager", "autograd"}
    assert "tinygrad" not in against


def test_recomputation_is_measured_from_the_command_line(measure):
    result = measure("step", "--recompute --backend engine --dtype fp32 --batch-size 12 --blocks 1")
    ratios = {row["case"]: row["ratio"] for row in result["rows"]}
    assert ratios["recompute/engine/fp32/1/memory"] > 1.2


def test_a_profile_prints_shares_and_leaves_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile, "STEPS", 2)
    flags = f"--profile --dtype fp32 --batch-size 2 --results {tmp_path}"
    assert benchmark.main(["step", *flags.split()]) == 0
    shares = [line for line in capsys.readouterr().out.splitlines() if " ms  " in line]
    assert {"matrix products", "optimizer", "attention"} <= {line.split(" ms  ")[1] for line in shares}
    assert sum(float(line.split("%")[0]) for line in shares) == pytest.approx(100, abs=1)
    assert json.loads((tmp_path / "step-trace.json").read_text())["traceEvents"]


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
    assert time_to_loss.seconds_until(curve, 1.9) == pytest.approx(25.0)
    assert time_to_loss.seconds_until(curve, 2.5) == 10.0
    assert time_to_loss.seconds_until(curve, 1.7) is None


# ---- the GPU check


def test_the_gpu_check_takes_a_benchmarks_last_line_or_says_what_became_of_it(monkeypatch):
    def ends(**done):
        monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, **done))

    ends(returncode=0, stdout='a table\n{"benchmark": "gemv", "rows": []}\n')
    assert gpu_check.measure(["gemv"]) == {"benchmark": "gemv", "rows": []}
    ends(returncode=1, stdout="")
    assert gpu_check.measure(["gemv"]) == {"benchmark": "gemv", "failed": 1}

    def too_long(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_long)
    assert "longer than" in gpu_check.measure(["gemv"])["failed"]


@pytest.mark.parametrize(
    ("passed", "run", "benchmark_line", "status"),
    [
        (True, {"case": "train", "ours": 1.0, "unit": "tok/s", "val": 2.0}, {}, 0),
        (False, {"case": "train", "ours": 1.0, "unit": "tok/s", "val": 2.0}, {}, 1),
        (True, {"case": "train", "failed": 1}, {}, 1),
        (True, {"case": "train", "ours": 1.0, "unit": "tok/s", "val": 2.0}, {"failed": 1}, 1),
    ],
)
def test_the_gpu_check_fails_where_a_part_has_failed(passed, run, benchmark_line, status, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "run_tests", lambda: passed)
    monkeypatch.setattr(gpu_check, "measure_run", lambda *_: run)
    monkeypatch.setattr(gpu_check, "measure", lambda arguments: benchmark_line)
    assert gpu_check.main(["--device", "cpu", "--results", str(tmp_path)]) == status
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert (result["benchmark"], result["tests_passed"], result["rows"]) == ("gpu-check", passed, [run, run])
    assert result["benchmarks"] == [benchmark_line] * 3
