"""Every setting of train.py: its flag, its default, its meaning."""

from dataclasses import dataclass

from base.flags import flag

MAX_SCALE = 2.0**24  # bf16 gradients do not overflow: without a bound their scale would grow for nothing

# Settings of train.py by preset; flags on the command line go before these.
PRESETS = {
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
        lr=6e-4, warmup=200, steps=5000, weight_decay=0.1, beta2=0.95, eval_every=500,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Fields are flags: `batch_size` is --batch-size. None means "derived", as the help says."""

    preset: str = flag(
        "auto", "sizes and recipe; auto: gpu on CUDA, else cpu, whose values this list shows", ("auto", *PRESETS)
    )
    backend: str = flag("torch", "what computes the gradients", ("torch", "numpy", "engine"))
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps (mps is not tested); auto: CUDA where there is one")
    dtype: str = flag(
        "auto",
        "compute precision; auto: bf16, or fp16 on CUDA cards without it; adopted: what benchmark.py precision chose",
        ("auto", "adopted", "fp32", "bf16", "fp16"),
    )
    emulation: str = flag(
        "auto", "compute 16-bit products by rounding and fp32; auto: where units lack", ("auto", "on", "off")
    )
    kernel: str = flag(
        "auto",
        "what computes mlp.c_proj in bf16; auto: own where it fits; require: stop where it cannot be built",
        ("auto", "own", "library", "off", "require"),
    )
    loss_scaling: str = flag("auto", "dynamic loss scale; off: fixed at 1; auto: on below fp32", ("auto", "on", "off"))
    init_scale: float = flag(2.0**15, "first loss scale")
    growth_interval: int = flag(500, "good steps in a row that double the loss scale")
    max_skips: int = flag(100, "skipped steps in a row after which the run gives up")

    steps: int = flag(2000, "optimizer steps; the learning rate falls over all of them")
    batch_size: int = flag(12, "rows of a micro-batch")
    block_size: int = flag(64, "context length in tokens")
    accumulation: int = flag(1, "micro-batches whose gradients make one step")
    n_layer: int = flag(4, "transformer blocks")
    n_head: int = flag(4, "attention heads of a block")
    n_embd: int = flag(128, "channels of the residual stream")
    dropout: float = flag(0.0, "share of activations dropped in training")

    lr: float = flag(4e-3, "highest learning rate")
    min_lr: float | None = flag(None, "last learning rate of the cosine; default: a tenth of --lr")
    warmup: int = flag(100, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's decay of matrices and embeddings")
    beta1: float = flag(0.9, "AdamW's decay rate of the first moment")
    beta2: float = flag(0.99, "AdamW's decay rate of the second moment")
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping")
    seed: int = flag(1337, "first weights, rows and dropout")

    corpus: str = flag("tinyshakespeare", "tinyshakespeare, stdlib, or a text file")
    tokenizer: str = flag("char", "text to tokens", ("char", "byte", "bpe", "gpt2"))
    vocab_size: int | None = flag(None, "tokens that --tokenizer bpe learns, 256 or more; default: 4096")

    eval_every: int = flag(250, "steps between validations; 0: only at the end")
    log_every: int = flag(10, "steps between log lines")
    save_every: int | None = flag(
        None, "steps between checkpoints besides the best and the last; default: --eval-every"
    )
    out: str | None = flag(None, "run folder; default: runs/DATE-TIME-PRESET-DTYPE")
    resume: str | None = flag(None, "auto (the newest checkpoint of --out) or a run or step folder")
    overwrite: bool = flag(False, "replace the run that --out holds, once this one has saved")
    verify_resume: bool = flag(False, "only prove that this run resumes exactly: 4 steps in a temporary folder")
    compile: bool = flag(False, "torch.compile the model")
    recompute: bool = flag(False, "compute blocks again in backward: less memory, more time, the same bits")
    deterministic: bool = flag(False, "only deterministic algorithms; slower on CUDA")
