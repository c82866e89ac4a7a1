"""A training step of ours against the same GPT as a user would write it: `python benchmark.py step`.

Each side is a process of its own that waits while another works. The sides take turns in blocks of steps.
Their losses are compared before anything is timed. Baselines (benchmarks/peers/): eager PyTorch with
nn.Linear, SDPA, torch.autocast and AdamW's defaults, and transformers' GPT-2; for `--backend engine` also
HIPS autograd, and tinygrad where there is clang. `--time-to-loss` trains both sides for real, `--profile`
says where the time of a step goes, and `--recompute` measures what recomputation saves and costs.
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
from base.flags import flag, name_of, out_of_bounds, read_flags
from benchmarks import profile, recompute, time_to_loss
from benchmarks.report import ROOT, ReportSettings, Row, Times, find_table, finish, speed_rows
from benchmarks.worker import config_of, settings_of
from model import backends
from model.cost import flops_per_token, peak_flops
from settings import PRESETS

DTYPES = ("fp32", "bf16", "fp16")
WARM_UP = 8  # steps
CHECKED = 3  # steps whose losses are compared
ALONE = {  # flags that measure something else -> the flags that say nothing there
    "profile": ("blocks", "seconds", "readme", "time_to_loss", "recompute"),
    "time_to_loss": ("preset", "batch_size", "device", "compile", "blocks", "seconds", "recompute"),
    "recompute": ("compile", "seconds"),
}

Side = dict  # the SPEC of benchmarks/worker.py
Sides = dict[str, Side]  # "ours/bf16", "eager/fp32", … -> the side


@dataclass(frozen=True)
class StepSettings(ReportSettings):
    """Flags of `benchmark.py step`."""

    backend: str = flag("torch", "ours", tuple(backends.MODULES))
    dtype: str = flag("all", "precision of ours and of the eager baseline", ("all", *DTYPES))
    preset: str = flag("cpu", "sizes of the model", tuple(PRESETS))
    batch_size: int | None = flag(None, "rows; default: the preset's", at_least=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    compile: bool = flag(False, "also compile both sides")
    blocks: int = flag(7, "blocks of steps, in which the sides take turns", at_least=1)
    seconds: float = flag(1.5, "seconds of a block", above=0, below=3600)
    profile: bool = flag(False, "only show where a step of ours goes, and write a trace")
    time_to_loss: bool = flag(False, "only train both, by their own recipes, and time the way to a validation loss")
    recompute: bool = flag(False, "only measure what --recompute of train.py saves and costs")


def main(argv: list[str]) -> None:
    """Measures what the command line asks for. BadInput lists all its faults."""
    values, faults = read_flags(StepSettings, argv, "benchmark.py step", __doc__ or "")
    settings = StepSettings(**values)
    faults += out_of_bounds(settings)
    for alone, others in ALONE.items():
        if alone in values:
            faults += [f"{name_of(alone)}: cannot be combined with {name_of(f)}" for f in others if f in values]
    if settings.recompute and settings.backend in backends.MODULES:
        faults += backends.refused(settings.backend, {"recompute": True}).values()
    if faults:
        raise BadInput("\n".join(faults))
    if settings.time_to_loss:
        time_to_loss.compare(settings)
    elif settings.profile or settings.recompute:
        measure_ours(settings)
    else:
        compare(settings)


def measure_ours(settings: StepSettings) -> None:
    """--profile and --recompute: a step of ours in this process."""
    name = f"recompute-{settings.backend}"
    if settings.readme:
        find_table(name)
    by_default = "auto" if settings.recompute else "fp32"
    dtype = by_default if settings.dtype == "all" else settings.dtype
    hardware = backends.module(settings.backend).hardware(settings.device, dtype, "auto")
    print(f"device  {hardware.device}: {hardware.device_name}\ndtype   {hardware.dtype}: {hardware.how}", flush=True)
    side = side_of(settings, hardware.device) | {"dtype": hardware.dtype, "compiled": settings.compile}
    if settings.profile:
        profile.profile(settings_of(side), settings)
    else:
        finish(name, recompute.compare(settings_of(side), settings.blocks), hardware.device_name, settings)


def compare(settings: StepSettings) -> None:
    """Times all sides in turns, after a check of their losses."""
    name = f"step-{settings.backend}"
    if settings.readme:
        find_table(name)
    hardware = backends.module(settings.backend).hardware(settings.device, "fp32", "auto")
    sides = sides_of(settings, hardware.device)
    print(f"device  {hardware.device}: {hardware.device_name}", flush=True)
    workers = {}
    try:
        for side, spec in sides.items():
            workers[side] = start(spec)
        losses = {side: ask(side, worker, CHECKED)["losses"] for side, worker in workers.items()}
        check(losses, {side: spec["dtype"] for side, spec in sides.items()})
        steps = {}
        for side, worker in workers.items():
            warm = statistics.median(ask(side, worker, WARM_UP)["seconds"][-3:])
            steps[side] = max(1, round(settings.seconds / warm))
        times: Times = {side: [] for side in workers}
        peaks = {}
        for block in range(settings.blocks):
            for side in list(workers)[:: 1 if block % 2 == 0 else -1]:
                answer = ask(side, workers[side], steps[side])
                times[side].append(statistics.median(answer["seconds"]))
                peaks[side] = answer["peak_mb"]
                print(f"block {block + 1}/{settings.blocks}  {side}: {times[side][-1] * 1e3:.1f} ms", file=sys.stderr)
        scaled = next(side for side in ("ours/fp16", "ours/bf16", "ours/fp32") if side in workers)
        scaler_seconds = ask(scaled, workers[scaled], steps[scaled], scaler=True)["scaler_seconds"]
    finally:
        for worker in workers.values():
            worker.kill()
    rows = rows_of(settings, sides, times, peaks)
    rows.append(scaler_row(scaled, times[scaled], scaler_seconds))
    finish(name, rows, hardware.device_name, settings)


def side_of(settings: StepSettings, device: str) -> Side:
    """Returns our side in fp32."""
    return {
        "side": "ours",
        "backend": settings.backend,
        "dtype": "fp32",
        "emulation": "auto",
        "kernel": "auto",
        "preset": settings.preset,
        "batch_size": settings.batch_size or PRESETS[settings.preset]["batch_size"],
        "device": device,
        "compiled": False,
    }


def sides_of(settings: StepSettings, device: str) -> Sides:
    """Returns what is compared, by name. Our fp32 step is always there: low precisions are compared with it."""
    module = backends.module(settings.backend)
    wanted = DTYPES if settings.dtype == "all" else (settings.dtype,)
    ours = side_of(settings, device)
    sides: Sides = {}
    for dtype in dict.fromkeys(("fp32", *wanted)):
        sides[f"ours/{dtype}"] = ours | {"dtype": dtype}
        if settings.backend == "torch" and dtype == "bf16":
            native = not module.hardware(device, dtype, "auto").emulated
            if native and device == "cpu":  # what most laptops would do
                sides["ours/bf16-emulated"] = ours | {"dtype": dtype, "emulation": "on"}
            sides["without-op/bf16"] = ours | {"dtype": dtype, "kernel": "off"}  # what our op costs or gains
    for dtype in wanted if settings.backend == "torch" else ("fp32",):
        sides[f"eager/{dtype}"] = ours | {"side": "eager", "dtype": dtype}
    if "fp32" in wanted and find_spec("transformers"):
        sides["transformers/fp32"] = ours | {"side": "transformers_gpt2"}
    if "fp32" in wanted and settings.backend == "engine":
        has_clang = shutil.which(os.environ.get("CC", "clang"))  # which tinygrad compiles with
        for peer in ("autograd", "tinygrad") if has_clang else ("autograd",):
            if find_spec(peer):
                sides[f"{peer}/fp32"] = ours | {"side": f"{peer}_gpt"}
    if settings.compile:
        for name, side in list(sides.items()):
            emulated = side["side"] == "ours" and module.hardware(device, side["dtype"], side["emulation"]).emulated
            if not emulated and side["side"] != "transformers_gpt2":
                sides[f"{name}-compiled"] = side | {"compiled": True}
    return sides


def start(spec: Side) -> subprocess.Popen:
    """Starts one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(name: str, worker: subprocess.Popen, steps: int, scaler: bool = False) -> dict:
    """Lets one side take steps and returns its answer. RuntimeError where its process has ended."""
    assert worker.stdin
    assert worker.stdout
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
    """Compares the losses of all sides. RuntimeError where one computes something else.

    All sides start from the same weights, so the first loss is the same. Later ones differ by AdamW's
    settings.
    """
    for name, theirs in losses.items():
        allowed = 1e-5 if dtypes[name] == "fp32" else 2e-3
        for step, (ours, loss) in enumerate(zip(losses["ours/fp32"], theirs, strict=True)):
            if not abs(ours - loss) <= (allowed if step == 0 else 2e-2) * ours:
                raise RuntimeError(f"{name}: loss {loss:.6f} at step {step + 1}, ours in fp32 {ours:.6f}: not timed")


def rows_of(settings: StepSettings, sides: Sides, times: Times, peaks: dict[str, float]) -> list[Row]:
    """Returns speed and memory of each of our sides against its baselines, and its MFU where the peak is known."""
    config = config_of(settings.preset)
    tokens = sides["ours/fp32"]["batch_size"] * config.block_size
    rows = []
    for ours, side in sides.items():
        if not ours.startswith("ours/"):
            continue
        label = ours.removeprefix("ours/")
        for name in baselines_of(ours, sides):
            against = "ours-fp32" if name == "ours/fp32" else name.split("/")[0]
            pair = {"ours": times[ours], against: times[name]}
            rows += speed_rows(f"step/{settings.backend}/{label}", pair, "ours", tokens, "tok/s")
            smaller = peaks[name] / peaks[ours]
            memory = f"memory/{settings.backend}/{label}"
            rows.append(Row(memory, against, peaks[ours], peaks[name], "MB", smaller, (smaller, smaller)))
        device_name = backends.module("torch").hardware(side["device"], "fp32", "auto").device_name
        if peak := peak_flops(device_name, side["dtype"]):
            flops = tokens / statistics.median(times[ours]) * flops_per_token(config)
            mfu = f"mfu/{settings.backend}/{label}"
            rows.append(Row(mfu, "peak", flops / 1e12, peak / 1e12, "TFLOP/s", flops / peak, (flops / peak,) * 2))
    return rows


def baselines_of(ours: str, sides: Sides) -> list[str]:
    """Returns the sides that one of ours is compared with: those of its precision, and our fp32 step."""
    side = sides[ours]
    names = [name for name in sides if not name.startswith("ours/") and sides[name]["dtype"] == side["dtype"]]
    names = [name for name in names if sides[name]["compiled"] == side["compiled"]]
    if side["emulation"] == "on":
        names.remove("without-op/bf16")  # which is not emulated
    return names + (["ours/fp32"] if side["dtype"] != "fp32" else [])


def scaler_row(name: str, step_seconds: list[float], scaler_seconds: list[float]) -> Row:
    """Returns what the scaler takes of a step, in ms. A ratio of 100 is one percent."""
    step_ms = statistics.median(step_seconds) * 1e3
    scaler_ms = [seconds * 1e3 for seconds in scaler_seconds]
    median = statistics.median(scaler_ms)
    ratios = [step_ms / ms for ms in scaler_ms]
    dtype = name.split("/")[1]
    return Row(f"scaler/{dtype}", "step", median, step_ms, "ms", step_ms / median, (min(ratios), max(ratios)))
