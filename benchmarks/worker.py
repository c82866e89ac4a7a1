"""One side of a comparison, in a process of its own: `python -m benchmarks.worker SPEC`, asked through standard input.

A line {"steps": n} is answered by {"seconds": [...], "losses": [...], "peak_mb": ...}. While a side waits it takes no
core, and thread pools of two libraries never meet. SPEC is JSON: side, backend, dtype, emulation, preset, batch_size,
device, compiled.
"""

import importlib
import json
import sys
import time
from contextlib import redirect_stdout

import numpy as np

from amp.scaler import DynamicLossScaler
from model import backend as backends
from model.config import PRESETS, GPTConfig, initial_weights
from settings import MAX_SCALE, Settings

VOCABULARY, BATCHES = 65, 32


def main(spec: dict) -> None:
    config = config_of(spec["preset"])
    random = np.random.default_rng(0)
    shape = (BATCHES, 2, spec["batch_size"], config.block_size)
    batches = random.integers(0, VOCABULARY, shape, dtype=np.int64)
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # what libraries print is no answer
        if spec["side"] == "ours":
            step, costs = ours(spec, config)
        else:
            peer = importlib.import_module(f"benchmarks.peers.{spec['side']}")
            step, costs = (
                peer.build(config, initial_weights(config, 0), *(spec[k] for k in ("dtype", "device", "compiled"))),
                {},
            )
        done = 0
        for line in sys.stdin:
            seconds, losses = [], []
            for _ in range(json.loads(line)["steps"]):
                x, y = batches[done % BATCHES]
                started = time.perf_counter()
                loss = step(x, y)
                synchronize(spec["device"])
                seconds.append(time.perf_counter() - started)
                losses.append(float(loss))
                done += 1
            answer = {"seconds": seconds, "losses": losses, "peak_mb": peak_mb(spec["device"])} | costs
            print(json.dumps(answer), file=answers, flush=True)


def config_of(preset: str) -> GPTConfig:
    sizes = {name: PRESETS[preset][name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    return GPTConfig(vocab_size=VOCABULARY, **sizes)


def ours(spec: dict, config: GPTConfig):
    """A step of the loop in train.py with one micro-batch, and what the scaler's part of it took in all."""
    module = backends.module(spec["backend"])
    hardware = module.hardware(spec["device"], spec["dtype"], spec["emulation"])
    settings = Settings(lr=1e-3, compile=spec["compiled"], device=spec["device"], dtype=spec["dtype"], seed=0)
    backend = module.build(settings, hardware, config)
    low = spec["dtype"] != "fp32"
    scaler = DynamicLossScaler(2.0**15 if low else 1.0, growth_interval=500, max_scale=MAX_SCALE if low else 1.0)
    optimizer = backend.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    costs, done = {"scaler_seconds": 0.0}, 0

    def step(x, y):
        nonlocal done
        with backend.autocast():
            loss = backend.model(x, y, key=(0, done, 0))
        start = time.perf_counter()
        scaled = scaler.scale(loss)
        costs["scaler_seconds"] += time.perf_counter() - start
        scaled.backward()
        start = time.perf_counter()
        scaler.unscale_(optimizer)
        costs["scaler_seconds"] += time.perf_counter() - start
        backend.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        start = time.perf_counter()
        scaler.update()
        costs["scaler_seconds"] += time.perf_counter() - start
        optimizer.zero_grad(set_to_none=True)
        done += 1
        return loss.detach().item()

    return step, costs


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def peak_mb(device: str) -> float:
    """The most memory that this process has held: of the GPU there, of the machine elsewhere."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
