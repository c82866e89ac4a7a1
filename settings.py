"""Every setting of train.py in one line: its flag, default, meaning, bounds, and what a resumed run does with it.

A value comes from the default below, then from the preset of a new run or the checkpoint of a resumed one, then from the
command line. request.py puts them together and checks what concerns more than one flag.

on_resume says what happens to a flag when a run goes on from a checkpoint:
    "changes"   saved; another value may be given, and the run then goes on differently from the saved one
    "schedule"  saved; another value may be given, and the learning rate may then jump
    "harmless"  saved; another value may be given, and training does not depend on it
    "fixed"     saved; the weights depend on it, so another value is refused
    "refused"   saved; it speaks of the run's beginning, so it cannot be given
    "again"     not saved; it belongs to one process, and is given again where it is wanted
    "once"      not saved; it says what this process does
"""

from dataclasses import dataclass, fields

from base.dtypes import DTYPES
from base.flags import flag, name_of

MAX_SCALE = 2.0**24  # bf16 gradients do not overflow: without a bound their scale would grow for nothing
LARGEST = 2**20  # the largest size accepted; a larger one is probably a typing error

# Sizes and recipes; a flag on the command line overrides them. "cpu" repeats the defaults of the flags below.
PRESETS: dict[str, dict] = {
    "cpu": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0,
        lr=4e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=250,
    ),
    "gpu": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=32, dropout=0.1,
        lr=1e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=250,
    ),
    "numpy": dict(
        backend="numpy", n_layer=2, n_head=4, n_embd=128, block_size=128, batch_size=8, accumulation=4, dropout=0.0,
        lr=4e-3, warmup=200, steps=2000, weight_decay=0.1, beta2=0.95, eval_every=250,
    ),
    "bpe4k": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, dropout=0.0, tokenizer="bpe",
        lr=1e-3, warmup=100, steps=2000, weight_decay=0.1, beta2=0.99, eval_every=500,
    ),
    "50m": dict(
        n_layer=12, n_head=9, n_embd=576, block_size=512, batch_size=16, dropout=0.1,
        lr=6e-4, warmup=200, steps=5000, weight_decay=0.1, beta2=0.95, eval_every=500,
    ),
    "gpt2": dict(
        n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=4, accumulation=8, dropout=0.1,
        tokenizer="gpt2",
        lr=6e-4, warmup=200, steps=5000, weight_decay=0.1, beta2=0.95, eval_every=500,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Fields are flags: `batch_size` is --batch-size. None means "derived", as the help says."""

    # fmt: off
    preset: str = flag("auto", "sizes and recipe; auto: gpu on CUDA, else cpu, whose values this list shows", ("auto", *PRESETS), on_resume="refused")
    backend: str = flag("torch", "what computes the gradients", ("torch", "numpy", "engine"))
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps (mps is not tested); auto: CUDA where there is one", on_resume="again")
    dtype: str = flag("auto", "compute precision; auto: bf16, or fp16 on CUDA cards without it; adopted: what benchmark.py precision chose", ("auto", "adopted", *DTYPES))
    emulation: str = flag("auto", "compute 16-bit products by rounding and fp32; auto: where the hardware has no 16-bit units", ("auto", "on", "off"))
    kernel: str = flag("auto", "what computes mlp.c_proj in bf16; auto: own where it fits; require: stop where it cannot be built", ("auto", "own", "library", "off", "require"))
    loss_scaling: str = flag("auto", "dynamic loss scale; off: fixed at 1; auto: on below fp32", ("auto", "on", "off"))
    init_scale: float = flag(2.0**15, "first loss scale", at_least=1, at_most=MAX_SCALE, on_resume="refused")
    growth_interval: int = flag(500, "good steps in a row that double the loss scale", at_least=1)
    max_skips: int = flag(100, "skipped steps in a row after which the run gives up", at_least=0, on_resume="harmless")

    steps: int = flag(2000, "optimizer steps; the learning rate falls over all of them", at_least=1, on_resume="schedule")
    batch_size: int = flag(12, "rows of a micro-batch", at_least=1, at_most=LARGEST)
    block_size: int = flag(64, "context length in tokens", at_least=1, at_most=LARGEST, on_resume="fixed")
    accumulation: int = flag(1, "micro-batches whose gradients make one step", at_least=1, at_most=LARGEST)
    n_layer: int = flag(4, "transformer blocks", at_least=1, at_most=LARGEST, on_resume="fixed")
    n_head: int = flag(4, "attention heads of a block", at_least=1, at_most=LARGEST, on_resume="fixed")
    n_embd: int = flag(128, "channels of the residual stream", at_least=1, at_most=LARGEST, on_resume="fixed")
    dropout: float = flag(0.0, "share of activations dropped in training", at_least=0, below=1)

    lr: float = flag(4e-3, "highest learning rate", above=0, on_resume="schedule")
    min_lr: float | None = flag(None, "last learning rate of the cosine; default: a tenth of --lr", at_least=0, on_resume="schedule")
    warmup: int = flag(100, "steps of linear warm-up", at_least=0, on_resume="schedule")
    weight_decay: float = flag(0.1, "AdamW's decay of matrices and embeddings", at_least=0)
    beta1: float = flag(0.9, "AdamW's decay rate of the first moment", at_least=0, below=1)
    beta2: float = flag(0.99, "AdamW's decay rate of the second moment", at_least=0, below=1)
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping", at_least=0)
    seed: int = flag(1337, "first weights, rows and dropout", at_least=0)

    corpus: str = flag("tinyshakespeare", "tinyshakespeare, stdlib, or a text file", on_resume="harmless")
    tokenizer: str = flag("char", "text to tokens", ("char", "byte", "bpe", "gpt2"), on_resume="fixed")
    vocab_size: int | None = flag(None, "tokens that --tokenizer bpe learns, 256 or more; default: 4096", at_least=256, at_most=LARGEST, on_resume="fixed")

    eval_every: int = flag(250, "steps between validations; 0: only at the end", at_least=0, on_resume="harmless")
    log_every: int = flag(10, "steps between log lines", at_least=1, at_most=LARGEST, on_resume="harmless")
    save_every: int | None = flag(None, "steps between checkpoints besides the best and the last; default: --eval-every", at_least=0, on_resume="harmless")
    out: str | None = flag(None, "run folder; default: runs/DATE-TIME-PRESET-DTYPE", on_resume="once")
    resume: str | None = flag(None, "auto (the newest checkpoint of --out) or a run or step folder", on_resume="once")
    overwrite: bool = flag(False, "replace the run that --out holds, once this one has saved", on_resume="once")
    verify_resume: bool = flag(False, "only prove that this run resumes exactly: 4 steps in a temporary folder", on_resume="once")
    compile: bool = flag(False, "torch.compile the model", on_resume="again")
    recompute: bool = flag(False, "compute blocks again in backward: less memory, more time, the same bits", on_resume="again")
    deterministic: bool = flag(False, "only deterministic algorithms; slower on CUDA", on_resume="again")
    # fmt: on


def flags_with(*rules: str) -> list[str]:
    """The fields of Settings whose on_resume is one of `rules`."""
    return [f.name for f in fields(Settings) if f.metadata["on_resume"] in rules]


def saved_flags() -> list[str]:
    """The fields that a checkpoint keeps."""
    return flags_with("changes", "schedule", "harmless", "fixed", "refused")


def switches(settings: Settings) -> list[str]:
    """The flags without a value that no checkpoint keeps: a command that goes on has to give them again."""
    return [name_of(name) for name in flags_with("again") if getattr(settings, name) is True]
