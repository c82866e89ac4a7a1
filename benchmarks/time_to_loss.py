"""How long the way to a validation loss takes: `python benchmark.py step --time-to-loss`.

Ours is train.py as it is. The baseline is the eager peer under the recipe that is usual for this model on a CPU: fp32,
2,000 steps, learning rate 1e-3 after 100 steps of warm-up, cosine to 1e-4, beta2 0.99, weight decay 0.1. Both see the
same rows, and one and the same evaluator reads the whole validation split. Seconds are of training alone.
"""

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import RESULTS, ROOT, Row, finish, keep_picture
from data.batches import Batches, mean_loss
from data.corpus import load_corpus
from data.tokenizers import train_tokenizer
from model import backends
from model.config import GPTConfig, initial_weights
from optim.schedule import learning_rate
from run.log import read_log

TARGET = 1.886  # where that recipe ends on Tiny Shakespeare
STEPS, LR, MIN_LR, WARMUP, EVERY = 2000, 1e-3, 1e-4, 100, 100

Curve = list[tuple[int, float, float]]  # steps, seconds, validation loss


def main(s) -> None:
    """Trains both, one after the other; row, picture and curves go to benchmarks/results/."""
    hardware = backends.module(s.backend).hardware(s.device, "fp32", "auto")
    with tempfile.TemporaryDirectory() as folder:
        theirs_csv, out = Path(folder) / "eager.csv", Path(folder) / "ours"
        subprocess.run([sys.executable, "-m", "benchmarks.time_to_loss", str(theirs_csv)], cwd=ROOT, check=True)
        flags = ["--preset", "cpu", "--backend", s.backend, "--eval-every", str(EVERY), "--out", str(out)]
        flags += [] if s.dtype == "all" else ["--dtype", s.dtype]
        subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, check=True)
        ours = [(row.step, row.seconds, row.val) for row in read_log(out / "log.csv") if row.val is not None]
        with open(theirs_csv, newline="", encoding="utf-8") as file:
            theirs = [(int(a), float(b), float(c)) for a, b, c in csv.reader(file)]
    reached, whole = reaches(ours, TARGET), theirs[-1][1]
    if reached is None:
        raise RuntimeError(f"ours ended at {ours[-1][2]:.4f} and never came to {TARGET}")
    ratio = whole / reached
    rows = [Row(f"time-to-loss/{TARGET}", "eager", reached, whole, "s", ratio, (ratio, ratio))]
    keep_picture(picture, ours, theirs)
    finish("time-to-loss", rows, hardware.device_name, s.readme, {"ours": ours, "eager": theirs})


def reaches(curve: Curve, target: float) -> float | None:
    """Seconds until the loss is `target`, on straight lines between the validations; None where it never is."""
    before = None
    for _, seconds, loss in curve:
        if loss <= target:
            if before is None:
                return seconds
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (seconds - before[0])
        before = seconds, loss
    return None


def picture(ours: Curve, theirs: Curve) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axes, column, label in zip(both, (1, 0), ("seconds of training", "steps"), strict=True):
        for name, curve in (("ours", ours), ("eager PyTorch, lr 1e-3", theirs)):
            axes.plot([point[column] for point in curve], [point[2] for point in curve], marker=".", label=name)
        axes.axhline(TARGET, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    both[0].set(ylabel="validation loss, nats per token", ylim=(1.6, 2.6))
    both[0].legend()
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "time-to-loss.png", dpi=110)
    plt.close(figure)


def baseline(path: str) -> None:
    """Trains the eager peer and writes its curve as CSV."""
    import torch

    from benchmarks.peers.eager import model_of, stepping

    corpus = load_corpus("tinyshakespeare")
    tokenizer = train_tokenizer("char", corpus.text, None)
    config = GPTConfig(vocab_size=tokenizer.vocab_size, block_size=64, n_layer=4, n_head=4, n_embd=128)
    batches = Batches(tokenizer.encode(corpus.text), config.block_size, 12, 1337)
    gpt = model_of(config, initial_weights(config, 1337), "cpu")
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    step = stepping(gpt, optimizer, "fp32", "cpu")

    @torch.no_grad()
    def evaluate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        losses = gpt(torch.from_numpy(x), torch.from_numpy(y), reduction="none")
        return losses.view(len(x), -1).mean(1).double().numpy()

    curve, seconds, started = [], 0.0, time.perf_counter()
    for done in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done - 1, STEPS, LR, MIN_LR, WARMUP)
        step(*batches.get("train", done - 1, 0))
        if done % EVERY == 0:
            seconds += time.perf_counter() - started
            val, _ = mean_loss(evaluate, batches.windows("val", 128))
            curve.append((done, seconds, val))
            print(f"eager   step {done} | val {val:.4f} | {seconds:.1f} s", flush=True)
            started = time.perf_counter()
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(curve)


if __name__ == "__main__":
    baseline(sys.argv[1])
