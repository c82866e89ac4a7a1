"""What a resumed run takes from its checkpoint, what it must share with it, and what a changed flag means."""

from dataclasses import asdict
from pathlib import Path

from amp.scaler import DynamicLossScaler
from base.errors import BadInput
from optim.schedule import learning_rate
from settings import MAX_SCALE

SCHEDULE = ("steps", "lr", "min_lr", "warmup")
HARMLESS = ("corpus", "log_every", "eval_every", "save_every", "max_skips")  # training does not depend on these


def check(settings, manifest: dict, corpus, resume_from: Path) -> None:
    """BadInput where the text is another one or no step is left; settings.py has compared the architecture."""
    saved, now = manifest["corpus"], about_corpus(corpus)
    if now["sha256"] != saved["sha256"]:
        was, is_now = (f"{c['name']} ({c['characters']} characters, sha256 {c['sha256'][:12]})" for c in (saved, now))
        raise BadInput(f"--resume {resume_from}: trained on another text: {was}, and this is {is_now}")
    if manifest["step"] >= settings.steps:
        raise BadInput(f"--resume {resume_from}: all {settings.steps} steps are done: ask for more with --steps")


def about_corpus(corpus) -> dict:
    return {"name": corpus.name, "characters": len(corpus.text), "sha256": corpus.sha256}


def notes(settings, asked: dict, hardware, kernel, versions: dict, manifest: dict) -> list[str]:
    """A line for each change since the checkpoint that the rest of the run will feel.

    asked: the settings before derivation, as the manifest has them. versions: of the array libraries.
    """
    was, step, lines = manifest["settings"], manifest["step"], []
    changed = {
        name: f"--{name.replace('_', '-')} {asked[name]} (was {was[name]})"
        for name in asked
        if asked[name] != was[name]
    }
    if schedule := [line for name, line in changed.items() if name in SCHEDULE]:
        min_lr = was["lr"] / 10 if was["min_lr"] is None else was["min_lr"]
        before = learning_rate(step - 1, was["steps"], was["lr"], min_lr, was["warmup"])
        after = learning_rate(step, settings.steps, settings.lr, settings.min_lr, settings.warmup)
        lines.append(
            f"{', '.join(schedule)}: the learning rate goes from {before:.1e} to {after:.1e} at step {step + 1}"
        )
    if "dtype" in changed:
        lines.append(
            f"{changed['dtype']}: weights and moments are fp32 and go on as they are; products round otherwise"
        )
    others = [line for name, line in changed.items() if name not in (*SCHEDULE, *HARMLESS, "dtype")]
    if others:
        lines.append(f"{', '.join(others)}: goes on, but not as the saved run would have")
    then = manifest["compute"] | manifest.get("versions", {})
    now = hardware._asdict() | {"kernel": kernel.code} | versions
    moved = [
        f"{now[key]} (was {then[key]})"
        for key in ("device_name", "kernel", "numpy", "torch")
        if key in then and key in now and then[key] != now[key]  # another backend has other libraries
    ]
    if moved:
        lines.append(f"{', '.join(moved)}: goes on, but perhaps not bit for bit")
    return lines


def build_scaler(settings, manifest: dict) -> DynamicLossScaler:
    """The scaler of a run, as it was at its checkpoint. `manifest` is empty where a run begins.

    With --loss-scaling off the scale is held at 1 and the checks stay: a NaN still skips its step.
    """
    on = settings.loss_scaling == "on"
    scaler = DynamicLossScaler(
        init_scale=settings.init_scale if on else 1.0,
        growth_interval=settings.growth_interval,
        max_scale=MAX_SCALE if on else 1.0,
        max_consecutive_skips=settings.max_skips,
    )
    if manifest:
        restore_scaler(scaler, settings, manifest)
    return scaler


def restore_scaler(scaler: DynamicLossScaler, settings, manifest: dict) -> None:
    """Scale, counters and skips as they were; the growth interval is the one asked for now."""
    if settings.loss_scaling == "on" and manifest["compute"]["loss_scaling"] == "on":
        interval = settings.growth_interval
        tracker = min(manifest["scaler"]["_growth_tracker"], interval - 1)  # the interval may be shorter now
        scaler.load_state_dict(manifest["scaler"] | {"growth_interval": interval, "_growth_tracker": tracker})
    scaler.skipped_steps, scaler.consecutive_skips = manifest["skipped"], manifest["consecutive_skips"]


def state_of(scaler: DynamicLossScaler, best_val: float) -> dict:
    """What changes from step to step besides arrays; rows, dropout and learning rate are functions of the step."""
    return {
        "best_val": best_val if best_val < float("inf") else None,
        "scaler": scaler.state_dict(),
        "skipped": scaler.skipped_steps,
        "consecutive_skips": scaler.consecutive_skips,
    }


def about_run(
    settings, asked: dict, hardware, kernel, config, corpus, tokenizer_fingerprint: str, versions: dict
) -> dict:
    """What stays the same in every manifest of a run."""
    return {
        "settings": asked | {"corpus": corpus.name},
        "config": asdict(config),
        "corpus": about_corpus(corpus),
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "compute": hardware._asdict() | {"loss_scaling": settings.loss_scaling, "kernel": kernel.code},
        "versions": versions,
    }
