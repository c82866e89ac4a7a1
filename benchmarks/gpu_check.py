"""Runs everything that needs a GPU: `make gpu-check`. The result is GPU-NAME.json in the results folder.

It runs the tests marked `gpu`, 200 steps of the `gpu` preset in bf16 and in fp16, and the benchmarks of the
kernel, of decoding and of a step, ours and the eager baseline, as they are and compiled. It needs no package
beyond requirements.txt. Exit status 0 if all passed.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from base.errors import BadInput, run_script
from base.flags import flag, read_flags
from benchmarks.report import ROOT, ReportSettings, finish, results_folder
from model import backends
from model.config import GPTConfig
from model.cost import flops_per_token, peak_flops
from run.checkpoint import read_manifest
from run.folder import find
from run.log import read_log
from settings import PRESETS

BENCHMARKS = (
    ["gemv"],
    ["decode"],
    ["step", "--preset", "gpu", "--dtype", "bf16", "--compile"],
)
SECONDS = 300  # for one of them, compiling included


@dataclass(frozen=True)
class GpuCheckSettings:
    """Flags of `python -m benchmarks.gpu_check`."""

    device: str = flag("cuda", "where to train; anything but cuda only tries this script out")
    preset: str = flag("gpu", "what is trained", tuple(PRESETS))
    steps: int = flag(200, "steps of each run")
    results: str | None = flag(None, "folder of all results; default: minigpt/benchmarks in the user's cache folder")
    skip_tests: bool = flag(False, "leave the tests out")
    skip_benchmarks: bool = flag(False, "leave the benchmarks out")


class Failed(RuntimeError):
    """A part of the check has failed."""


def check(settings: GpuCheckSettings) -> None:
    """Runs all parts and writes their results. Failed where a part has failed."""
    hardware = backends.module("torch").hardware(settings.device, "auto", "auto")
    results = results_folder(ReportSettings(settings.results))
    tests_passed = None if settings.skip_tests else run_tests()
    flags = ["--preset", settings.preset, "--steps", str(settings.steps), "--eval-every", "0"]
    rows = [measure_run(hardware, dtype, flags) for dtype in ("bf16", "fp16")]
    benchmarks = []
    if not settings.skip_benchmarks:
        more_flags = ["--device", settings.device, "--results", str(results.absolute())]
        benchmarks = [measure([*arguments, *more_flags]) for arguments in BENCHMARKS]
    name = re.sub(r"[^a-z0-9]+", "-", hardware.device_name.lower()).strip("-")
    finish(
        "gpu-check",
        rows,
        hardware.device_name,
        ReportSettings(str(results)),
        more={"tests_passed": tests_passed, "benchmarks": benchmarks},
        text="\n".join(f"{row['case']}: {outcome(row)}" for row in rows),
        file_name=f"{name}.json",
    )
    if tests_passed is False or any("failed" in part for part in (*rows, *benchmarks)):
        raise Failed


def run_tests() -> bool:
    """Runs the tests that need a GPU. Returns whether they passed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/test_gpu.py"]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def measure_run(hardware: backends.Hardware, dtype: str, more_flags: list[str]) -> dict:
    """Runs train.py in a process of its own and returns a row; `failed` in it is an exit status other than 0."""
    case = {"case": f"train/{hardware.device}/{dtype}"}
    with tempfile.TemporaryDirectory() as out:
        flags = ["--device", hardware.device, "--dtype", dtype, "--out", out, *more_flags]
        status = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT).returncode
        if status:
            return case | {"failed": status}
        rows = read_log(Path(out) / "log.csv")
        manifest = read_manifest(find(out))
    speed = statistics.median(row.tokens_per_second for row in rows)
    flops = speed * flops_per_token(GPTConfig(**manifest["config"]))
    peak = peak_flops(hardware.device_name, dtype)
    return case | {
        "steps": rows[-1].step,
        "ours": speed,
        "unit": "tok/s",
        "mfu": flops / peak if peak else None,
        "first_loss": rows[0].loss,
        "val": rows[-1].val,
        "skipped": rows[-1].skipped,
        "scale": rows[-1].scale,
        "how": manifest["compute"]["how"],
        "corpus": manifest["corpus"]["name"],
    }


def outcome(row: dict) -> str:
    """Returns a line about a training run."""
    if "failed" in row:
        return f"failed with exit status {row['failed']}"
    return f"{row['ours']:,.0f} {row['unit']}, validation loss {row['val']:.4f}"


def measure(arguments: list[str]) -> dict:
    """Runs a benchmark in a process of its own and returns its JSON line; `failed` says why there is none."""
    command = [sys.executable, "benchmark.py", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"benchmark": arguments[0], "failed": f"longer than {SECONDS} s"}
    print(done.stdout)
    if done.returncode:
        return {"benchmark": arguments[0], "failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def start(argv: list[str]) -> None:
    """Reads the command line and checks. BadInput lists all faults."""
    values, faults = read_flags(GpuCheckSettings, argv, "benchmarks/gpu_check.py", __doc__ or "")
    if faults:
        raise BadInput("\n".join(faults))
    check(GpuCheckSettings(**values))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 something failed, 2 bad input."""
    try:
        return run_script("gpu_check.py", lambda: start(sys.argv[1:] if argv is None else argv))
    except Failed:
        return 1


if __name__ == "__main__":
    sys.exit(main())
