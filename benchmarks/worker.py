"""One side of a comparison, in a process of its own: `python -m benchmarks.worker SPEC`, asked through standard input.

A line {"steps": n} is answered by {"seconds": [...], "losses": [...], "peak_mb": ...}; with "scaler": true also by
"scaler_seconds", what the scaler's calls took of each step. While a side waits it takes no core, and thread pools of
two libraries never meet. SPEC is JSON: side, backend, dtype, emulation, kernel, preset, batch_size, device, compiled.
"""

import importlib
import itertools
import json
import sys
import time
from contextlib import redirect_stdout

import numpy as np

from amp.scaler import DynamicLossScaler
from model import backends
from model.config import GPTConfig, initial_weights
from settings import MAX_SCALE, PRESETS, Settings

VOCABULARY, BATCHES = 65, 32


def main(spec: dict) -> None:
    config = config_of(spec["preset"])
    random = np.random.default_rng(0)
    shape = (BATCHES, 2, spec["batch_size"], config.block_size)
    batches = random.integers(0, VOCABULARY, shape, dtype=np.int64)
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # what libraries print is no answer
        if spec["side"] == "ours":
            step, scaler_step = ours(spec, config)
        else:
            peer = importlib.import_module(f"benchmarks.peers.{spec['side']}")
            step = peer.build(config, initial_weights(config, 0), spec["dtype"], spec["device"], spec["compiled"])
        done = 0
        for line in sys.stdin:
            request = json.loads(line)
            answer = {"seconds": [], "losses": [], "scaler_seconds": []}
            for _ in range(request["steps"]):
                x, y = batches[done % BATCHES]
                started = time.perf_counter()
                if request["scaler"]:
                    loss, spent = scaler_step(x, y)
                    answer["scaler_seconds"].append(spent)
                else:
                    loss = step(x, y)
                synchronize(spec["device"])
                answer["seconds"].append(time.perf_counter() - started)
                answer["losses"].append(float(loss))
                done += 1
            print(json.dumps(answer | {"peak_mb": peak_mb(spec["device"])}), file=answers, flush=True)


def config_of(preset: str) -> GPTConfig:
    sizes = {name: PRESETS[preset][name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    return GPTConfig(vocab_size=VOCABULARY, **sizes)


def ours(spec: dict, config: GPTConfig):
    """A step of the loop in train.py with one micro-batch, (x, y) -> loss; and the same with the scaler's seconds."""
    module = backends.module(spec["backend"])
    hardware = module.hardware(spec["device"], spec["dtype"], spec["emulation"])
    sizes = dict(batch_size=spec["batch_size"], kernel=spec["kernel"], compile=spec["compiled"])
    settings = Settings(lr=1e-3, dtype=spec["dtype"], seed=0, **sizes)
    backend = module.build(settings, hardware, config, initial_weights(config, 0))
    low = spec["dtype"] != "fp32"
    scaler = DynamicLossScaler(2.0**15 if low else 1.0, growth_interval=500, max_scale=MAX_SCALE if low else 1.0)
    optimizer = backend.optimizer
    keys = itertools.count()

    def step(x, y, call=lambda function, *arguments: function(*arguments)):
        with backend.autocast():
            loss = backend.model(x, y, key=(0, next(keys), 0))
        call(scaler.scale, loss).backward()
        call(scaler.unscale_, optimizer)
        backend.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        call(scaler.update)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().item()

    def scaler_step(x, y):
        spent = 0.0

        def timed(function, *arguments):
            nonlocal spent
            synchronize(spec["device"])  # what was queued before is not the scaler's
            started = time.perf_counter()
            result = function(*arguments)
            synchronize(spec["device"])
            spent += time.perf_counter() - started
            return result

        return step(x, y, timed), spent

    return step, scaler_step


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
