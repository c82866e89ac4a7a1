"""What every benchmark shares: timing in turns, rows and their table, and the one place that writes results."""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from base.cache import cache_folder
from base.errors import BadInput
from base.flags import flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "benchmarks" / "results"  # written with --readme alone

Times = dict[str, list[float]]  # seconds of a call: {function: [block]}


@dataclass(frozen=True)
class ReportSettings:
    """Flags of every benchmark: where its result goes."""

    results: str | None = flag(None, "folder of the result; default: minigpt/benchmarks in the user's cache folder")
    readme: bool = flag(False, "also write benchmarks/results/ and the table in README.md or docs/")


class Row(NamedTuple):
    """One comparison. A `ratio` above 1 means that ours is better, whatever the unit.

    `ratio` is the median of the ratios of blocks that followed each other, and `spread` the range of these
    ratios. The ratio is therefore not the quotient of the two medians `ours` and `theirs`.
    """

    case: str  # "gemv/cpu/bf16/768x3072"
    against: str  # the baseline: "fp32", "eager", "bandwidth"
    ours: float
    theirs: float
    unit: str
    ratio: float
    spread: tuple[float, float]


# ---- timing


def time_in_turns(functions: dict[str, Callable[[], object]], blocks: int = 7, at_least: float = 0.05) -> Times:
    """Returns the median seconds of a call in each of `blocks` blocks, for each function.

    After a warm-up the functions take turns, in an order that is reversed from block to block. A block
    repeats its function for `at_least` seconds, and three times at the least. A function waits for its own
    device.
    """
    for function in functions.values():
        for _ in range(3):
            function()
    times: Times = {name: [] for name in functions}
    for block in range(blocks):
        for name in list(functions)[:: 1 if block % 2 == 0 else -1]:
            calls = []
            began = time.perf_counter()
            while len(calls) < 3 or time.perf_counter() - began < at_least:
                start = time.perf_counter()
                functions[name]()
                calls.append(time.perf_counter() - start)
            times[name].append(statistics.median(calls))
    return times


# ---- rows and their table


def share_row(case: str, ours: list[float], limit: float, against: str, unit: str) -> Row:
    """Returns a row for the share that each block reached of a limit, which was measured once."""
    median = statistics.median(ours)
    return Row(case, against, median, limit, unit, median / limit, (min(ours) / limit, max(ours) / limit))


def speed_rows(case: str, times: Times, ours: str, work: float, unit: str) -> list[Row]:
    """Returns a row against every other function. A speed is `work` per second, a ratio is taken in each block."""
    rows = []
    for name, theirs in times.items():
        if name != ours:
            ratios = [b / a for a, b in zip(times[ours], theirs, strict=True)]
            speeds = (work / statistics.median(times[ours]), work / statistics.median(theirs))
            rows.append(Row(case, name, *speeds, unit, statistics.median(ratios), (min(ratios), max(ratios))))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a Markdown table, for the terminal and the docs."""
    lines = ["| case | against | ours | theirs | ratio | spread |", "|---|---|---|---|---|---|"]
    for row in rows:
        ours, theirs = (f"{_three_digits(value)} {row.unit}" for value in (row.ours, row.theirs))
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}"
        lines.append(f"| {row.case} | {row.against} | {ours} | {theirs} | **{row.ratio:.2f}** | {spread} |")
    return "\n".join(lines)


def _three_digits(value: float) -> str:
    """Returns a number in three significant digits, without an exponent."""
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


# ---- results


def finish(
    name: str,
    rows: Sequence[Row | dict],
    device_name: str,
    settings: ReportSettings,
    *,
    more: dict | None = None,
    text: str = "",
    pictures: "dict[str, Figure] | None" = None,
    kept: dict[str, dict] | None = None,
    file_name: str = "",
) -> None:
    """Prints the table, writes the result, and prints it as one line of JSON, which comes last.

    rows: Row, or any dicts where `text` has a table of their own. more: further keys of the JSON object.
    pictures: {file name: figure}. kept: {file name: keys to set in that JSON file}. file_name: NAME.json by
    default. The files go to the user's own folder; --readme also writes benchmarks/results/ and the table in
    README.md or docs/.
    """
    text = text or table([row for row in rows if isinstance(row, Row)])
    result = {
        "benchmark": name,
        "machine": {
            "device": device_name,
            "instruction_set": instruction_set(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | versions(),
        "rows": [row._asdict() if isinstance(row, Row) else row for row in rows],
    } | (more or {})
    print(text)
    for folder in (results_folder(settings), *([COMMITTED] if settings.readme else [])):
        path = folder / (file_name or f"{name}.json")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            for file, keys in (kept or {}).items():
                set_keys(folder / file, keys)
            for file, figure in (pictures or {}).items():
                figure.savefig(folder / file, dpi=110)
            print(f"saved   {path}")
        except OSError as error:
            print(f"note    {folder}: cannot be written ({error.strerror}): the result is not kept there")
    if settings.readme:
        write_table(name, f"{about_machine(device_name)}:\n\n{text}")
    print(json.dumps(result))


def results_folder(settings: ReportSettings) -> Path:
    """Returns the folder that takes the result: --results, else one in the user's cache folder."""
    return Path(settings.results) if settings.results else cache_folder() / "benchmarks"


def set_keys(path: Path, keys: dict) -> None:
    """Sets keys of a JSON file. Its other keys stay."""
    content = {}
    if path.exists():
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            print(f"note    {path} held no JSON object and is written anew")
    path.write_text(json.dumps(content | keys, indent=2) + "\n", encoding="utf-8")


# ---- the machine


def about_machine(device_name: str) -> str:
    """Returns the line above a table: device, the CPU's instruction set, versions."""
    libraries = (f"{library} {version}" for library, version in versions().items())
    return ", ".join([device_name, f"CPU with {instruction_set()}", *libraries])


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the widest vector instructions of an x86 CPU under Linux; elsewhere its architecture ("arm64")."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    flags = next((line.split(":")[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    widest_first = {"avx512_bf16": "AVX-512 with BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for known, name in widest_first.items() if known in flags), platform.machine())


def versions() -> dict[str, str]:
    """Returns the versions of the array libraries that are installed, loaded by this process or not."""
    return {name: metadata.version(name) for name in ("numpy", "torch") if find_spec(name)}


# ---- tables in README.md and docs/


def find_table(name: str) -> tuple[Path, str, str]:
    """Returns the file that has a place for a table, its text before and its text after, markers included.

    A benchmark asks before it measures, since minutes of work could find no place. BadInput where README.md
    and docs/ together do not have each marker exactly once, the first before the last.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pages = (*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md")))
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    places = [path for path, text in texts.items() if begin in text or end in text]
    if len(places) == 1:
        (path,) = places
        before, *middle = texts[path].split(begin)
        if len(middle) == 1 and middle[0].count(end) == 1 and end not in before:
            return path, before + begin, end + middle[0].split(end)[1]
    raise BadInput(f"--readme: README.md and docs/ need one place for this table: a line {begin} and after it {end}")


def write_table(name: str, text: str) -> None:
    """Replaces what stands between <!-- name --> and <!-- /name --> in README.md or docs/."""
    path, before, after = find_table(name)
    path.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
