"""Our matrix-vector product against the libraries': `python benchmark.py gemv`.

One vector times the matrices of the presets and of GPT-2, for weights held in fp32 (rounded on load) and in
bf16. Every call takes another copy of the weights, so that none comes from a cache. On CUDA the calls are
captured into a graph, so that kernels are compared and not launches, and the versions of csrc/bf16_linear.cu
stand side by side.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from base.errors import BadInput
from base.flags import flag, out_of_bounds, read_flags
from benchmarks.report import (
    ReportSettings,
    Row,
    Times,
    find_table,
    finish,
    results_folder,
    share_row,
    speed_rows,
    time_in_turns,
)
from csrc import build
from model import backends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = ((128, 512), (384, 1536), (768, 3072), (3072, 768), (50257, 768), (4096, 4096))  # (M, K)
TRAINING = (8192, 384, 1536)  # (N, M, K): mlp.c_proj of the preset gpu
PAST_CACHES = 256 * 2**20  # bytes of all copies of a matrix together
CALLS_IN_A_GRAPH = 20  # at least
LIBRARIES = {"fp32": "PyTorch fp32", "bf16": "PyTorch bf16", "numpy": "NumPy fp32"}

Functions = dict[str, tuple[Callable[[Any], Any], list]]  # {name: (function, its arguments in turn)}


@dataclass(frozen=True)
class GemvSettings(ReportSettings):
    """Flags of `benchmark.py gemv`."""

    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    blocks: int = flag(7, "blocks of calls, in which the functions take turns", at_least=1)
    profile: bool = flag(False, "also print torch.profiler's table and write a trace")


def main(argv: list[str]) -> None:
    """Checks every function, then times them. BadInput lists all faults of the command line."""
    values, faults = read_flags(GemvSettings, argv, "benchmark.py gemv", __doc__ or "")
    settings = GemvSettings(**values)
    faults += out_of_bounds(settings)
    if faults:
        raise BadInput("\n".join(faults))
    hardware = backends.module("torch").hardware(settings.device, "fp32", "auto")
    device = torch.device(hardware.device)
    try:
        kernels = build.load()
    except build.Unavailable as error:
        raise BadInput(f"the kernels cannot be built here: {error}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not kernels.with_cuda):
        raise BadInput(f"--device {settings.device}: csrc/ has no code for it here; python -m csrc.build says why")
    if settings.readme:
        find_table("gemv")
    print(f"device  {device}: {hardware.device_name}")
    bandwidth = read_bandwidth(device, settings.blocks)
    print(f"reads   {bandwidth:.1f} GB/s, the fastest reduction over {PAST_CACHES >> 20} MB of fp32")
    rows = []
    for m, k in SHAPES:
        rows += matrix_vector(kernels, device, m, k, settings.blocks, bandwidth)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        rows += training_shape(kernels, device, settings.blocks)
    if settings.profile:
        profile(device, settings)
    finish(
        "gemv",
        rows,
        hardware.device_name,
        settings,
        more={"read_bandwidth_gb_s": bandwidth},
        text=by_case(rows),
        pictures={"gemv.png": picture(rows, bandwidth, hardware.device_name)},
    )


def read_bandwidth(device: torch.device, blocks: int) -> float:
    """Returns the GB/s of the fastest of a few reductions over an array that no cache holds."""
    big = torch.ones(PAST_CACHES // 4, device=device)
    functions: Functions = {"sum": (torch.sum, [big]), "max": (torch.max, [big])}
    if device.type == "cpu":
        functions["dot"] = (lambda array: array @ array, [big.numpy()])  # both operands come from the same cache lines
    times = timed(functions, device, blocks)
    return PAST_CACHES / min(statistics.median(block) for block in times.values()) / 1e9


def matrix_vector(kernels, device: torch.device, m: int, k: int, blocks: int, bandwidth: float) -> list[Row]:
    """Checks every function against fp64, then times them. Returns rows in GB/s of weights that were read."""
    generator = torch.Generator().manual_seed(m + k)
    weight = torch.randn(m, k, generator=generator).to(device)
    fp32, bf16 = (_copies(weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    x = torch.randn(k, generator=generator).to(device)
    x_low = x.bfloat16()
    versions = range(5) if device.type == "cuda" else (-1,)
    functions: Functions = {}
    for version in versions:
        name = "cpu" if version < 0 else f"v{version}"
        for weights, matrices in (("fp32", fp32), ("bf16", bf16)):
            functions[f"{name}/{weights}"] = (lambda w, version=version: kernels.bf16_gemv(w, x, version), matrices)
    functions["fp32"] = (lambda w: torch.mv(w, x), fp32)
    functions["bf16"] = (lambda w: F.linear(x_low, w), bf16)
    if device.type == "cpu":
        numbers = x.numpy()
        functions["numpy"] = (lambda w: w @ numbers, [weight.numpy() for weight in fp32])
    for name, (function, matrices) in functions.items():
        low = "/" in name or name == "bf16"
        check(name, torch.as_tensor(function(matrices[0])), weight, x_low if name == "bf16" else x, low)
    times = timed(functions, device, blocks)
    rows = []
    baselines = [name for name in functions if "/" not in name]
    for name in functions:
        if "/" in name:
            version, weights = name.split("/")
            work = m * k * (4 if weights == "fp32" else 2) / 1e9
            case = f"gemv/{version}/{weights}/{m}x{k}"
            for row in speed_rows(case, {n: times[n] for n in (name, *baselines)}, name, work, "GB/s"):
                their_bytes = 2 if row.against == "bf16" else 4  # of a weight
                our_bytes = 4 if weights == "fp32" else 2
                rows.append(row._replace(theirs=row.theirs * their_bytes / our_bytes))
            rows.append(share_row(case, [work / block for block in times[name]], bandwidth, "bandwidth", "GB/s"))
    return rows


def training_shape(kernels, device: torch.device, blocks: int) -> list[Row]:
    """Times v5 on fp32 master weights against cuBLAS on weights that are bf16 already, in TFLOP/s."""
    n, m, k = TRAINING
    x = torch.randn(n, k, device=device).bfloat16()
    weight = torch.randn(m, k, device=device)
    low = weight.bfloat16()
    functions = {
        "ours": (lambda w: kernels.bf16_linear(x, w), [weight]),
        "cublas": (lambda w: F.linear(x, w), [low]),
    }
    check("v5", kernels.bf16_linear(x, weight), weight, x, True)
    times = timed(functions, device, blocks)
    return speed_rows(f"linear/v5/fp32/{n}x{m}x{k}", times, "ours", 2 * n * m * k / 1e12, "TFLOP/s")


def check(name: str, y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, low_weights: bool) -> None:
    """Compares a product with fp64. RuntimeError where it is off by more than 1e-5 of the sum of |w x|.

    A y in bf16 may be off by one rounding more.
    """
    exact = (weight.bfloat16() if low_weights else weight).double()
    product, bound = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    allowed = bound * 1e-5 + (product.abs() * 2**-8 if y.dtype == torch.bfloat16 else 0)
    if not ((y.to(product.device).double() - product).abs() <= allowed).all():
        raise RuntimeError(f"{name} is wrong for {tuple(weight.shape)}: not timed")


def _copies(weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns so many copies that no cache holds them all. Each call takes the next."""
    return [weight.clone() for _ in range(1 + -(-PAST_CACHES // max(1, weight.nbytes)))]


def timed(functions: Functions, device: torch.device, blocks: int) -> Times:
    """Returns the seconds of a call. On CUDA a graph of calls is timed, and its time divided by their number."""
    if device.type != "cuda":
        calls = {name: _in_turn(function, arguments) for name, (function, arguments) in functions.items()}
        return time_in_turns(calls, blocks)
    graphs = {name: _graph(function, arguments, device) for name, (function, arguments) in functions.items()}
    times = time_in_turns({name: replay for name, (replay, _) in graphs.items()}, blocks)
    return {name: [seconds / graphs[name][1] for seconds in times[name]] for name in functions}


def _in_turn(function: Callable, arguments: list) -> Callable:
    turn = cycle(arguments)
    return lambda: function(next(turn))


def _graph(function: Callable, arguments: list, device: torch.device) -> tuple[Callable, int]:
    """Returns a function that replays a captured graph of calls and waits for it, and the number of calls."""
    call = _in_turn(function, arguments)
    count = max(CALLS_IN_A_GRAPH, len(arguments))
    call()  # what a library sets up at its first call must not be captured
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()

    def replay():
        graph.replay()
        torch.cuda.synchronize(device)

    return replay, count


def _ratio(row: Row) -> str:
    return f"**{row.ratio:.2f}** ({row.spread[0]:.2f} to {row.spread[1]:.2f})"


def by_case(rows: list[Row]) -> str:
    """Returns a Markdown table with a line for each of ours: its GB/s, and its ratios with their spread."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.against] = row
    columns = list(dict.fromkeys(row.against for row in rows))
    lines = [f"| case | ours | {' | '.join(f'over {c}' for c in columns)} |", "|---" * (2 + len(columns)) + "|"]
    for case, against in cases.items():
        any_row = next(iter(against.values()))
        cells = [_ratio(against[column]) if column in against else "" for column in columns]
        lines.append(f"| {case} | {any_row.ours:.1f} {any_row.unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(rows: list[Row], bandwidth: float, device_name: str) -> "Figure":
    """Returns bars of the GB/s of each function at each shape, under the line of the read bandwidth."""
    from matplotlib.figure import Figure

    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.case.startswith("gemv/"):
            _, version, weights, shape = row.case.split("/")
            bars.setdefault(f"ours {version}, {weights} weights", {})[shape] = row.ours
            if row.against != "bandwidth":
                bars.setdefault(LIBRARIES[row.against], {})[shape] = row.theirs
    shapes = [f"{m}x{k}" for m, k in SHAPES]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for i, (name, speeds) in enumerate(bars.items()):
        axes.bar(np.arange(len(shapes)) + i * width, [speeds[shape] for shape in shapes], width, label=name)
    axes.axhline(bandwidth, color="black", linewidth=1, linestyle="--", label="read bandwidth")
    axes.set_xticks(np.arange(len(shapes)) + 0.4, shapes)
    axes.set(ylabel="weights read, GB/s", xlabel="M x K", title=f"one vector, {device_name}")
    axes.legend(fontsize="small")
    return figure


def profile(device: torch.device, settings: GemvSettings) -> None:
    """Prints torch.profiler's table of a few calls, and writes a trace for chrome://tracing."""
    from model.bf16_linear import bf16_linear

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    n, m, k = TRAINING
    weight, vector = torch.randn(m, k, device=device), torch.randn(1, k, device=device)
    batch = torch.randn(n if device.type == "cuda" else 64, k, device=device).bfloat16()
    with torch.profiler.profile(activities=activities) as profiler, torch.no_grad():
        for _ in range(10):
            bf16_linear(vector, weight)
            bf16_linear(batch, weight)
    print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=10))
    folder = results_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "gemv-trace.json"))
    print(f"trace   {folder / 'gemv-trace.json'}")
