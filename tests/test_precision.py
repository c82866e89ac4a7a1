"""benchmark.py precision: what it runs, what it adopts and where that is read."""

import json
import math

import pytest

import benchmark
import request
import train
from amp.formats import FORMATS
from benchmarks import precision, report
from benchmarks.precision import Trained, adopt
from run.log import Row

TINY = ["precision", "--device", "cpu", "--steps", "2", "--seeds", "2"]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder that results go to by default, and a place for what is committed."""
    monkeypatch.setattr(report, "cache_folder", lambda: tmp_path)
    folders = (tmp_path / "benchmarks", tmp_path / "committed")
    monkeypatch.setattr(request, "ADOPTED", tuple(folder / "config.json" for folder in folders))
    for folder in folders:
        folder.mkdir()
    return folders[0]


def row(step: int, loss: float, tokens_per_second: float) -> Row:
    return Row(step, loss, loss, 0.01, 1e-3, 1.0, 1.0, 0, step * 768, tokens_per_second, "library", 1.0)


@pytest.fixture
def runs(monkeypatch):
    """Runs by table in place of processes: bf16 is the fastest, fp16 is off by more than the seeds are apart."""
    speed, off, asked = {"fp32": 100.0, "bf16": 150.0, "fp16": 300.0}, {"fp32": 0.0, "bf16": 0.01, "fp16": 0.3}, []

    def measure_run(flags):
        told = dict(zip(flags[::2], flags[1::2], strict=True))
        dtype, seed = told["--dtype"], int(told["--seed"])
        asked.append((dtype, seed))
        loss = 2.0 + 0.1 * seed + off[dtype]
        return Trained([row(1, 4.0, 1.0), row(2, loss, speed[dtype] + seed)], 400.0 if dtype == "fp32" else 200.0)

    monkeypatch.setattr(precision, "measure_run", measure_run)
    return asked


def test_what_is_written_is_what_was_measured(results, runs, corpus, capsys):
    (results / "metrics.json").write_text('{"m1_scaler": {"kept": true}}')
    assert benchmark.main([*TINY, "--corpus", str(corpus)]) == 0
    metrics = json.loads((results / "metrics.json").read_text())
    assert metrics["m1_scaler"] == {"kept": True}
    measured = metrics["m6_precision"]
    assert measured["tokens_per_second"] == {"fp32": 100.5, "bf16": 150.5, "fp16": 300.5}
    assert measured["speed_up"]["bf16"] == pytest.approx((150 / 100 + 151 / 101) / 2)
    assert measured["loss_gap"] == pytest.approx({"bf16": 0.01, "fp16": 0.3})
    assert measured["noise"] == pytest.approx(0.1 / math.sqrt(2))
    assert (results / "precision-runs.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "| fp16 | 300 | **2.99** | 200 MB | 2.3500 | +0.3000 | +0.3000 to +0.3000 |" in printed
    assert "Adopted: **bf16**" in printed
    result = json.loads(printed.splitlines()[-1])
    cases = {row["case"] for row in result["rows"]}
    assert cases == {f"precision/{name}" for name in ("bf16", "bf16/memory", "fp16", "fp16/memory")}
    assert result["rows"][1]["ratio"] == 2.0  # half the memory
    assert result["adopted"] == json.loads((results / "config.json").read_text())["precision"] == "bf16"
    assert request.adopt("adopted")[0] == "bf16"  # what train.py --dtype adopted reads


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
def test_the_fastest_precision_within_the_noise_is_adopted(speed, gap, adopted):
    speeds = dict(zip(("fp32", "bf16", "fp16"), speed, strict=True))
    gaps = dict(zip(("bf16", "fp16"), gap, strict=True))
    assert adopt(speeds, gaps, noise=0.02) == adopted


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--seeds 1", "--seeds 1: must be at least 2"),
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
    measured = json.loads((results / "metrics.json").read_text())["m6_precision"]
    assert set(measured["tokens_per_second"]) == {"fp32", "bf16"}
    assert all(speed > 100 for speed in measured["tokens_per_second"].values())
    assert all(50 < peak < 5000 for peak in measured["peak_mb"].values())
    assert abs(measured["loss_gap"]["bf16"]) < 0.05


# ---- what is committed, and who reads it


def test_the_committed_measurement_is_whole_and_the_adopted_precision_is_in_it():
    committed = json.loads((report.COMMITTED / "metrics.json").read_text())["m6_precision"]
    adopted = json.loads((report.COMMITTED / "config.json").read_text())["precision"]
    dtypes = set(committed["tokens_per_second"])
    assert {"fp32", adopted} <= dtypes <= set(FORMATS)
    assert len(dtypes) >= 2
    for name in ("tokens_per_second", "peak_mb", "final_loss"):
        assert set(committed[name]) == dtypes
        assert all(isinstance(value, float) and 0 < value < 1e9 for value in committed[name].values())
    for name in ("speed_up", "loss_gap", "loss_gap_range"):
        assert set(committed[name]) == dtypes - {"fp32"}
    assert all(0.001 < ratio < 1000 for ratio in committed["speed_up"].values())
    assert all(abs(gap) < 1 for gap in committed["loss_gap"].values())
    assert all(
        low <= committed["loss_gap"][dtype] <= high for dtype, (low, high) in committed["loss_gap_range"].items()
    )
    assert 0 < committed["noise"] < 1
    assert isinstance(committed["device"], str)
    assert committed["note"] is None or isinstance(committed["note"], str)
    assert adopt(committed["tokens_per_second"], committed["loss_gap"], committed["noise"]) == adopted


def test_the_adopted_precision_is_trained_in_and_the_header_says_so(results, train_run, capsys):
    (results / "config.json").write_text('{"precision": "fp16"}')
    out, rows = train_run("run", "--dtype adopted --steps 1")
    assert rows[0].scale > 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype ")]
    assert line.startswith("dtype   fp16: ")
    assert line.endswith("config.json)")
    assert "(adopted by measurement: " in line
    saved = json.loads((out / "step-1" / "manifest.json").read_text())["settings"]
    assert saved["dtype"] == "fp16"  # a resumed run does not follow a new measurement


def test_the_users_own_measurement_goes_before_the_committed_one(results):
    own, committed = request.ADOPTED
    committed.write_text('{"precision": "fp16"}')
    assert request.adopt("adopted")[0] == "fp16"
    own.write_text('{"precision": "fp32"}')
    assert request.adopt("adopted")[0] == "fp32"


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"precision": "fp8"}', '{"precision": ["fp32"]}'])
def test_without_a_measurement_nothing_is_adopted(content, results, capsys):
    own, _ = request.ADOPTED
    if content is not None:
        own.write_text(content)
    assert train.main(["--dtype", "adopted"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: error: --dtype adopted: {own} ")
    assert line.endswith(": run benchmark.py precision first")
