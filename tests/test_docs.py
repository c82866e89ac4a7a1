"""README.md and docs/ say what is there: files, flags, commands, pictures, tables, numbers."""

import json
import re
import shlex
from pathlib import Path

import pytest

from amp.policy import TABLE
from base.flags import read_flags
from benchmarks.decode import DecodeSettings
from benchmarks.gemv import GemvSettings
from benchmarks.precision import PrecisionSettings
from benchmarks.report import Row, table
from benchmarks.step import StepSettings
from benchmarks.traffic import TrafficSettings
from sample import SampleSettings
from settings import PRESETS, Settings

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (README, *DOCS)}
EVERYTHING = "\n".join(TEXTS.values())
SETTINGS = {
    "train.py": Settings,
    "sample.py": SampleSettings,
    "benchmark.py gemv": GemvSettings,
    "benchmark.py decode": DecodeSettings,
    "benchmark.py step": StepSettings,
    "benchmark.py precision": PrecisionSettings,
    "benchmark.py traffic": TrafficSettings,
}
each_text = pytest.mark.parametrize("name", TEXTS)

# ---- the map

SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".ipynb")
ROOMS = ("", "base", "data", "amp", "model", "csrc", "engine", "optim", "run", "watch", "benchmarks", "lessons")
WHOLE_FOLDERS = (
    "csrc/cuda_on_cpu",
    "benchmarks/peers",
    "benchmarks/results",
    "docs",
    "tests",
)  # a line for each at most

# Files without a test file of their own, and the one that tests them.
TESTED_IN = {
    "watch/words.py": "test_train.py",
    "run/due.py": "test_train.py",
    "base/files.py": "test_checkpoint.py",
    "base/dtypes.py": "test_settings.py",
    "model/cost.py": "test_config.py",
    "model/torch_backend.py": "test_minigpt.py",
    "model/numpy_backend.py": "test_numpy_gpt.py",
    "model/engine_backend.py": "test_engine_gpt.py",
    "model/generate.py": "test_sample.py",
    "csrc/bf16_linear.cu": "test_cuda_on_cpu.py",
    "csrc/bf16_linear_vectors.cuh": "test_cuda_on_cpu.py",
    "csrc/bf16_linear_tiles.cuh": "test_cuda_changes.py",
    "csrc/bf16_linear_numbers.cuh": "test_cuda_on_cpu.py",
    "csrc/bf16_linear.h": "test_cuda_on_cpu.py",
    "csrc/bf16_linear_cpu.cpp": "test_bf16_linear.py",
    "csrc/bf16_linear_cpu.h": "test_bf16_linear.py",
    "csrc/bindings.cpp": "test_bf16_linear.py",
    "benchmarks/decode.py": "test_benchmark.py",
    "benchmarks/gemv.py": "test_benchmark.py",
    "benchmarks/traffic.py": "test_benchmark.py",
    "benchmarks/profile.py": "test_benchmark.py",
    "benchmarks/step.py": "test_benchmark.py",
    "benchmarks/time_to_loss.py": "test_benchmark.py",
    "benchmarks/worker.py": "test_benchmark.py",
    "benchmarks/gpu_check.py": "test_train.py",
}


def mapped() -> list[str]:
    """The paths in the README's map; folders end with "/"."""
    paths, room = [], ""
    for line in TEXTS["README.md"].split("## Map")[1].split("```")[1].strip().splitlines():
        name, *about = line.split()
        if not line.startswith(" "):
            room = name if name.endswith("/") else ""
        if about:
            paths.append(name if name == room else room + name if line.startswith(" ") else name)
    return paths


def test_the_map_lists_every_source_file_and_no_other():
    there = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).iterdir()
        if path.suffix in SOURCES
    }
    files = [path for path in mapped() if not path.endswith("/")]
    assert len(files) == len(set(files))
    assert set(files) == {path for path in there if not path.endswith("__init__.py")}


def test_every_folder_with_source_files_is_in_the_map():
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if not is_hidden(path)}
    assert folders - {"."} <= {*ROOMS, *WHOLE_FOLDERS}
    assert {path.strip("/") for path in mapped() if path.endswith("/")} <= set(WHOLE_FOLDERS)


def is_hidden(path: Path) -> bool:
    """Whether a part of the path below the root begins with a dot, as that of an environment does."""
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)


def imports(test_file: Path, path: str) -> bool:
    """Whether a test file exists and imports the module at `path`."""
    if not test_file.is_file() or not path.endswith(".py"):
        return False
    text, (package, _, module) = test_file.read_text(encoding="utf-8"), path[:-3].replace("/", ".").rpartition(".")
    names = re.findall(rf"from {package} import (\([^)]*\)|.*)", text) if package else []
    whole = f"{package}.{module}" if package else module
    return bool(re.search(rf"\b{module}\b", " ".join(names)) or re.search(rf"(from|import) {whole}\b", text))


def test_every_source_file_has_a_test_file_of_its_name_or_is_tested_in_another():
    for path in (path for path in mapped() if not path.endswith("/")):
        room, name = path.startswith("engine/") * "engine_", Path(path).stem  # amp/ has an autocast.py, too
        own = ROOT / "tests" / f"test_{room}{name}.py"
        if path in TESTED_IN:
            assert (ROOT / "tests" / TESTED_IN[path]).is_file(), path
            assert not imports(own, path), f"{path} needs no line in TESTED_IN any more"
        else:
            assert own.is_file(), path
    assert set(TESTED_IN) <= set(mapped())


def test_the_path_of_one_step_has_the_length_that_the_readme_says():
    said = int(re.search(r"about ([\d,]+)\s+lines", TEXTS["README.md"])[1].replace(",", ""))
    path = ["train.py", "settings.py", "data/batches.py", "model/minigpt.py"]
    files = [ROOT / name for name in path] + sorted((ROOT / "amp").glob("*.py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(lines - said) <= 0.1 * lines, f"{lines} lines"
    for name in path:
        assert f"[{name}]({name})" in TEXTS["README.md"].split("##")[0], name


def test_the_readme_stays_short():
    assert len(TEXTS["README.md"].splitlines()) <= 250


# ---- names: flags, commands, make targets, files


def test_every_flag_that_is_shown_exists():
    fields = {name for settings in SETTINGS.values() for name in settings.__dataclass_fields__}
    ours = {f"--{name.replace('_', '-')}" for name in fields} | {"--help"}
    relatives = {"--initial-loss-scale", "--hysteresis"}  # Megatron-LM's
    assert set(re.findall(r"--[a-z][a-z0-9-]+", EVERYTHING)) - relatives <= ours


def commands() -> list[str]:
    """What follows `.venv/bin/python` in commands for the three scripts."""
    shown = re.findall(r"\.venv/bin/python ((?:train|sample|benchmark)\.py[^`#\n|]*)", EVERYTHING)
    return list(dict.fromkeys(command.strip() for command in shown))


@pytest.mark.parametrize("command", commands())
def test_every_command_that_is_shown_is_understood(command):
    script = next((script for script in SETTINGS if f"{command} ".startswith(f"{script} ")), None)
    assert script, "no such script"
    flags = [word for word in shlex.split(command.removeprefix(script)) if word != "--help"]
    assert read_flags(SETTINGS[script], flags, script, "")[1] == []


def test_the_commands_are_found():
    assert len(commands()) > 20
    assert {script for script in SETTINGS if any(command.startswith(script) for command in commands())} == {*SETTINGS}


def test_every_preset_that_is_listed_is_one_and_all_are_listed():
    rows = re.findall(r"^\| `(\w+)` \| (\d+), (\d+), (\d+), (\d+) \|", TEXTS["docs/training.md"], re.MULTILINE)
    sizes = {name: tuple(map(int, numbers)) for name, *numbers in rows}
    assert sizes == {
        name: tuple(preset[size] for size in ("n_layer", "n_head", "n_embd", "block_size"))
        for name, preset in PRESETS.items()
    }


def test_every_make_target_that_is_shown_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = re.findall(r"(?:`|^)make ([a-z-]+)(?=\s+#|`|$)", EVERYTHING, re.MULTILINE)
    assert {"train", "test", "lint"} <= set(shown) <= set(targets)


def test_every_file_that_is_named_exists():
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file() and not is_hidden(path)}
    names = {Path(path).name for path in there}
    for path in re.findall(r"[\w./-]+\.(?:py|cu|cuh|cpp|h|ipynb|md)\b", EVERYTHING):
        found = path.removeprefix("../")
        assert found in there or ("/" not in found and found in names), path


@each_text
def test_every_link_leads_somewhere(name):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", TEXTS[name]):
        file = (ROOT / name).parent / target if target else ROOT / name
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                anchor
            )


def test_every_page_is_linked_from_the_readme():
    assert [path for path in TEXTS if path != "README.md" and f"]({path})" not in TEXTS["README.md"]] == []


# ---- tables


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_short_precision_table_is_that_of_the_policy():
    rows = {cells(line)[0]: cells(line)[1:] for line in TEXTS["README.md"].splitlines() if line.startswith("| ")}
    products = rows["linear, matmul, attention's products"]
    assert products[:3] == ["16 bit", "fp32", "16 bit"]
    assert products[3].startswith("16 bit")
    for operation in ("linear", "matmul", "attention"):
        assert TABLE[operation] == ("low", "fp32", "low", "low", "low")
    assert rows["softmax, LayerNorm, inside of GELU, cross-entropy, residual, embedding"] == ["fp32"] * 4
    for operation in ("softmax", "layer_norm", "gelu", "cross_entropy", "residual", "embedding", "optimizer"):
        assert set(TABLE[operation]) == {"fp32"}


def test_the_full_precision_table_is_that_of_the_policy():
    section = TEXTS["docs/precision.md"].split("## The table")[1].split("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == [[operation, *rule] for operation, rule in TABLE.items()]


def results() -> dict[str, dict]:
    """What is kept in benchmarks/results/ of each benchmark that writes a table."""
    kept = (json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks" / "results").glob("*.json"))
    return {result["benchmark"]: result for result in kept if result.get("benchmark", "gpu-check") != "gpu-check"}


def test_every_benchmark_has_one_place_for_its_table_and_no_marker_is_alone():
    begins = re.findall(r"^<!-- ([a-z-]+) -->$", EVERYTHING, re.MULTILINE)
    ends = re.findall(r"^<!-- /([a-z-]+) -->$", EVERYTHING, re.MULTILINE)
    assert begins == ends
    assert sorted(begins) == sorted(results())
    assert EVERYTHING.count("<!--") == 2 * len(begins)


@pytest.mark.parametrize(
    "name", ["step-torch", "step-numpy", "step-engine", "recompute-engine", "decode", "time-to-loss"]
)
def test_a_table_is_that_of_the_kept_result(name):
    shown = EVERYTHING.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    assert table([Row(**row) for row in results()[name]["rows"]]) in shown
    assert results()[name]["machine"]["device"] in shown


def test_the_results_in_the_readme_are_kept_results():
    section = TEXTS["README.md"].split("## Results")[1].split("\n## ")[0]
    kept = {
        (row["case"], row["against"]): Row(**row)
        for r in results().values()
        if "step" in r["benchmark"]
        for row in r["rows"]
    }
    kept |= {(row["case"], row["against"]): Row(**row) for row in results()["decode"]["rows"]}
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    for _, *shown, case in rows:
        row = kept[tuple(re.fullmatch(r"`(\S+)` against `(\S+)`", case).groups())]
        assert shown == cells(table([row]).splitlines()[-1])[2:], case
