"""How long the way to a validation loss takes: `python benchmark.py step --time-to-loss`.

Ours is train.py as it is. The baseline is the eager peer under the recipe that is usual for this model on a
CPU: fp32, 2,000 steps, learning rate 1e-3 after 100 steps of warm-up, cosine to 1e-4, beta2 0.99, weight
decay 0.1. Both see the same rows on the CPU, and the same evaluation reads the whole validation split.
Seconds are of training alone.
"""

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import ROOT, Row, find_table, finish
from data import tokenizers
from data.batches import Batches, mean_loss
from data.corpus import load_corpus
from model import backends
from model.config import GPTConfig, initial_weights
from optim.schedule import learning_rate
from run.log import read_log
from settings import PRESETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.step import StepSettings

TARGET = 1.886  # where that recipe ends on Tiny Shakespeare
STEPS = 2000
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100
EVERY = 100  # steps between validations

Curve = list[tuple[int, float, float]]  # steps, seconds, validation loss


def compare(settings: "StepSettings") -> None:
    """Trains both, one after the other. RuntimeError where ours never comes to the target."""
    if settings.readme:
        find_table("time-to-loss")
    hardware = backends.module(settings.backend).hardware("cpu", "fp32", "auto")
    with tempfile.TemporaryDirectory() as folder:
        theirs_csv = Path(folder, "eager.csv")
        out = Path(folder, "ours")
        subprocess.run([sys.executable, "-m", "benchmarks.time_to_loss", str(theirs_csv)], cwd=ROOT, check=True)
        flags = ["--preset", "cpu", "--device", "cpu", "--backend", settings.backend]
        flags += ["--eval-every", str(EVERY), "--out", str(out)]
        flags += [] if settings.dtype == "all" else ["--dtype", settings.dtype]
        subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, check=True)
        ours = [(row.step, row.seconds, row.val) for row in read_log(out / "log.csv") if row.val is not None]
        with open(theirs_csv, newline="", encoding="utf-8") as file:
            theirs = [(int(step), float(seconds), float(val)) for step, seconds, val in csv.reader(file)]
    reached = seconds_until(ours, TARGET)
    if reached is None:
        raise RuntimeError(f"ours ended at {ours[-1][2]:.4f} and never came to {TARGET}")
    whole = theirs[-1][1]
    ratio = whole / reached
    rows = [Row(f"time-to-loss/{TARGET}", "eager", reached, whole, "s", ratio, (ratio, ratio))]
    more = {"ours": ours, "eager": theirs}
    pictures = {"time-to-loss.png": picture(ours, theirs)}
    finish("time-to-loss", rows, hardware.device_name, settings, more=more, pictures=pictures)


def seconds_until(curve: Curve, target: float) -> float | None:
    """Returns the seconds until the loss is `target`, interpolated between validations; None if it never is."""
    before = None
    for _, seconds, loss in curve:
        if loss <= target:
            if before is None:
                return seconds
            seconds_before, loss_before = before
            part = (loss_before - target) / (loss_before - loss)
            return seconds_before + part * (seconds - seconds_before)
        before = seconds, loss
    return None


def picture(ours: Curve, theirs: Curve) -> "Figure":
    """Returns the validation losses of both over seconds and over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_seconds, over_steps = figure.subplots(1, 2, sharey=True)
    for axes, column, label in ((over_seconds, 1, "seconds of training"), (over_steps, 0, "steps")):
        for name, curve in (("ours", ours), ("eager PyTorch, lr 1e-3", theirs)):
            axes.plot([point[column] for point in curve], [point[2] for point in curve], marker=".", label=name)
        axes.axhline(TARGET, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    over_seconds.set(ylabel="validation loss, nats per token", ylim=(1.6, 2.6))
    over_seconds.legend()
    return figure


def train_baseline(path: str) -> None:
    """Trains the eager peer and writes its curve as CSV."""
    import torch

    from benchmarks.peers.eager import model_of, stepping

    corpus = load_corpus("tinyshakespeare")
    tokenizer = tokenizers.train_tokenizer("char", corpus.text, None)
    preset = PRESETS["cpu"]
    sizes = {name: preset[name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    config = GPTConfig(vocab_size=tokenizer.vocab_size, **sizes)
    batches = Batches(tokenizer.encode(corpus.text), config.block_size, preset["batch_size"], seed=1337)
    gpt = model_of(config, initial_weights(config, 1337), "cpu")
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    take_step = stepping(gpt, optimizer, "fp32", "cpu")

    @torch.no_grad()
    def evaluate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        losses = gpt(torch.from_numpy(x), torch.from_numpy(y), reduction="none")
        return losses.view(len(x), -1).mean(1).double().numpy()

    curve: Curve = []
    seconds, started = 0.0, time.perf_counter()
    for done in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done - 1, STEPS, LR, MIN_LR, WARMUP)
        take_step(*batches.get("train", done - 1, 0))
        if done % EVERY == 0:
            seconds += time.perf_counter() - started
            val, _ = mean_loss(evaluate, batches.windows("val", 128))
            curve.append((done, seconds, val))
            print(f"eager   step {done} | val {val:.4f} | {seconds:.1f} s", flush=True)
            started = time.perf_counter()
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(curve)


if __name__ == "__main__":
    train_baseline(sys.argv[1])
