"""Where the time of a step goes: `python benchmark.py step --profile`, and a trace for chrome://tracing."""

import numpy as np

from base.errors import BadInput
from benchmarks.report import RESULTS
from benchmarks.worker import VOCABULARY, config_of, ours
from model import backends
from settings import PRESETS

STEPS = 20
KINDS = {  # words in the names of PyTorch's operations; the first kind that fits
    "attention": ("attention",),
    "GELU": ("gelu",),
    "normalisation": ("layer_norm",),
    "cross-entropy": ("log_softmax", "nll_loss", "cross_entropy"),
    "optimizer": ("adam",),
    "scaler": ("_amp_",),
    "clipping": ("norm", "clip"),
    "matrix products": ("mm", "linear", "matmul", "gemm"),
    "casts and copies": ("copy", "_to", "clone", "cat"),
    "embedding": ("embedding", "index"),
}


def main(s) -> None:
    """Prints each kind's share of the time in PyTorch's operations."""
    if s.backend != "torch":
        raise BadInput(f"--profile: looks into PyTorch, --backend {s.backend} has its time elsewhere")
    import torch

    hardware = backends.module("torch").hardware(s.device, "fp32" if s.dtype == "all" else s.dtype, "auto")
    spec = dict(backend="torch", dtype=hardware.dtype, emulation="auto", kernel="auto")
    config, batch_size = config_of(s.preset), s.batch_size or PRESETS[s.preset]["batch_size"]
    spec |= dict(device=hardware.device, compiled=s.compile, batch_size=batch_size)
    step, _ = ours(spec, config)
    x, y = np.random.default_rng(0).integers(0, VOCABULARY, (2, batch_size, config.block_size), dtype=np.int64)
    for _ in range(3):
        step(x, y)
    on_cuda = hardware.device.startswith("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_cuda else []
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step(x, y)
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if on_cuda and event.device_type != torch.autograd.DeviceType.CPU:
            continue  # a kernel: its time also stands with the operation that launched it
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total  # µs
        times[kind_of(event.key)] = times.get(kind_of(event.key), 0.0) + spent
    total = sum(times.values())
    print(f"device  {hardware.device}: {hardware.device_name}\ndtype   {hardware.dtype}: {hardware.how}")
    for name, spent in sorted(times.items(), key=lambda item: -item[1]):
        print(f"{spent / total:6.1%}  {spent / STEPS / 1e3:7.2f} ms  {name}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    trace = RESULTS / "step-trace.json"
    profiler.export_chrome_trace(str(trace))
    print(f"{total / STEPS / 1e3:.2f} ms a step in PyTorch's operations; trace: {trace}")


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "the rest")
