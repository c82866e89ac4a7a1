"""benchmark.py from its command line, on sizes that take a moment."""

import json
import shutil

import pytest
import torch

import benchmark
from benchmarks import decode, gemv, report
from csrc import build
from model.config import PRESETS


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
        gemv, "seconds", lambda functions, blocks: {name: [f() is None or 1.0] for name, f in functions.items()}
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
def test_traffic_is_counted_from_the_command_line(monkeypatch, capsys):
    from benchmarks import traffic

    monkeypatch.setattr(traffic, "measured", lambda: [])
    assert benchmark.main(["traffic"]) == 0
    assert last_line(capsys) == {"benchmark": "traffic", "rows": []}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nothing"], "nothing: no such benchmark: use one of gemv, decode, step, precision, traffic"),
        (["gemv", "--blocks", "0"], "--blocks 0: must be at least 1"),
        (["decode", "--preset", "cpu", "--tokens", "64"], "--tokens 64: must be below the context of 64"),
        (["traffic", "--blocks", "3"], "unknown argument --blocks"),
    ],
)
def test_bad_input_is_one_line(argv, line, capsys):
    assert benchmark.main(argv) == 2
    assert line in capsys.readouterr().err
