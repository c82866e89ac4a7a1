"""A training step of ours against the same GPT as a user would write it: `python benchmark.py step`.

Each side is a process of its own that waits while another works; they take turns in blocks of steps. Before anything is
timed their losses are compared. Baselines (benchmarks/peers/): eager PyTorch with nn.Linear, SDPA, torch.autocast and
AdamW's defaults, and transformers' GPT-2; for `--backend engine` also HIPS autograd, and tinygrad where there is clang.
`--time-to-loss` trains both for real; `--profile` says where a step goes; `--recompute` what recomputation saves.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from base.errors import BadInput
from base.flags import flag, read_flags
from benchmarks import profile, recompute, time_to_loss
from benchmarks.report import ROOT, Row, around, finish, speeds
from benchmarks.worker import config_of
from model import backends
from model.cost import flops_per_token, peak_flops
from settings import PRESETS

DTYPES = ("fp32", "bf16", "fp16")
WARM_UP, CHECKED = 8, 3  # steps


@dataclass(frozen=True)
class StepSettings:
    """Flags of `benchmark.py step`."""

    backend: str = flag("torch", "ours", tuple(backends.MODULES))
    dtype: str = flag("all", "precision of ours and of the eager baseline", ("all", *DTYPES))
    preset: str = flag("cpu", "sizes of the model", tuple(PRESETS))
    batch_size: int | None = flag(None, "rows; default: the preset's")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    compile: bool = flag(False, "also compile both sides")
    blocks: int = flag(7, "blocks of steps, in which the sides take turns")
    seconds: float = flag(1.5, "of a block")
    profile: bool = flag(False, "only show where a step of ours goes, and write a trace")
    time_to_loss: bool = flag(False, "only train both, by their own recipes, and time the way to a validation loss")
    recompute: bool = flag(False, "only measure what --recompute of train.py saves and costs")
    readme: bool = flag(False, "write the table into README.md")


def main(argv: list[str]) -> None:
    values, faults = read_flags(StepSettings, argv, "benchmark.py step", __doc__)
    s = StepSettings(**values)
    if s.blocks < 1:
        faults.append(f"--blocks {s.blocks}: must be at least 1")
    if s.batch_size is not None and s.batch_size < 1:
        faults.append(f"--batch-size {s.batch_size}: must be at least 1")
    if not 0 < s.seconds < 3600:
        faults.append(f"--seconds {s.seconds}: must be above 0 and below an hour")
    if s.profile and s.time_to_loss:
        faults.append("--profile: cannot be combined with --time-to-loss")
    if s.recompute and (s.profile or s.time_to_loss):
        faults.append("--recompute: cannot be combined with --profile or --time-to-loss")
    if s.recompute and s.backend in backends.MODULES:
        faults += backends.refused(s.backend, {"recompute": True}).values()
    if faults:
        raise BadInput("\n".join(faults))
    if s.readme and not s.profile:
        kind = "recompute" if s.recompute else "step"
        around("time-to-loss" if s.time_to_loss else f"{kind}-{s.backend}")
    if s.time_to_loss:
        time_to_loss.main(s)
    elif s.profile:
        profile.main(s)
    elif s.recompute:
        hardware = backends.module(s.backend).hardware(s.device, "auto" if s.dtype == "all" else s.dtype, "auto")
        rows = recompute.rows(s.backend, hardware.dtype, s.preset, s.batch_size, hardware.device, s.blocks)
        finish(f"recompute-{s.backend}", rows, hardware.device_name, s.readme)
    else:
        compare(s)


def compare(s: StepSettings) -> None:
    hardware = backends.module(s.backend).hardware(s.device, "fp32", "auto")
    sides = sides_of(s, hardware.device)
    print(f"device  {hardware.device}: {hardware.device_name}", flush=True)
    workers = {}
    try:
        for name, spec in sides.items():
            workers[name] = start(spec)
        losses = {name: ask(name, worker, CHECKED)["losses"] for name, worker in workers.items()}
        check(losses, {name: spec["dtype"] for name, spec in sides.items()})
        steps = {}
        for name, worker in workers.items():
            warm = statistics.median(ask(name, worker, WARM_UP)["seconds"][-3:])
            steps[name] = max(1, round(s.seconds / warm))
        times = {name: [] for name in workers}
        answers = {}
        for block in range(s.blocks):
            for name in list(workers)[:: 1 if block % 2 == 0 else -1]:
                answers[name] = ask(name, workers[name], steps[name])
                times[name].append(statistics.median(answers[name]["seconds"]))
                print(f"block {block + 1}/{s.blocks}  {name}: {times[name][-1] * 1e3:.1f} ms", file=sys.stderr)
        low = next(name for name in ("ours/fp16", "ours/bf16", "ours/fp32") if name in workers)
        scaler = [seconds * 1e3 for seconds in ask(low, workers[low], steps[low], scaler=True)["scaler_seconds"]]
    finally:
        for worker in workers.values():
            worker.kill()
    rows = rows_of(s, sides, times, answers, scaler)
    finish(f"step-{s.backend}", rows, hardware.device_name, s.readme)


def sides_of(s: StepSettings, device: str) -> dict[str, dict]:
    """What is compared, by name; "ours" first."""
    module, wanted = backends.module(s.backend), DTYPES if s.dtype == "all" else (s.dtype,)
    common = dict(backend=s.backend, preset=s.preset, device=device, emulation="auto", kernel="auto", compiled=False)
    common["batch_size"] = s.batch_size or PRESETS[s.preset]["batch_size"]
    sides = {}
    for dtype in dict.fromkeys(("fp32", *wanted)):  # fp32 is what the low ones are compared with
        sides[f"ours/{dtype}"] = common | dict(side="ours", dtype=dtype)
        native = not module.hardware(device, dtype, "auto").emulated
        if s.backend == "torch" and dtype == "bf16" and native and device == "cpu":  # what most laptops would do
            sides["ours/bf16-emulated"] = common | dict(side="ours", dtype=dtype, emulation="on")
        if s.backend == "torch" and dtype == "bf16":  # what our op costs or gains
            sides["without-op/bf16"] = common | dict(side="ours", dtype=dtype, kernel="off")
    for dtype in wanted if s.backend == "torch" else ("fp32",):
        sides[f"eager/{dtype}"] = common | dict(side="eager", dtype=dtype)
    if "fp32" in wanted and find_spec("transformers"):
        sides["transformers/fp32"] = common | dict(side="transformers_gpt2", dtype="fp32")
    if "fp32" in wanted and s.backend == "engine":
        clang = shutil.which(os.environ.get("CC", "clang"))  # tinygrad's
        for peer in ["autograd", *(["tinygrad"] if clang else [])]:
            if find_spec(peer):
                sides[f"{peer}/fp32"] = common | dict(side=f"{peer}_gpt", dtype="fp32")
    if s.compile:
        for name, spec in list(sides.items()):
            emulated = spec["side"] == "ours" and module.hardware(device, spec["dtype"], spec["emulation"]).emulated
            if not emulated and spec["side"] != "transformers_gpt2":
                sides[f"{name}-compiled"] = spec | dict(compiled=True)
    return sides


def start(spec: dict) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(name: str, worker: subprocess.Popen, steps: int, scaler: bool = False) -> dict:
    try:
        worker.stdin.write(json.dumps({"steps": steps, "scaler": scaler}) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise RuntimeError(f"{name} ended with status {worker.wait()}; what it said is above")
    return json.loads(answer)


def check(losses: dict[str, list[float]], dtypes: dict[str, str]) -> None:
    """All sides start from the same weights: the first loss is the same, later ones differ by AdamW's settings."""
    reference = losses["ours/fp32"]
    for name, own in losses.items():
        first = 1e-5 if dtypes[name] == "fp32" else 2e-3
        for step, (ours, theirs) in enumerate(zip(reference, own, strict=True)):
            if not abs(ours - theirs) <= (first if step == 0 else 2e-2) * ours:
                raise RuntimeError(f"{name}: loss {theirs:.6f} at step {step + 1}, ours in fp32 {ours:.6f}: not timed")


def rows_of(s: StepSettings, sides: dict, times: dict, answers: dict, scaler: list[float]) -> list[Row]:
    spec = sides["ours/fp32"]
    config = config_of(s.preset)
    tokens = spec["batch_size"] * config.block_size
    rows = []
    for ours, spec in sides.items():
        if not ours.startswith("ours/"):
            continue
        label = ours.removeprefix("ours/")
        theirs = [name for name in sides if not name.startswith("ours/") and sides[name]["dtype"] == spec["dtype"]]
        theirs = [name for name in theirs if sides[name]["compiled"] == spec["compiled"]]
        if spec["emulation"] == "on":
            theirs.remove("without-op/bf16")  # which is not emulated
        theirs += ["ours/fp32"] if spec["dtype"] != "fp32" else []
        for name in theirs:
            against = "ours-fp32" if name == "ours/fp32" else name.split("/")[0]
            pair = {"ours": times[ours], against: times[name]}
            rows += speeds(f"step/{s.backend}/{label}", pair, "ours", tokens, "tok/s")
            a, b = answers[ours]["peak_mb"], answers[name]["peak_mb"]
            rows.append(Row(f"memory/{s.backend}/{label}", against, a, b, "MB", b / a, (b / a, b / a)))
        peak = peak_flops(backends.module("torch").hardware(spec["device"], "fp32", "auto").device_name, spec["dtype"])
        if peak:
            rate = tokens / statistics.median(times[ours]) * flops_per_token(config) / 1e12
            share = rate * 1e12 / peak
            rows.append(Row(f"mfu/{s.backend}/{label}", "peak", rate, peak / 1e12, "TFLOP/s", share, (share, share)))
    low = next(name for name in ("ours/fp16", "ours/bf16", "ours/fp32") if name in times)
    step = statistics.median(times[low]) * 1e3
    ratios = [step / ms for ms in scaler]
    ms, dtype = statistics.median(scaler), low.split("/")[1]
    rows.append(Row(f"scaler/{dtype}", "step", ms, step, "ms", step / ms, (min(ratios), max(ratios))))
    return rows
