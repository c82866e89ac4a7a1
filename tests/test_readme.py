"""The README says what is there: its map, its flags, its commands, its pictures."""

import re
from pathlib import Path

from amp.policy import TABLE
from benchmarks.decode import DecodeSettings
from benchmarks.gemv import GemvSettings
from benchmarks.precision import PrecisionSettings
from benchmarks.step import StepSettings
from benchmarks.traffic import TrafficSettings
from sample import SampleSettings
from settings import Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUFFIXES = (".py", ".cu", ".cpp", ".h", ".ipynb")


def mapped_files() -> set[str]:
    section = README.split("## Map")[1].split("```")[1]
    files, folder = set(), ""
    for line in section.strip().splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = folder if line.startswith(" ") else name  # of a folder within, the line stands for all its files
        else:
            files.add(folder + name if line.startswith(" ") else name)
    return files


def test_the_map_lists_every_source_file_and_no_other():
    folders = ("", "base/", "data/", "amp/", "model/", "csrc/", "engine/", "optim/", "run/", "watch/")
    folders += ("benchmarks/", "lessons/")
    files = [(folder, path) for folder in folders for path in (ROOT / folder).glob("*.*")]
    there = {f"{folder}{path.name}" for folder, path in files if path.suffix in SUFFIXES}
    assert mapped_files() == {path for path in there if not path.endswith("__init__.py")}


def test_every_source_file_has_a_test_file():
    without = {
        "base/flags.py",
        "base/cache.py",
        "base/files.py",
        "model/backends.py",
        "model/cost.py",
        "model/torch_backend.py",
        "model/numpy_backend.py",
        "model/engine_backend.py",
        "model/generate.py",
        "csrc/bf16_linear.h",
        "csrc/bf16_linear.cu",
        "csrc/bf16_linear_cpu.h",
        "csrc/bf16_linear_cpu.cpp",
        "csrc/bindings.cpp",
        "benchmarks/decode.py",
        "benchmarks/gemv.py",
        "benchmarks/traffic.py",
        "benchmarks/profile.py",
        "benchmarks/step.py",
        "benchmarks/time_to_loss.py",
        "benchmarks/worker.py",
        "benchmarks/gpu_check.py",
    }  # tested through what uses them
    for path in mapped_files() - without:
        name = Path(path).stem
        if path.startswith("engine/"):  # amp/ has an autocast.py, too
            name = f"engine_{name}"
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), path


def test_every_flag_that_is_shown_exists():
    every = (Settings, SampleSettings, GemvSettings, DecodeSettings, StepSettings, PrecisionSettings, TrafficSettings)
    fields = {name for settings in every for name in settings.__dataclass_fields__}
    ours = {f"--{name.replace('_', '-')}" for name in fields} | {"--help"}
    kin = {"--initial-loss-scale", "--hysteresis"}  # Megatron-LM's
    assert set(re.findall(r"--[a-z][a-z-]+", README)) - kin <= ours


def test_every_make_target_that_is_shown_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"make ([a-z-]+)(?=\s+#|`|$)", README, re.MULTILINE)) <= set(targets)


def test_every_link_and_picture_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_the_precision_table_is_that_of_the_policy():
    rows = {row.split("|")[1].strip(): row for row in README.splitlines() if row.startswith("| ")}
    low = rows["linear, matmul, attention's products"]
    assert [TABLE[op].operands for op in ("linear", "matmul", "attention")] == ["low"] * 3
    assert "| 16 bit | fp32 | 16 bit |" in low
    exact = next(row for name, row in rows.items() if name.startswith("softmax"))
    assert {
        TABLE[op].operands for op in ("softmax", "layer_norm", "gelu", "cross_entropy", "residual", "embedding")
    } == {"fp32"}
    assert "| fp32 | fp32 | fp32 | fp32 |" in exact
