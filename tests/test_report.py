"""What the benchmarks share: timing, rows, and the one place that writes results."""

import json

import pytest
from matplotlib.figure import Figure

from base.errors import BadInput
from benchmarks import report
from benchmarks.report import ReportSettings, Row, find_table, finish, share_row, speed_rows, table, time_in_turns

ROWS = [Row("gemv/cpu/bf16/8x8", "fp32", 25.123, 8.0, "GB/s", 3.14, (3.0, 3.3))]
PAGE = "before\n<!-- gemv -->\nold\n<!-- /gemv -->\nafter\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project of two pages, of which the second has a place for the table of gemv."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "COMMITTED", tmp_path / "benchmarks" / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- step -->\n<!-- /step -->\n")
    (tmp_path / "docs" / "kernel.md").write_text(PAGE)
    return tmp_path


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---- timing and rows


def test_functions_take_turns_in_an_order_that_is_reversed():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = time_in_turns(functions, blocks=3, at_least=0)
    assert "".join(calls) == "aaabbb" + "aaabbb" + "bbbaaa" + "aaabbb"
    assert {name: len(blocks) for name, blocks in times.items()} == {"a": 3, "b": 3}


def test_a_block_lasts_as_long_as_it_is_told():
    calls = []
    time_in_turns({"a": lambda: calls.append("a")}, blocks=1, at_least=0.01)
    assert len(calls) > 3 + 3


def test_speeds_are_medians_and_the_ratio_is_the_median_of_the_ratios_of_blocks():
    (row,) = speed_rows("case", {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 4.0]}, "ours", 8.0, "GB/s")
    assert row == Row("case", "theirs", 4.0, 2.0, "GB/s", 2.0, (1.0, 3.0))
    (row,) = speed_rows("case", {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 1.0, 2.0]}, "ours", 8.0, "GB/s")
    assert row.ratio == 0.5
    assert row.ours == row.theirs  # the quotient of the medians would be 1


def test_a_share_is_of_a_limit_that_was_measured_once():
    assert share_row("case", [5.0, 8.0, 6.0], 10.0, "bandwidth", "GB/s") == Row(
        "case", "bandwidth", 6.0, 10.0, "GB/s", 0.6, (0.5, 0.8)
    )


@pytest.mark.parametrize(("value", "shown"), [(25.123, "25.1"), (0.01234, "0.0123"), (1234.5, "1,234"), (0.0, "0.0")])
def test_three_digits_are_shown(value, shown):
    assert f"| {shown} GB/s |" in table([ROWS[0]._replace(ours=value)])


# ---- results


def test_a_result_goes_to_the_users_folder_alone(root, monkeypatch, capsys):
    monkeypatch.setattr(report, "cache_folder", lambda: root / "cache")
    finish("gemv", ROWS, "a CPU", ReportSettings(), more={"read_bandwidth_gb_s": 30.0})
    result = last_line(capsys)
    assert result == json.loads((root / "cache" / "benchmarks" / "gemv.json").read_text())
    assert result["benchmark"] == "gemv"
    assert result["machine"]["device"] == "a CPU"
    assert result["rows"] == [ROWS[0]._asdict() | {"spread": [3.0, 3.3]}]
    assert result["read_bandwidth_gb_s"] == 30.0
    assert not report.COMMITTED.exists()
    assert (root / "docs" / "kernel.md").read_text() == PAGE


def test_readme_also_writes_the_committed_results_and_the_table(root, monkeypatch, capsys):
    monkeypatch.setattr(report, "instruction_set", lambda: "AVX2")
    mine = root / "mine"
    report.COMMITTED.mkdir(parents=True)
    for folder, text in ((report.COMMITTED, '{"b": 1}'), (mine, "[")):
        folder.mkdir(exist_ok=True)
        (folder / "keys.json").write_text(text)
    settings = ReportSettings(results=str(mine), readme=True)
    finish("gemv", ROWS, "a CPU", settings, pictures={"gemv.png": Figure()}, kept={"keys.json": {"a": 2}})
    assert "keys.json held no JSON object" in capsys.readouterr().out
    for folder, keys in ((report.COMMITTED, {"b": 1, "a": 2}), (mine, {"a": 2})):
        assert json.loads((folder / "keys.json").read_text()) == keys
        assert json.loads((folder / "gemv.json").read_text())["machine"]["instruction_set"] == "AVX2"
        assert (folder / "gemv.png").read_bytes().startswith(b"\x89PNG")
    written = f"{report.about_machine('a CPU')}:\n\n{table(ROWS)}"
    assert written.startswith("a CPU, CPU with AVX2, numpy ")
    assert (root / "docs" / "kernel.md").read_text() == PAGE.replace("old", written)


def test_a_folder_that_cannot_be_written_costs_a_note_and_not_the_result(root, capsys):
    (root / "file").write_text("")
    finish("gemv", ROWS, "a CPU", ReportSettings(results=str(root / "file")))
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"note    {root / 'file'}: cannot be written (") for line in printed)
    assert json.loads(printed[-1])["benchmark"] == "gemv"


# ---- tables in README.md and docs/


def test_only_what_stands_between_the_markers_is_written(root):
    for text in ("first", "second"):
        report.write_table("gemv", text)
    assert (root / "docs" / "kernel.md").read_text() == PAGE.replace("old", "second")
    report.write_table("step", "a table")
    assert (root / "README.md").read_text() == "<!-- step -->\na table\n<!-- /step -->\n"


@pytest.mark.parametrize(
    ("readme", "page"),
    [
        ("", ""),
        ("<!-- gemv -->\n", "<!-- /gemv -->\n"),
        (PAGE, PAGE),
        ("", PAGE + PAGE),
        ("", "<!-- /gemv -->\n<!-- gemv -->\n"),
        ("", "<!-- gemv -->\n"),
        ("", PAGE + "<!-- /gemv -->\n"),
        ("", "<!-- /gemv -->\n" + PAGE),
    ],
)
def test_a_table_needs_one_place(root, readme, page):
    (root / "README.md").write_text(readme)
    (root / "docs" / "kernel.md").write_text(page)
    with pytest.raises(BadInput, match=r"^--readme: .* a line <!-- gemv --> and after it <!-- /gemv -->$"):
        find_table("gemv")


# ---- the machine


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu avx avx2 fma", "AVX2"),
        ("avx2 avx512f avx512bw", "AVX-512"),
        ("avx512f avx512_bf16 avx2", "AVX-512 with BF16"),
        ("fpu avx", "architecture"),
        (None, "architecture"),
    ],
)
def test_the_widest_instruction_set_is_named(tmp_path, monkeypatch, flags, name):
    monkeypatch.setattr(report.platform, "machine", lambda: "architecture")
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: {flags}\n")
    assert report.instruction_set(tmp_path / "cpuinfo") == name
