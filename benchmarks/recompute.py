"""What recomputation saves and costs: layers between checkpoints against the peak of memory and the time of a step.

For `python benchmark.py step --recompute`. The case is recompute/BACKEND/DTYPE/LAYERS/memory, or time.
"""

import statistics
import tracemalloc

import numpy as np

from benchmarks.report import Row, seconds
from benchmarks.worker import VOCABULARY, config_of
from model import backends
from model.config import initial_weights
from settings import PRESETS, Settings


def rows(
    backend: str, dtype: str, preset: str, batch_size: int | None = None, device: str = "auto", blocks: int = 7
) -> list[Row]:
    """Two a number of layers: memory in MiB, time in ms, each against the same step that keeps everything."""
    config = config_of(preset)
    module = backends.module(backend)
    hardware = module.hardware(device, dtype, "auto")
    shape = (2, batch_size or PRESETS[preset]["batch_size"], config.block_size)
    x, y = np.random.default_rng(0).integers(0, VOCABULARY, shape)
    steps = {}
    for layers in between(config.n_layer):
        settings = Settings(seed=0, recompute=layers, dtype=dtype, device=hardware.device)
        steps[layers] = _step(module.build(settings, hardware, config, initial_weights(config, 0)), x, y)
    measure = _peak_of_numpy if backend == "engine" else _peak_of_torch
    memory = {layers: measure(step, hardware.device) / 2**20 for layers, step in steps.items()}
    times = seconds(steps, blocks, at_least=0.5)
    found = []
    for layers in list(steps)[1:]:
        case = f"recompute/{backend}/{dtype}/{layers}"
        ratio = memory[0] / memory[layers]
        found.append(Row(f"{case}/memory", "kept", memory[layers], memory[0], "MiB", ratio, (ratio, ratio)))
        ratios = [theirs / ours for ours, theirs in zip(times[layers], times[0], strict=True)]
        middle = [statistics.median(times[n]) * 1e3 for n in (layers, 0)]
        spread = (min(ratios), max(ratios))
        found.append(Row(f"{case}/time", "kept", *middle, "ms", statistics.median(ratios), spread))
    return found


def between(n_layer: int) -> list[int]:
    """0, and the powers of two below the number of layers."""
    return [0, *(2**n for n in range(n_layer.bit_length()) if 2**n < n_layer)]


def _step(backend, x, y):
    def step():
        with backend.autocast():
            loss = backend.model(x, y, key=(0, 0, 0))
        loss.backward()
        backend.clip_grad_norm_(1.0)
        backend.optimizer.step()
        backend.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for a device

    return step


def _peak_of_numpy(step, device: str) -> int:
    """Bytes besides what is there between steps."""
    step()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _peak_of_torch(step, device: str) -> int:
    import torch

    step()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":  # allocated, or freed: below 0
            now += event.nbytes()
            peak = max(peak, now)
    return peak
