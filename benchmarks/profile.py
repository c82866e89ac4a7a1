"""Where the time of a step goes: `python benchmark.py step --profile`, and a trace for chrome://tracing."""

import numpy as np

from base.errors import BadInput
from benchmarks.report import ReportSettings, results_folder
from benchmarks.worker import VOCABULARY, config_of, ours
from settings import Settings

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


def profile(settings: Settings, report: ReportSettings) -> None:
    """Prints each kind's share of the time in PyTorch's operations, and writes a trace into the results folder.

    settings: of train.py, with device, dtype, preset, batch_size and loss_scaling resolved.
    """
    if settings.backend != "torch":
        raise BadInput(f"--profile: looks into PyTorch, --backend {settings.backend} has its time elsewhere")
    import torch

    config = config_of(settings.preset)
    shape = (2, settings.batch_size, config.block_size)
    x, y = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int64)
    take_step, _ = ours(settings, config)
    for _ in range(3):
        take_step(x, y)
    on_cuda = settings.device.startswith("cuda")
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_cuda else []
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            take_step(x, y)
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if on_cuda and event.device_type.name != "CPU":
            continue  # a kernel: its time also stands with the operation that launched it
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        kind = kind_of(event.key)
        times[kind] = times.get(kind, 0.0) + microseconds
    total = sum(times.values())
    for kind, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        print(f"{microseconds / total:6.1%}  {microseconds / STEPS / 1e3:7.2f} ms  {kind}")
    print(f"{total / STEPS / 1e3:.2f} ms a step in PyTorch's operations")
    folder = results_folder(report)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "step-trace.json"))
    print(f"trace   {folder / 'step-trace.json'}")


def kind_of(name: str) -> str:
    """Returns the kind of work that an operation of PyTorch does, by its name."""
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "the rest")
