"""What every benchmark shares: paired timing, rows, the table, the JSON line, the README's markers."""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from base.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Times = dict[str, list[float]]  # seconds of a call: {function: [block]}


class Row(NamedTuple):
    """One comparison. `ratio` above 1: ours is better, whatever the unit; `spread`: the range of the paired ratios."""

    case: str  # "gemv/cpu/bf16/768x3072"
    against: str  # the baseline: "fp32", "eager", "bandwidth"
    ours: float
    theirs: float
    unit: str
    ratio: float
    spread: tuple[float, float]


def seconds(functions: dict[str, Callable[[], object]], blocks: int = 7, at_least: float = 0.05) -> Times:
    """Median seconds of a call in each of `blocks` blocks, for each function.

    After a warm-up the functions take turns, in an order that is reversed from block to block. A block repeats its
    function for `at_least` seconds, three times at the least. A function waits for its own device.
    """
    for function in functions.values():
        for _ in range(3):
            function()
    times: Times = {name: [] for name in functions}
    for block in range(blocks):
        for name in list(functions)[:: 1 if block % 2 == 0 else -1]:
            calls, began = [], time.perf_counter()
            while len(calls) < 3 or time.perf_counter() - began < at_least:
                start = time.perf_counter()
                functions[name]()
                calls.append(time.perf_counter() - start)
            times[name].append(statistics.median(calls))
    return times


def share(case: str, ours: list[float], whole: float, against: str, unit: str) -> Row:
    """A row for what each block reached of a limit that was measured once."""
    middle = statistics.median(ours)
    return Row(case, against, middle, whole, unit, middle / whole, (min(ours) / whole, max(ours) / whole))


def speeds(case: str, times: Times, ours: str, work: float, unit: str) -> list[Row]:
    """A row against every other function; the speed is `work` per second of a block, paired block by block."""
    rows = []
    for name, theirs in times.items():
        if name != ours:
            ratios = [b / a for a, b in zip(times[ours], theirs, strict=True)]
            medians = (work / statistics.median(times[ours]), work / statistics.median(theirs))
            rows.append(Row(case, name, *medians, unit, statistics.median(ratios), (min(ratios), max(ratios))))
    return rows


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table, for the terminal and the README."""
    lines = ["| case | against | ours | theirs | ratio | spread |", "|---|---|---|---|---|---|"]
    for row in rows:
        ours, theirs = (f"{_digits(value)} {row.unit}" for value in (row.ours, row.theirs))
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}"
        lines.append(f"| {row.case} | {row.against} | {ours} | {theirs} | **{row.ratio:.2f}** | {spread} |")
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def finish(name: str, rows: list, device_name: str, readme: bool, more: dict | None = None, text: str = "") -> None:
    """Prints the table, keeps the result in benchmarks/results/, writes the README if asked; last is the JSON line.

    rows: Row, or with a table of their own in `text` any dicts.
    """
    text = text or table(rows)
    result = {
        "benchmark": name,
        "machine": {"device": device_name, "system": platform.platform()},
        "versions": {"python": platform.python_version()} | versions(),
        "rows": [row._asdict() if isinstance(row, Row) else row for row in rows],
    } | (more or {})
    print(text)
    try:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"note    {RESULTS / name}.json could not be written ({error.strerror})")
    if readme:
        write_readme(name, f"{device_name}, {', '.join(f'{n} {v}' for n, v in versions().items())}:\n\n{text}")
    print(json.dumps(result))


def versions() -> dict[str, str]:
    """Of the array libraries that are installed: a side may be a process of its own, so nothing need be loaded here."""
    return {name: metadata.version(name) for name in ("numpy", "torch") if find_spec(name)}


def keep(name: str, values: dict) -> None:
    """Sets keys of a JSON file in benchmarks/results/; its other keys stay."""
    path, kept = RESULTS / name, {}
    if path.exists():
        try:
            kept = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            print(f"note    {path} held no JSON object and is written anew")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept | values, indent=2) + "\n", encoding="utf-8")


def keep_picture(draw: Callable[..., None], *arguments) -> None:
    """Draws; a folder that cannot be written is a note, and what was measured is still told."""
    try:
        draw(*arguments)
    except OSError as error:
        print(f"note    no picture: {error}")


def around(name: str, path: Path = ROOT / "README.md") -> tuple[str, str]:
    """What stands before and after the place of a table, markers included. BadInput where they are missing.

    A benchmark asks before it measures, or minutes of work could find no place.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    readme = path.read_text(encoding="utf-8") if path.is_file() else ""
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise BadInput(f"--readme: {path.name} has no {begin} … {end} to write between")
    return readme.split(begin)[0] + begin, end + readme.split(end)[1]


def write_readme(name: str, text: str, path: Path = ROOT / "README.md") -> None:
    """Replaces what stands between <!-- name --> and <!-- /name -->."""
    before, after = around(name, path)
    path.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
