"""Trains a GPT in mixed precision: one flat loop for every backend. `python train.py --help` lists the settings."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from amp.scaler import LossScaler, TooManySkips
from base.errors import run_script, say
from data import tokenizers
from data.batches import Batches, mean_loss
from data.corpus import load_corpus
from model import backends
from model.config import GPTConfig, config_of, initial_weights
from model.generate import generate, start_of_text
from optim.schedule import learning_rate
from request import Request, read
from run import checkpoint, resume
from run.due import due
from run.folder import Saver, open_folder
from run.log import Clock, Log, Row
from run.stop import Stop, Stopped
from run.verify import NotExact, verify_resume
from settings import Settings
from watch import plot, progress, words
from watch.watch import Watch

EVALUATION_TOKENS = 8192  # at a time: enough to be quick, few enough for the logits of a large vocabulary
SAMPLE_TOKENS = 200


class Diverged(RuntimeError):
    """The run made all its steps, but its validation loss is not finite."""


def step(backend: backends.Backend, scaler: LossScaler, batches: Batches, settings: Settings, number: int):
    """One optimizer step on the rows of step `number`. Returns the losses of its micro-batches and the gradient norm.

    Both stay on the device. Reading them makes the host wait, so the caller decides when.
    """
    optimizer, losses = backend.optimizer, []
    for micro in range(settings.accumulation):
        x, y = batches.get("train", number, micro)
        with backend.autocast():
            loss = backend.model(x, y, key=(settings.seed, number, micro))
        scaler.scale(loss / settings.accumulation).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)  # the one host read; before the clip, which would see gradients times the scale
    grad_norm = backend.clip_grad_norm_(settings.clip or math.inf)
    scaler.step(optimizer)  # skipped when a gradient is inf or NaN
    scaler.update()  # backs off after a skip, grows after many good steps
    optimizer.zero_grad(set_to_none=True)
    return losses, grad_norm


def train(request: Request) -> None:
    """One training run, from reading the corpus to a sample of the trained model."""
    settings = request.settings
    with begin(request) as run:
        for number in range(run.first_step, settings.steps):
            lr = learning_rate(number, settings.steps, settings.lr, settings.min_lr, settings.warmup)
            for group in run.backend.optimizer.param_groups:
                group["lr"] = lr
            losses, grad_norm = step(run.backend, run.scaler, run.batches, settings, number)
            run.watch.step()

            done = number + 1
            chores = due(settings, done)
            if not (chores.log or number == run.first_step or run.stop.signal):
                continue
            row = measure(run, done, lr, losses, grad_norm, chores.validate)
            if chores.log:
                run.log.write(row)
            save = chores.save or run.saver.is_best(row.val) or run.stop.signal is not None
            if save:
                run.saver.save(row, run.backend.state, run.scaler, run.watch.event)
            run.watch.row(row)
            run.clock.start(done)
            if run.stop.signal and save:
                break
    end(run, row)


# ---- a run: what train() works with, how it begins and ends


class Run(NamedTuple):
    """All that one training run consists of."""

    request: Request
    config: GPTConfig
    tokenizer: Any
    backend: backends.Backend
    scaler: LossScaler
    batches: Batches
    out: Path
    first_step: int  # steps that were done before this process began
    clock: Clock
    log: Log
    saver: Saver
    watch: Watch
    stop: Stop


@contextmanager
def begin(request: Request) -> Iterator[Run]:
    """Reads text and checkpoint, builds model and scaler, opens the run folder and says what will be trained."""
    settings, hardware, resume_from = request.settings, request.hardware, request.resume_from
    arrays, description, manifest = checkpoint.load(resume_from) if resume_from else ({}, {}, {})
    corpus = load_corpus(settings.corpus, fall_back=not resume_from)
    if resume_from:
        resume.check(settings, manifest, corpus, resume_from)
        tokenizer = tokenizers.load_tokenizer(description)
    else:
        tokenizer = tokenizers.train_tokenizer(settings.tokenizer, corpus.text, settings.vocab_size)
    batches = Batches(tokenizer.encode(corpus.text), settings.block_size, settings.batch_size, settings.seed)
    config = config_of(settings, tokenizer.vocab_size)
    weights = arrays["model"] if resume_from else initial_weights(config, settings.seed)
    backend = backends.module(settings.backend).build(settings, hardware, config, weights)
    scaler = resume.build_scaler(settings, manifest)
    versions = backends.versions()
    first_step, best_val, notes = manifest.get("step", 0), resume.best_of(manifest), [*request.notes, *corpus.notes]
    if resume_from:
        backend.load_optimizer(arrays["optimizer"])
        notes += checkpoint.notes(resume_from, manifest)
        notes += resume.notes(settings, request.asked, hardware, backend.kernel, versions, manifest)
    fingerprint = tokenizers.fingerprint(tokenizer)
    about = resume.about_run(settings, request.asked, hardware, backend.kernel, config, corpus, fingerprint, versions)
    about |= checkpoint.unknown_keys(manifest)
    del arrays, manifest, weights  # they hold three times the model's size, and the run needs them no more
    out, lock = open_folder(settings, hardware.dtype, resume_from, first_step)
    say(words.header(notes, settings, hardware, backend.kernel, config, batches, corpus.name, out, first_step))
    saver = Saver(out, asdict(config), tokenizer.describe(), about, best_val, settings.overwrite)
    watch = Watch([progress.Progress(first_step, settings.steps), plot.Picture(out)])
    with lock, watch, Stop() as stop, Log(out / "log.csv", first_step) as log:
        clock = Clock(log.seconds, first_step, settings.accumulation * settings.batch_size * settings.block_size)
        yield Run(
            request=request, config=config, tokenizer=tokenizer, backend=backend, scaler=scaler, batches=batches,
            out=out, first_step=first_step, clock=clock, log=log, saver=saver, watch=watch, stop=stop,
        )  # fmt: skip


def measure(run: Run, done: int, lr: float, losses: list, grad_norm, validate: bool) -> Row:
    """The row of the step that was just made. Reading the losses waits for the device; the clock stops after that."""
    loss = sum(loss.item() for loss in losses) / len(losses)
    tokens_per_second = run.clock.stop(done)
    windows = run.batches.windows("val", max(1, EVALUATION_TOKENS // run.config.block_size))
    val, val_error = mean_loss(run.backend.evaluate, windows) if validate else (None, None)
    return Row(
        step=done,
        loss=loss,
        val=val,
        val_error=val_error,
        lr=lr,
        grad_norm=float(grad_norm),
        scale=run.scaler.get_scale(),
        skipped=run.scaler.skipped_steps,
        tokens=done * run.clock.tokens_per_step,
        tokens_per_second=tokens_per_second,
        kernel=run.backend.kernel.code,
        seconds=run.clock.seconds,
    )


def end(run: Run, row: Row) -> None:
    """Prints the result and a sample. NotSaved, Stopped or Diverged: the run did not end with a saved model."""
    settings, out = run.request.settings, run.out
    if run.saver.fault:
        raise checkpoint.NotSaved(f"{run.saver.fault}; earlier checkpoints are as they were")
    if run.stop.signal:
        there, go_on = run.saver.where_saved(row), words.go_on(settings, out, row.step)
        raise Stopped(run.stop.signal, f"{there}; go on with: {go_on}")
    if row.val is None or not math.isfinite(row.val):
        raise Diverged(f"the validation loss is {row.val}: lower --lr; the log is {out / 'log.csv'}")
    say(words.end(settings, run.config, run.request.hardware, row, run.clock.mean_tokens_per_second(row.step), out))
    drawn = generate(run.backend.decoder("bf16"), start_of_text(run.tokenizer), run.config.block_size, SAMPLE_TOKENS)
    say("\n" + tokenizers.decode(run.tokenizer, drawn).strip() + "\n")


def start(argv: list[str]) -> None:
    request = read(argv)
    if request.settings.verify_resume:
        print(verify_resume(__file__, argv, request.settings))
    else:
        train(request)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 trained, 1 diverged, out of memory or not saved, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""
    stops = (TooManySkips, Diverged, NotExact, checkpoint.NotSaved)
    too_large = "use a smaller --batch-size with more --accumulation"
    return run_script("train.py", lambda: start(sys.argv[1:] if argv is None else argv), stops, too_large)


if __name__ == "__main__":
    sys.exit(main())
