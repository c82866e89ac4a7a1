"""Everything that needs a GPU, in one call: `make gpu-check`. Results in benchmarks/results/<gpu>.json.

It runs the tests marked `gpu`, 200 steps of the `gpu` preset in bf16 and in fp16, and the benchmarks of the kernel, of
decoding and of a step, ours and the eager baseline, as they are and compiled.
It needs no package beyond requirements.txt. Exit status 0 if all passed.
"""

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from base.errors import BadInput
from benchmarks.report import RESULTS, ROOT
from model import backends
from model.config import GPTConfig
from model.cost import flops_per_token, peak_flops
from run.checkpoint import read_manifest
from run.folder import find
from run.log import read_log

BENCHMARKS = (
    ["gemv"],
    ["decode"],
    ["step", "--preset", "gpu", "--dtype", "bf16", "--compile"],
)
SECONDS = 300  # for one of them, compiling included


def run_tests() -> bool:
    return (
        subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/test_gpu.py"], cwd=ROOT).returncode
        == 0
    )


def train(hardware: backends.Hardware, dtype: str, steps: int, more_flags: list[str]) -> dict:
    """A training run in a process of its own -> a row of results; `failed` holds the exit status of one that failed."""
    case = {"case": f"train/{hardware.device}/{dtype}", "steps": steps}
    with tempfile.TemporaryDirectory() as out:
        flags = ["--device", hardware.device, "--dtype", dtype, "--steps", str(steps), "--out", out, *more_flags]
        status = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT).returncode
        if status:
            return case | {"failed": status}
        rows, manifest = read_log(Path(out) / "log.csv"), read_manifest(find(out))
    peak = peak_flops(hardware.device_name, dtype)
    speed = statistics.median(row.tokens_per_second for row in rows)
    flops = speed * flops_per_token(GPTConfig(**manifest["config"]))
    return case | {
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


def measure(device: str, arguments: list[str]) -> dict:
    """A benchmark in a process of its own -> its JSON line; `failed` says what became of one that gave none."""
    command = [sys.executable, "benchmark.py", *arguments, "--device", device]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"benchmark": arguments[0], "failed": f"longer than {SECONDS} s"}
    print(done.stdout)
    if done.returncode:
        return {"benchmark": arguments[0], "failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.py", description=__doc__)
    parser.add_argument("--device", default="cuda", help="where to train; anything but cuda only tries this script out")
    parser.add_argument("--preset", default="gpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-benchmarks", action="store_true")
    flags = parser.parse_args(argv)
    try:
        hardware = backends.module("torch").hardware(flags.device, "auto", "auto")
    except BadInput as error:
        print(f"gpu_check.py: error: {error}", file=sys.stderr)
        return 2
    tests_passed = None if flags.skip_tests else run_tests()
    more = ["--preset", flags.preset, "--eval-every", "0"]
    rows = [train(hardware, dtype, flags.steps, more) for dtype in ("bf16", "fp16")]
    benchmarks = [] if flags.skip_benchmarks else [measure(flags.device, arguments) for arguments in BENCHMARKS]
    result = {
        "benchmark": "gpu-check",
        "machine": {"device": hardware.device_name, "system": platform.platform()},
        "versions": {"python": platform.python_version()} | backends.versions(),
        "tests_passed": tests_passed,
        "rows": rows,
        "benchmarks": benchmarks,
    }
    flags.results.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", hardware.device_name.lower()).strip("-")
    (flags.results / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if tests_passed is not False and not any("failed" in part for part in rows + benchmarks) else 1


if __name__ == "__main__":
    sys.exit(main())
