"""One side of a comparison, in a process of its own: `python -m benchmarks.worker SPEC`.

It reads requests from standard input. A line {"steps": n, "scaler": false} is answered by {"seconds": [...],
"losses": [...], "peak_mb": ...}. With "scaler": true the answer also has "scaler_seconds", the part of each
step's seconds that the scaler's calls took. A side that waits uses no core, and the thread pools of two
libraries never meet. SPEC is a JSON object with side, backend, dtype, emulation, kernel, preset, batch_size,
device and compiled.
"""

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np

import train
from model import backends
from model.config import GPTConfig, initial_weights
from run import resume
from settings import PRESETS, Settings

VOCABULARY = 65
BATCHES = 32  # drawn before the clock starts, and used in turn

TakeStep = Callable[[np.ndarray, np.ndarray], float]  # (x, y), both int64 (B, T) -> the loss
TakeTimedStep = Callable[[np.ndarray, np.ndarray], tuple[float, float]]  # ... -> the loss, the scaler's seconds


def main(spec: dict) -> None:
    """Answers requests for steps until standard input ends."""
    config = config_of(spec["preset"])
    random = np.random.default_rng(0)
    shape = (BATCHES, 2, spec["batch_size"], config.block_size)
    batches = itertools.cycle(random.integers(0, VOCABULARY, shape, dtype=np.int64))
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # what libraries print is no answer
        if spec["side"] == "ours":
            take_step, take_timed_step = ours(settings_of(spec), config)
        else:  # which has no scaler of ours to time
            peer = importlib.import_module(f"benchmarks.peers.{spec['side']}")
            weights = initial_weights(config, 0)
            take_step = peer.build(config, weights, spec["dtype"], spec["device"], spec["compiled"])
            take_timed_step = None
        for line in sys.stdin:
            request = json.loads(line)
            answer = {"seconds": [], "losses": [], "scaler_seconds": []}
            for x, y in itertools.islice(batches, request["steps"]):
                started = time.perf_counter()
                if request["scaler"] and take_timed_step:
                    loss, scaler_seconds = take_timed_step(x, y)
                    answer["scaler_seconds"].append(scaler_seconds)
                else:
                    loss = take_step(x, y)
                synchronize(spec["device"])
                answer["seconds"].append(time.perf_counter() - started)
                answer["losses"].append(float(loss))
            print(json.dumps(answer | {"peak_mb": peak_mb(spec["device"])}), file=answers, flush=True)


def config_of(preset: str) -> GPTConfig:
    """Returns the model of a preset, without dropout and with the vocabulary of all benchmarks of a step."""
    sizes = {name: PRESETS[preset][name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    return GPTConfig(vocab_size=VOCABULARY, **sizes)


def settings_of(spec: dict) -> Settings:
    """Returns the settings of our side: those of train.py, at a fixed learning rate."""
    return Settings(
        preset=spec["preset"],
        backend=spec["backend"],
        device=spec["device"],
        dtype=spec["dtype"],
        emulation=spec["emulation"],
        kernel=spec["kernel"],
        loss_scaling="off" if spec["dtype"] == "fp32" else "on",
        batch_size=spec["batch_size"],
        lr=1e-3,
        seed=0,
        compile=spec["compiled"],
    )


def ours(settings: Settings, config: GPTConfig) -> tuple[TakeStep, TakeTimedStep]:
    """Builds our side. Returns train.step on one batch, and the same with a scaler that times itself.

    Every benchmark of a step builds its model here.
    """
    module = backends.module(settings.backend)
    hardware = module.hardware(settings.device, settings.dtype, settings.emulation)
    backend = module.build(settings, hardware, config, initial_weights(config, settings.seed))
    scaler = resume.build_scaler(settings, {})
    numbers = itertools.count()

    def take_step_with(used_scaler: Any, x: np.ndarray, y: np.ndarray) -> float:
        batch: Any = OneBatch(x, y)
        losses, _ = train.step(backend, used_scaler, batch, settings, next(numbers))
        return losses[0].item()  # waits for a device

    def take_step(x, y):
        return take_step_with(scaler, x, y)

    def take_timed_step(x, y):
        timed = TimedScaler(scaler, hardware.device)
        loss = take_step_with(timed, x, y)
        return loss, timed.seconds

    return take_step, take_timed_step


class OneBatch(NamedTuple):
    """Stands in for data.batches.Batches: one batch, whichever step asks."""

    x: np.ndarray  # int64 (B, T)
    y: np.ndarray  # int64 (B, T)

    def get(self, split: str, number: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x, self.y


class TimedScaler:
    """A scaler that adds up the `seconds` of scale(), unscale_() and update(); step() is the optimizer's time."""

    def __init__(self, scaler, device: str):
        self.scaler = scaler
        self.device = device
        self.seconds = 0.0

    def scale(self, loss):
        return self._time(self.scaler.scale, loss)

    def unscale_(self, optimizer):
        return self._time(self.scaler.unscale_, optimizer)

    def step(self, optimizer):
        return self.scaler.step(optimizer)

    def update(self):
        return self._time(self.scaler.update)

    def _time(self, method: Callable, *arguments):
        synchronize(self.device)  # what was queued before is not the scaler's
        started = time.perf_counter()
        result = method(*arguments)
        synchronize(self.device)
        self.seconds += time.perf_counter() - started
        return result


def synchronize(device: str) -> None:
    """Waits until a CUDA device has done what it was given."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def peak_mb(device: str) -> float:
    """Returns the most MiB that this process has held: of the GPU's memory on CUDA, else of the machine's."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
