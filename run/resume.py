"""Resuming: the state a run takes from its checkpoint, what must be equal in both, and notes about changed flags."""

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from amp.scaler import LossScaler
from base.errors import BadInput
from base.flags import name_of
from data.corpus import Corpus
from model.backends import Hardware, Kernel
from model.config import GPTConfig
from optim.schedule import learning_rate
from settings import MAX_SCALE, Settings, flags_with


def check(settings: Settings, manifest: dict, corpus: Corpus, resume_from: Path) -> None:
    """BadInput where the text is another one or no step is left; request.py has compared the architecture."""
    saved, now = manifest["corpus"], about_corpus(corpus)
    if now["sha256"] != saved["sha256"]:
        was, is_now = (f"{c['name']} ({c['characters']} characters, sha256 {c['sha256'][:12]})" for c in (saved, now))
        raise BadInput(f"--resume {resume_from}: trained on another text: {was}, and this is {is_now}")
    if manifest["step"] >= settings.steps:
        raise BadInput(f"--resume {resume_from}: all {settings.steps} steps are done: ask for more with --steps")


def notes(
    settings: Settings, asked: dict[str, Any], hardware: Hardware, kernel: Kernel, versions: dict, manifest: dict
) -> list[str]:
    """A line for each change since the checkpoint that affects the rest of the run.

    asked: the settings before derivation, as the manifest has them. versions: of the array libraries.
    """
    was: dict[str, Any] = {f.name: f.default for f in fields(Settings)} | manifest["settings"]
    changed = {n: f"{name_of(n)} {asked[n]} (was {was[n]})" for n in asked if asked[n] != was[n]}
    step, lines = manifest["step"], []
    if schedule := [line for name, line in changed.items() if name in flags_with("schedule")]:
        before = learning_rate(step - 1, was["steps"], was["lr"], was["min_lr"], was["warmup"])
        after = learning_rate(step, settings.steps, settings.lr, settings.min_lr, settings.warmup)
        rates = f"the learning rate goes from {before:.1e} to {after:.1e} at step {step + 1}"
        lines.append(f"{', '.join(schedule)}: {rates}")
    if "dtype" in changed:
        same = "weights and moments are fp32 and go on as they are; products are rounded differently"
        lines.append(f"{changed['dtype']}: {same}")
    others = [line for name, line in changed.items() if name in flags_with("changes") and name != "dtype"]
    if others:
        lines.append(f"{', '.join(others)}: goes on, but not as the saved run would have")
    if moved := _moved(hardware, kernel, versions, manifest):
        lines.append(f"{', '.join(moved)}: goes on, but perhaps not bit for bit")
    return lines


def _moved(hardware: Hardware, kernel: Kernel, versions: dict, manifest: dict) -> list[str]:
    """The parts of the machine that are not those of the checkpoint. Another backend has other libraries."""
    then = manifest["compute"] | manifest["versions"]
    now = hardware._asdict() | {"kernel": kernel.code} | versions
    both = [key for key in ("device_name", "kernel", "numpy", "torch") if key in then and key in now]
    return [f"{now[key]} (was {then[key]})" for key in both if then[key] != now[key]]


def build_scaler(settings: Settings, manifest: dict) -> LossScaler:
    """The scaler of a run, as it was at its checkpoint. `manifest` is empty where a run begins.

    With --loss-scaling off the scale is held at 1 and the checks stay: a NaN still skips its step.
    """
    on = settings.loss_scaling == "on"
    scaler = LossScaler(
        init_scale=settings.init_scale if on else 1.0,
        growth_interval=settings.growth_interval,
        max_scale=MAX_SCALE if on else 1.0,
        max_consecutive_skips=settings.max_skips,
    )
    if manifest:
        restore_scaler(scaler, settings, manifest)
    return scaler


def restore_scaler(scaler: LossScaler, settings: Settings, manifest: dict) -> None:
    """Gives the scaler the checkpoint's scale, counters and skips. The growth interval is the one asked for now."""
    if settings.loss_scaling == "on" and manifest["compute"]["loss_scaling"] == "on":
        interval = settings.growth_interval
        tracker = min(manifest["scaler"]["_growth_tracker"], interval - 1)  # the interval may be shorter now
        scaler.load_state_dict(manifest["scaler"] | {"growth_interval": interval, "_growth_tracker": tracker})
    scaler.skipped_steps, scaler.consecutive_skips = manifest["skipped"], manifest["consecutive_skips"]


def state_of(scaler: LossScaler, best_val: float) -> dict:
    """The part of a manifest that changes from step to step: rows, dropout and rate follow from the step."""
    return {
        "best_val": best_val if best_val < math.inf else None,
        "scaler": scaler.state_dict(),
        "skipped": scaler.skipped_steps,
        "consecutive_skips": scaler.consecutive_skips,
    }


def best_of(manifest: dict) -> float:
    """The best validation loss so far: inf where a run begins, or has not validated yet."""
    best_val = manifest.get("best_val")
    return math.inf if best_val is None else best_val


def about_run(
    settings: Settings,
    asked: dict[str, Any],
    hardware: Hardware,
    kernel: Kernel,
    config: GPTConfig,
    corpus: Corpus,
    tokenizer_fingerprint: str,
    versions: dict,
) -> dict:
    """The part of a manifest that stays the same in a run."""
    return {
        "settings": asked | {"corpus": corpus.name},
        "config": asdict(config),
        "corpus": about_corpus(corpus),
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "compute": hardware._asdict() | {"loss_scaling": settings.loss_scaling, "kernel": kernel.code},
        "versions": versions,
    }


def about_corpus(corpus: Corpus) -> dict:
    """Name, length and sha256 of the text, by which a resumed run recognizes it."""
    return {"name": corpus.name, "characters": len(corpus.text), "sha256": corpus.sha256}
