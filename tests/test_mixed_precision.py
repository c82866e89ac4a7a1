"""lessons/mixed_precision.ipynb: runs from scratch, computes what is committed, and shows what it promises."""

import re
from pathlib import Path

import pytest

nbformat, resource = pytest.importorskip("nbformat"), pytest.importorskip("resource")

ROOT = Path(__file__).resolve().parent.parent
LESSON = ROOT / "lessons" / "mixed_precision.ipynb"
COMMITTED = nbformat.read(LESSON, as_version=4)
TRAINS = "trains"  # a cell with this tag trains: its last digits may differ from CPU to CPU
FIGURES = ("65504", "6.10e-05", "9.77e-04", "3.4028e+38", "7.81e-03", "70144", "inf")
FIGURES += ("fp16, scale    1: 2 of 4 lost", "fp16, scale 1024: 0 of 4 lost", "bf16, scale    1: 0 of 4 lost")
FIGURES += ("doubled", "overflow: step skipped, halved", "gradients are zero", "bf16 1.0000, fp32 master 0.9000")


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def check(notebook) -> None:
    """Every cell ran once, in order; nothing went wrong; what the lesson is about is in its output."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []  # no warnings
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    text = "".join(map(text_of, cells))
    assert [figure for figure in FIGURES if figure not in text] == []
    assert text.count("True\n") == 3  # our figures are torch.finfo's
    counted = re.findall(
        r" ([\d.]+) +([\d.]+)$", text_of(next(c for c in cells if "counted" in c.source)), re.MULTILINE
    )
    assert len(counted) >= 10
    assert all(computed == measured for computed, measured in counted)


def test_the_committed_lesson_is_whole_and_small():
    check(COMMITTED)
    assert LESSON.stat().st_size < 600_000
    assert not re.search(r"/(home|root|tmp|Users|work)/", LESSON.read_text(encoding="utf-8"))


def test_cells_are_short_and_links_lead_somewhere():
    for cell in code_cells(COMMITTED):
        lines = [line for line in cell.source.splitlines() if line and "import " not in line]
        assert len(lines) <= 13, lines[0]
    assert not re.search(r"^[%!]", "\n".join(cell.source for cell in code_cells(COMMITTED)), re.MULTILINE)
    text = "\n".join(cell.source for cell in COMMITTED.cells if cell.cell_type == "markdown")
    assert all((LESSON.parent / target).is_file() for target in re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["lessons", "."])
def test_the_lesson_runs_from_scratch(folder, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # nobody's own settings
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(LESSON, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(ROOT / folder)}}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    nbclient.NotebookClient(notebook, timeout=300, resources=where, coalesce_streams=True).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    check(notebook)
    assert after.ru_utime - before.ru_utime < 90  # on the one thread that conftest.py leaves, whatever else is running
    for cell, committed in zip(code_cells(notebook), code_cells(COMMITTED), strict=True):
        if TRAINS not in cell.metadata.get("tags", ()):
            assert text_of(cell) == text_of(committed), f"not what is committed: {cell.source}"
