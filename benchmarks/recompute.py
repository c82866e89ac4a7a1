"""What recomputation saves in memory and costs in time: `python benchmark.py step --recompute`.

A step is measured for several numbers of layers between checkpoints. The case is
recompute/BACKEND/DTYPE/LAYERS/memory, or time.
"""

import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.report import Row, time_in_turns
from benchmarks.worker import VOCABULARY, config_of, ours
from settings import Settings


def compare(settings: Settings, blocks: int = 7) -> list[Row]:
    """Returns memory in MiB and time in ms for each number of layers, against a step that keeps all it computes.

    settings: of train.py, with backend, device, dtype, preset, batch_size and loss_scaling resolved.
    """
    config = config_of(settings.preset)
    shape = (2, settings.batch_size, config.block_size)
    x, y = np.random.default_rng(0).integers(0, VOCABULARY, shape)
    steps: dict[int, Callable[[], object]] = {}
    for layers in layer_counts(config.n_layer):
        count: Any = layers  # the flag of train.py is a bool, which a backend reads as 0 or 1
        take_step, _ = ours(replace(settings, recompute=count), config)
        steps[layers] = lambda take_step=take_step: take_step(x, y)
    peak = peak_of_numpy if settings.backend == "engine" else peak_of_torch
    memory = {layers: peak(step, settings.device) / 2**20 for layers, step in steps.items()}
    times = time_in_turns({str(layers): step for layers, step in steps.items()}, blocks, at_least=0.5)
    rows = []
    for layers in list(steps)[1:]:
        case = f"recompute/{settings.backend}/{settings.dtype}/{layers}"
        saved = memory[0] / memory[layers]
        rows.append(Row(f"{case}/memory", "kept", memory[layers], memory[0], "MiB", saved, (saved, saved)))
        ours_ms, theirs_ms = (statistics.median(times[n]) * 1e3 for n in (str(layers), "0"))
        ratios = [theirs / again for again, theirs in zip(times[str(layers)], times["0"], strict=True)]
        spread = (min(ratios), max(ratios))
        rows.append(Row(f"{case}/time", "kept", ours_ms, theirs_ms, "ms", statistics.median(ratios), spread))
    return rows


def layer_counts(n_layer: int) -> list[int]:
    """Returns 0, for nothing computed again, and the powers of two below the number of layers."""
    return [0, *(2**n for n in range(n_layer.bit_length()) if 2**n < n_layer)]


def peak_of_numpy(step: Callable[[], object], device: str) -> int:
    """Returns the most bytes that a step holds besides those that are held between steps."""
    step()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def peak_of_torch(step: Callable[[], object], device: str) -> int:
    """Returns the most bytes that a step holds besides those that are held between steps."""
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
    profiler: Any = profile.profiler
    held = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":  # allocated, or freed: below 0
            held += event.nbytes()
            peak = max(peak, held)
    return peak
