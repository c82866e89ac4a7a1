"""What the benchmarks share."""

import json

import pytest

from base.errors import BadInput
from benchmarks import report
from benchmarks.report import Row, finish, seconds, share, speeds, table, write_readme

ROWS = [Row("gemv/cpu/bf16/8x8", "fp32", 25.123, 8.0, "GB/s", 3.14, (3.0, 3.3))]


def test_functions_take_turns_in_an_order_that_is_reversed():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = seconds(functions, blocks=3, at_least=0)
    assert "".join(calls) == "aaabbb" + "aaabbb" + "bbbaaa" + "aaabbb"
    assert {name: len(blocks) for name, blocks in times.items()} == {"a": 3, "b": 3}


def test_speeds_are_medians_and_ratios_are_paired():
    (row,) = speeds("case", {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 4.0]}, "ours", 8.0, "GB/s")
    assert row == Row("case", "theirs", 4.0, 2.0, "GB/s", 2.0, (1.0, 3.0))


def test_a_share_is_of_what_was_measured_once():
    assert share("case", [5.0, 8.0, 6.0], 10.0, "bandwidth", "GB/s").ratio == 0.6


@pytest.mark.parametrize(("value", "shown"), [(25.123, "25.1"), (0.01234, "0.0123"), (1234.5, "1,234"), (0.0, "0.0")])
def test_three_digits_are_shown(value, shown):
    assert f"| {shown} GB/s |" in table([ROWS[0]._replace(ours=value)])


def test_the_json_line_comes_last_and_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    finish("gemv", ROWS, "a CPU", readme=False, more={"read_bandwidth_gb_s": 30.0})
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "results" / "gemv.json").read_text())
    assert last["benchmark"] == "gemv"
    assert last["rows"][0] == ROWS[0]._asdict() | {"spread": [3.0, 3.3]}
    assert last["read_bandwidth_gb_s"] == 30.0


def test_only_what_stands_between_the_markers_is_written(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- gemv -->\nold\n<!-- /gemv -->\nafter\n<!-- step -->\n<!-- /step -->\n")
    for text in ("first", "second"):
        write_readme("gemv", text, path)
    expected = "before\n<!-- gemv -->\nsecond\n<!-- /gemv -->\nafter\n<!-- step -->\n<!-- /step -->\n"
    assert path.read_text() == expected
    with pytest.raises(BadInput, match="<!-- decode -->"):
        write_readme("decode", "x", path)
    assert path.read_text() == expected
