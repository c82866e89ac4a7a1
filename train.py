"""Trains a GPT in mixed precision: one flat loop for every backend. `python train.py --help` lists the settings."""

import math
import os
import platform
import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from amp.scaler import DynamicLossScaler, TooManySkips
from base.errors import run_script, say
from data import tokenizers
from data.batches import Batches, mean_loss
from data.corpus import load_corpus
from model import backends
from model.backends import Backend
from model.config import GPTConfig, initial_weights, parameter_count
from model.cost import flops_per_token, peak_flops
from model.generate import generate, start_of_text
from optim.schedule import learning_rate
from run import checkpoint, resume
from run.folder import open_folder
from run.log import Log, Row, read_log
from run.stop import Stop, Stopped
from run.verify import NotExact, verify_resume
from settings import MAX_SCALE, Request, Settings, read
from watch.plot import plot
from watch.progress import Progress, thousands

EVALUATION_TOKENS = 8192  # at a time: enough to be quick, few enough for the logits of a large vocabulary
SAMPLE_TOKENS = 200


class Diverged(RuntimeError):
    """The run came to its end, but not to a model."""


def step(backend: Backend, scaler: DynamicLossScaler, batches: Batches, settings: Settings, number: int):
    """One optimizer step on the rows of step `number`. Returns the losses of its micro-batches and the gradient norm.

    Both are as the backend has them, on the device: to read them is for those who need the numbers.
    """
    optimizer, losses = backend.optimizer, []
    for micro in range(settings.accumulation):
        x, y = batches.get("train", number, micro)
        with backend.autocast():
            loss = backend.model(x, y, key=(settings.seed, number, micro))
        scaler.scale(loss / settings.accumulation).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)  # the one host read; before the clip, or the threshold is off by the scale
    grad_norm = backend.clip_grad_norm_(settings.clip or math.inf)
    scaler.step(optimizer)  # skipped when a gradient is inf or NaN
    scaler.update()  # backs off after a skip, grows after many good steps
    optimizer.zero_grad(set_to_none=True)
    return losses, grad_norm


def train(request: Request) -> None:
    """One training run, from reading the corpus to a sample of the trained model."""
    settings, hardware, resume_from = request.settings, request.hardware, request.resume_from
    arrays, description, manifest = checkpoint.load(resume_from) if resume_from else ({}, {}, {})
    corpus = load_corpus(settings.corpus, fall_back=not manifest)
    if manifest:
        resume.check(settings, manifest, corpus, resume_from)
        tokenizer = tokenizers.load(description)
    else:
        tokenizer = tokenizers.train(settings.tokenizer, corpus.text, settings.vocab_size)
    batches = Batches(tokenizer.encode(corpus.text), settings.block_size, settings.batch_size, settings.seed)
    sizes = {name: getattr(settings, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout")}
    config = GPTConfig(vocab_size=tokenizer.vocab_size, **sizes)
    weights = arrays["model"] if manifest else initial_weights(config, settings.seed)
    backend = backends.module(settings.backend).build(settings, hardware, config, weights)
    scaler = build_scaler(settings)
    versions = {"python": platform.python_version()} | backends.versions()
    first_step, best_val, notes = 0, math.inf, [*request.notes, *corpus.notes]
    if manifest:
        backend.load_optimizer(arrays["optimizer"])
        resume.restore_scaler(scaler, settings, manifest)
        first_step = manifest["step"]
        best_val = math.inf if manifest["best_val"] is None else manifest["best_val"]
        notes += resume.notes(settings, request.asked, hardware, backend.kernel, versions, manifest)
    about = resume.about_run(
        settings, request.asked, hardware, backend.kernel, config, corpus, tokenizers.fingerprint(tokenizer), versions
    )
    del arrays, manifest, weights  # three times the model's size, which a whole run need not hold
    out, lock = open_folder(settings, hardware.dtype, resume_from, first_step)
    print_header(settings, hardware, backend.kernel, config, corpus, batches, out, first_step, notes)

    optimizer = backend.optimizer
    tokens_per_step = settings.accumulation * settings.batch_size * settings.block_size
    evaluation_rows = max(1, EVALUATION_TOKENS // settings.block_size)
    with (
        lock,
        drawing(out),
        Stop() as stop,
        Log(out / "log.csv", first_step) as log,
        Progress(first_step, settings.steps) as progress,
    ):
        seconds, started, last_row_at = log.seconds, time.perf_counter(), first_step
        replace = settings.overwrite  # with the first checkpoint: until then the old run stays
        saved, unsaved = None, None  # the step that was saved last; why the last save failed, if it did
        for number in range(first_step, settings.steps):
            lr = learning_rate(number, settings.steps, settings.lr, settings.min_lr, settings.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            losses, grad_norm = step(backend, scaler, batches, settings, number)
            progress.advance()

            done, first, last = number + 1, number == first_step, number + 1 == settings.steps
            validate = last or is_due(settings.eval_every, done)
            save = last or is_due(settings.save_every, done)
            to_log = validate or save or done == 1 or is_due(settings.log_every, done)  # the same rows after a resume
            if not (to_log or first or stop.signal):
                continue
            mean = sum(loss.item() for loss in losses) / settings.accumulation
            elapsed = time.perf_counter() - started  # of training alone, without validation, logging and saving
            seconds += elapsed
            val, val_error, is_best = None, None, False
            if validate:
                val, val_error = mean_loss(backend.evaluate, batches.windows("val", evaluation_rows))
                is_best = val < best_val  # false for NaN
            row = Row(
                step=done,
                loss=mean,
                val=val,
                val_error=val_error,
                lr=lr,
                grad_norm=float(grad_norm),
                scale=scaler.get_scale(),
                skipped=scaler.skipped_steps,
                tokens=done * tokens_per_step,
                tokens_per_second=(done - last_row_at) * tokens_per_step / elapsed,
                kernel=backend.kernel.code,
                seconds=seconds,
            )
            if to_log:
                log.write(row)
            diverged = not math.isfinite(mean if val is None else val)  # must not push out the last good checkpoint
            save = save or is_best or stop.signal is not None  # a signal from here on is for the next step
            if save and not diverged:
                best, state = val if is_best else best_val, backend.state()
                manifest = about | resume.state_of(scaler, best)
                try:
                    checkpoint.save(out, done, state, asdict(config), tokenizer.describe(), manifest, is_best, replace)
                    best_val, replace, saved, unsaved = best, False, done, None
                except checkpoint.NotSaved as error:  # a full disk, say: the run goes on, its last save decides
                    unsaved = str(error)
                    progress.note(f"note    {unsaved}")
            progress.show(row)  # after saving: a terminal that went away must not cost the checkpoint
            started, last_row_at = time.perf_counter(), done
            if stop.signal and save:
                break

    if unsaved:
        raise checkpoint.NotSaved(f"{unsaved}; earlier checkpoints are as they were")
    if stop.signal:
        there = f"{out / f'step-{saved}'} is saved" if saved == done else f"step {done} has a loss of {mean}: not saved"
        raise Stopped(stop.signal, f"{there}; go on with: {go_on(settings, out, done)}")
    speed = (settings.steps - first_step) * tokens_per_step / (seconds - log.seconds)
    if not math.isfinite(row.val):
        raise Diverged(f"the validation loss is {row.val}: lower --lr; the log is {out / 'log.csv'}")
    print_end(settings, config, hardware, row, speed, out)
    print_sample(config, backend, tokenizer)


def is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def build_scaler(settings: Settings) -> DynamicLossScaler:
    """With --loss-scaling off the scale is held at 1 and the checks stay: a NaN still skips its step."""
    on = settings.loss_scaling == "on"
    return DynamicLossScaler(
        init_scale=settings.init_scale if on else 1.0,
        growth_interval=settings.growth_interval,
        max_scale=MAX_SCALE if on else 1.0,
        max_consecutive_skips=settings.max_skips,
    )


# ---- what a person sees before and after


def print_header(
    settings,
    hardware,
    kernel,
    config: GPTConfig,
    corpus,
    batches: Batches,
    out: Path,
    first_step: int,
    notes: list[str],
) -> None:
    for note in notes:
        say(f"note    {note}")
    train_tokens, val_tokens = (len(batches.tokens[split]) for split in ("train", "val"))
    if settings.loss_scaling == "on":
        scaling = f"dynamic loss scale, doubles after {settings.growth_interval} good steps, halves after a bad one"
    else:
        scaling = "off: scale fixed at 1, inf and NaN still skip their step"
    say(
        f"model   {parameter_count(config):,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} channels, context {config.block_size}, vocabulary {config.vocab_size}\n"
        f"device  {hardware.device}: {hardware.device_name}\n"
        f"dtype   {hardware.dtype}: {hardware.how}\n"
        f"kernel  mlp.c_proj: {kernel.how}\n"
        f"scaling {scaling}\n"
        f"data    {corpus.name}: {train_tokens:,} training and {val_tokens:,} validation tokens, seed {settings.seed}\n"
        f"run     steps {first_step + 1} to {settings.steps}, "
        f"{settings.accumulation} x {settings.batch_size} x {config.block_size} tokens each, in {out}"
    )


def print_end(settings, config: GPTConfig, hardware, row: Row, speed: float, out: Path) -> None:
    peak = peak_flops(hardware.device_name, hardware.dtype)
    mfu = f"{speed * flops_per_token(config) / peak:.1%}" if peak else "n/a (peak of this device not known)"
    python, sampler, folder = (
        shlex.quote(shown(path)) for path in (sys.executable, Path(__file__).with_name("sample.py"), str(out))
    )
    say(
        f"done    val {row.val:.4f} ± {row.val_error:.4f} | {thousands(speed)} tok/s | MFU {mfu}\n"
        f"saved   {out / f'step-{row.step}'}, {out / 'log.csv'}, {out / 'loss.png'}\n"
        f"go on   {go_on(settings, out, row.step)}\n"
        f"sample  {python} {sampler} --checkpoint {folder}"
    )


def go_on(settings: Settings, out: Path, done: int) -> str:
    """The command that continues a run."""
    python, script, folder = (shlex.quote(shown(path)) for path in (sys.executable, __file__, str(out)))
    more = [f"--steps {2 * done}"] if done == settings.steps else []
    return " ".join([python, script, "--resume", folder, *more, *switches(settings)])


def switches(settings: Settings) -> list[str]:
    """Flags without a value that no checkpoint keeps."""
    return [f"--{name}" for name in ("compile", "recompute", "deterministic") if getattr(settings, name)]


def shown(path: str | Path) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def print_sample(config: GPTConfig, backend, tokenizer) -> None:
    drawn = generate(backend.decoder("bf16"), start_of_text(tokenizer), config.block_size, SAMPLE_TOKENS)
    say("\n" + tokenizers.decode(tokenizer, drawn).strip() + "\n")


@contextmanager
def drawing(out: Path):
    """Draws loss.png when the block ends, however it ends. A picture is not worth a run: what goes wrong is a note."""
    try:
        yield
    finally:
        try:
            if (out / "log.csv").exists():  # else it ended before there was a row
                plot(read_log(out / "log.csv"), out / "loss.png", out.name)
        except Exception as error:
            say(f"note    no picture: {error}")


def start(argv: list[str]) -> None:
    request = read(argv)
    if request.settings.verify_resume:
        flags = [word for word in argv if word != "--verify-resume"]
        kept_by_nobody = ["--device", request.settings.device, *switches(request.settings)]
        print(verify_resume(__file__, flags, kept_by_nobody))
    else:
        train(request)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 trained, 1 diverged, out of memory or not saved, 2 bad input, 130 Ctrl-C, 143 SIGTERM."""
    try:
        return run_script("train.py", lambda: start(sys.argv[1:] if argv is None else argv))
    except Stopped as stopped:
        print(f"train.py: {stopped}", file=sys.stderr)
        return stopped.status
    except (TooManySkips, Diverged, NotExact, checkpoint.NotSaved) as error:
        print(f"train.py: stopped: {error}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:
        # NumPy's MemoryError has a class of its own; torch.OutOfMemoryError on CUDA, a plain RuntimeError on a CPU
        out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        print("train.py: out of memory: use a smaller --batch-size with more --accumulation", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
