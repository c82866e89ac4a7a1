"""The texts that train.py prints before and after a run."""

import os
import shlex
import sys
from pathlib import Path

from data.batches import Batches
from model.backends import Hardware, Kernel
from model.config import GPTConfig, parameter_count
from model.cost import flops_per_token, peak_flops
from run.log import Row
from settings import Settings, switches
from watch.progress import thousands

SCRIPTS = Path(__file__).resolve().parent.parent


def header(
    notes: list[str],
    settings: Settings,
    hardware: Hardware,
    kernel: Kernel,
    config: GPTConfig,
    batches: Batches,
    corpus_name: str,
    out: Path,
    first_step: int,
) -> str:
    """A line for each note, then seven lines: model, device, dtype, kernel, scaling, data, steps."""
    train_tokens, val_tokens = (len(batches.tokens[split]) for split in ("train", "val"))
    if settings.loss_scaling == "on":
        scaling = f"dynamic loss scale, doubles after {settings.growth_interval} good steps, halves after a bad one"
    else:
        scaling = "off: scale fixed at 1, inf and NaN still skip their step"
    return "".join(f"note    {note}\n" for note in notes) + (
        f"model   {parameter_count(config):,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} channels, context {config.block_size}, vocabulary {config.vocab_size}\n"
        f"device  {hardware.device}: {hardware.device_name}\n"
        f"dtype   {hardware.dtype}: {hardware.how}\n"
        f"kernel  mlp.c_proj: {kernel.how}\n"
        f"scaling {scaling}\n"
        f"data    {corpus_name}: {train_tokens:,} training and {val_tokens:,} validation tokens, seed {settings.seed}\n"
        f"run     steps {first_step + 1} to {settings.steps}, "
        f"{settings.accumulation} x {settings.batch_size} x {config.block_size} tokens each, in {out}"
    )


def end(settings: Settings, config: GPTConfig, hardware: Hardware, row: Row, speed: float, out: Path) -> str:
    """The result of a run, its files, and the commands that go on with it. speed: mean tokens per second."""
    peak = peak_flops(hardware.device_name, hardware.dtype)
    mfu = f"{speed * flops_per_token(config) / peak:.1%}" if peak else "n/a (peak of this device not known)"
    python, script, folder = (quoted(path) for path in (sys.executable, SCRIPTS / "sample.py", out))
    saved = [out / name for name in (f"step-{row.step}", "log.csv", "loss.png") if (out / name).exists()]
    return (
        f"done    val {row.val:.4f} ± {row.val_error:.4f} | {thousands(speed)} tok/s | MFU {mfu}\n"
        f"saved   {', '.join(map(str, saved))}\n"
        f"go on   {go_on(settings, out, row.step)}\n"
        f"sample  {python} {script} --checkpoint {folder}"
    )


def go_on(settings: Settings, out: Path, done: int) -> str:
    """The command that continues a run of which `done` steps are done."""
    python, script, folder = (quoted(path) for path in (sys.executable, SCRIPTS / "train.py", out))
    more = [f"--steps {2 * done}"] if done == settings.steps else []
    return " ".join([python, script, "--resume", folder, *more, *switches(settings)])


def quoted(path: str | Path) -> str:
    """A path as a person would type it: relative where it lies below the current folder, quoted for a shell."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
