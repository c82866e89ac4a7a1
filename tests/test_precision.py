"""benchmark.py precision: what it runs, what it adopts and where that is read."""

import json
import math

import pytest

import benchmark
import request
import train
from amp.formats import FORMATS
from benchmarks import precision, report
from benchmarks.precision import Run, adopt
from run.log import Row

TINY = ["precision", "--device", "cpu", "--steps", "2", "--seeds", "2"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (report, precision):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(request, "ADOPTED", tmp_path / "results" / "config.json")
    return tmp_path / "results"


def row(step: int, loss: float, tokens_per_second: float) -> Row:
    return Row(step, loss, loss, 0.01, 1e-3, 1.0, 1.0, 0, step * 768, tokens_per_second, "library", 1.0)


@pytest.fixture
def runs(monkeypatch):
    """Runs by table in place of processes: bf16 is the fastest, fp16 is off by more than the seeds are apart."""
    speed, off, asked = {"fp32": 100.0, "bf16": 150.0, "fp16": 300.0}, {"fp32": 0.0, "bf16": 0.01, "fp16": 0.3}, []

    def train(flags):
        told = dict(zip(flags[::2], flags[1::2], strict=True))
        dtype, seed = told["--dtype"], int(told["--seed"])
        asked.append((dtype, seed))
        loss = 2.0 + 0.1 * seed + off[dtype]
        return Run([row(1, 4.0, 1.0), row(2, loss, speed[dtype] + seed)], 400.0 if dtype == "fp32" else 200.0)

    monkeypatch.setattr(precision, "train", train)
    return asked


def test_what_is_written_is_what_was_measured(results, runs, corpus, capsys):
    results.mkdir()
    (results / "metrics.json").write_text('{"m1_scaler": {"kept": true}}')
    assert benchmark.main([*TINY, "--corpus", str(corpus)]) == 0
    metrics = json.loads((results / "metrics.json").read_text())
    assert metrics["m1_scaler"] == {"kept": True}
    m = metrics["m6_precision"]
    assert m["tokens_per_second"] == {"fp32": 100.5, "bf16": 150.5, "fp16": 300.5}
    assert m["speed_up"]["bf16"] == pytest.approx((150 / 100 + 151 / 101) / 2)
    assert m["loss_gap"] == pytest.approx({"bf16": 0.01, "fp16": 0.3})
    assert m["noise"] == pytest.approx(0.1 / math.sqrt(2))
    assert (results / "precision-runs.png").stat().st_size > 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {r["case"] for r in line["rows"]} == {f"precision/{d}{m}" for d in ("bf16", "fp16") for m in ("", "/memory")}
    assert line["rows"][1]["ratio"] == 2.0  # half the memory
    assert line["adopted"] == json.loads((results / "config.json").read_text())["precision"] == "bf16"


def test_precisions_take_turns_within_a_seed(results, runs, corpus):
    assert benchmark.main([*TINY, "--corpus", str(corpus)]) == 0
    assert runs == [("fp32", 0), ("bf16", 0), ("fp16", 0), ("fp16", 1), ("bf16", 1), ("fp32", 1)]


@pytest.mark.parametrize(
    ("speed", "gap", "adopted"),
    [
        ((1, 2, 3), (0.01, 0.01), "fp16"),
        ((1, 2, 3), (0.01, 0.03), "bf16"),
        ((1, 2, 3), (0.03, 0.03), "fp32"),
        ((3, 2, 1), (0.0, 0.0), "fp32"),
        ((1, 2, 3), (0.0, math.nan), "bf16"),
        ((1, 2, 3), (0.0, -0.5), "fp16"),  # better than fp32 is no fault
    ],
)
def test_the_rule(speed, gap, adopted):
    speeds = dict(zip(("fp32", "bf16", "fp16"), speed, strict=True))
    gaps = dict(zip(("bf16", "fp16"), gap, strict=True))
    assert adopt(speeds, gaps, noise=0.02) == adopted


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--seeds 1", "--seeds 1: must be at least 2, or there is no noise to compare with"),
        ("--dtypes fp32", "--dtypes fp32: use bf16, fp16 or both as bf16,fp16; fp32 is always measured"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--corpus nowhere.txt", "--corpus nowhere.txt: no such file"),
    ],
)
def test_bad_input_is_told_before_anything_runs(argv, line, results, runs, capsys):
    assert benchmark.main(["precision", *argv.split()]) == 2
    assert line in capsys.readouterr().err
    assert runs == []


@pytest.mark.slow
def test_processes_of_train_py_are_measured(results, corpus, capsys):
    assert benchmark.main([*TINY, "--dtypes", "bf16", "--corpus", str(corpus)]) == 0
    m = json.loads((results / "metrics.json").read_text())["m6_precision"]
    assert set(m["tokens_per_second"]) == {"fp32", "bf16"}
    assert all(speed > 100 for speed in m["tokens_per_second"].values())
    assert all(50 < peak < 5000 for peak in m["peak_mb"].values())
    assert abs(m["loss_gap"]["bf16"]) < 0.05


# ---- what is committed, and who reads it


def test_the_committed_measurement_is_whole_and_the_adopted_precision_is_in_it():
    m = json.loads((report.RESULTS / "metrics.json").read_text())["m6_precision"]
    adopted = json.loads((report.RESULTS / "config.json").read_text())["precision"]
    measured = set(m["tokens_per_second"])
    assert {"fp32", adopted} <= measured <= set(FORMATS)
    assert len(measured) >= 2
    for name in ("tokens_per_second", "peak_mb", "final_loss"):
        assert set(m[name]) == measured
        assert all(isinstance(value, float) and 0 < value < 1e9 for value in m[name].values())
    for name in ("speed_up", "loss_gap", "loss_gap_range"):
        assert set(m[name]) == measured - {"fp32"}
    assert all(0.001 < ratio < 1000 for ratio in m["speed_up"].values())
    assert all(abs(gap) < 1 for gap in m["loss_gap"].values())
    assert all(low <= m["loss_gap"][dtype] <= high for dtype, (low, high) in m["loss_gap_range"].items())
    assert 0 < m["noise"] < 1
    assert isinstance(m["device"], str)
    assert m["note"] is None or isinstance(m["note"], str)
    assert adopt(m["tokens_per_second"], m["loss_gap"], m["noise"]) == adopted


def test_the_adopted_precision_is_trained_in_and_the_header_says_so(results, train_run, capsys):
    results.mkdir()
    request.ADOPTED.write_text('{"precision": "fp16"}')
    out, rows = train_run("run", "--dtype adopted --steps 1")
    assert rows[0].scale > 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype ")]
    assert line.startswith("dtype   fp16: ")
    assert line.endswith("(adopted by measurement: config.json)")
    saved = json.loads((out / "step-1" / "manifest.json").read_text())["settings"]
    assert saved["dtype"] == "fp16"  # a resumed run does not follow a new measurement


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"precision": "fp8"}', '{"precision": ["fp32"]}'])
def test_without_a_measurement_nothing_is_adopted(content, results, capsys):
    results.mkdir()
    if content is not None:
        request.ADOPTED.write_text(content)
    assert train.main(["--dtype", "adopted"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: error: --dtype adopted: {request.ADOPTED} ")
    assert line.endswith(": run benchmark.py precision first")


def test_a_damaged_file_of_results_is_written_anew(results, capsys):
    results.mkdir()
    (results / "metrics.json").write_text("{")
    report.keep("metrics.json", {"a": 1})
    assert json.loads((results / "metrics.json").read_text()) == {"a": 1}
    assert "note " in capsys.readouterr().out
