"""GPT-2's shape: sizes, presets, the table of parameters, where their first values come from, and its FLOP count."""

import hashlib
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class GPTConfig:
    """GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases, tanh GELU, tied input and output embedding."""

    vocab_size: int  # V
    block_size: int  # T, the longest context
    n_layer: int  # L
    n_head: int  # NH
    n_embd: int  # C
    dropout: float = 0.0


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


class Parameter(NamedTuple):
    name: str  # GPT-2's name, without the prefix "transformer."
    shape: tuple[int, ...]  # matrices are (out, in)
    init: float | str  # standard deviation of a normal distribution, or "ones" or "zeros"
    decay: bool  # weight decay: matrices yes, biases and LayerNorm no


def parameters(config: GPTConfig) -> list[Parameter]:
    """All parameters in model order. The tied embedding stands once, as wte.weight."""
    C, std = config.n_embd, 0.02
    residual_std = std / (2 * config.n_layer) ** 0.5  # two projections a layer add to the residual stream
    shapes: list[tuple[str, tuple[int, ...], float | str]] = [
        ("wte.weight", (config.vocab_size, C), std),
        ("wpe.weight", (config.block_size, C), std),
    ]
    for layer in range(config.n_layer):
        h = f"h.{layer}."
        shapes += [
            (h + "ln_1.weight", (C,), "ones"),
            (h + "ln_1.bias", (C,), "zeros"),
            (h + "attn.c_attn.weight", (3 * C, C), std),
            (h + "attn.c_attn.bias", (3 * C,), "zeros"),
            (h + "attn.c_proj.weight", (C, C), residual_std),
            (h + "attn.c_proj.bias", (C,), "zeros"),
            (h + "ln_2.weight", (C,), "ones"),
            (h + "ln_2.bias", (C,), "zeros"),
            (h + "mlp.c_fc.weight", (4 * C, C), std),
            (h + "mlp.c_fc.bias", (4 * C,), "zeros"),
            (h + "mlp.c_proj.weight", (C, 4 * C), residual_std),
            (h + "mlp.c_proj.bias", (C,), "zeros"),
        ]
    shapes += [("ln_f.weight", (C,), "ones"), ("ln_f.bias", (C,), "zeros")]
    return [Parameter(name, shape, init, decay=len(shape) >= 2) for name, shape, init in shapes]


def parameter_count(config: GPTConfig) -> int:
    return sum(int(np.prod(p.shape)) for p in parameters(config))


def initial_weights(config: GPTConfig, seed: int) -> dict[str, np.ndarray]:
    """Name -> fp32 array. Each parameter has a stream of its own, keyed by seed and name, so that all backends start
    from the same bits and a deeper model shares its embeddings' first values with a shallower one."""
    weights = {}
    for name, shape, init, _ in parameters(config):
        if init == "ones":
            weights[name] = np.ones(shape, dtype=np.float32)
        elif init == "zeros":
            weights[name] = np.zeros(shape, dtype=np.float32)
        else:
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            # RandomState's streams are frozen by NumPy's policy; those of Generator may change between versions.
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, key])))
            weights[name] = (random.standard_normal(shape) * init).astype(np.float32)
    return weights


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations of forward and backward per token: 6 per weight of a matrix product, plus attention.

    Source: Chowdhery et al. 2022, "PaLM", appendix B. Positions are looked up, not multiplied; the tied head is.
    """
    multiplied = parameter_count(config) - config.block_size * config.n_embd
    return 6 * multiplied + 12 * config.n_layer * config.n_embd * config.block_size


def memory(config: GPTConfig, batch_size: int, dtype: str, device: str) -> dict[str, int]:
    """Bytes that a training step holds when its forward pass is done, by the table of amp/policy.py; without dropout.

    Weights, gradients and moments are fp32 in every precision. What 16 bits make smaller are the activations that wait
    for the backward pass; what they add is a copy of every matrix that is multiplied. device: "cuda", or "cpu", where
    attention multiplies in fp32.
    """
    count, C, V, bytes_of = parameter_count(config), config.n_embd, config.vocab_size, 4 if dtype == "fp32" else 2
    multiplied = sum(int(np.prod(p.shape)) for p in parameters(config) if len(p.shape) == 2 and p.name != "wpe.weight")
    norm = 4 * C + 2 * 4  # its input, from the residual stream, mean and deviation, in fp32
    # Operands of products: LayerNorms' outputs (C each), attention's output (C), GELU's input (4 C) and output (4 C).
    products = 11 * C * bytes_of
    # q, k, v (3 C) and the output for attention's own backward, which is the one above unless that is of another dtype;
    # and the softmax's normaliser of each head, in fp32.
    widened = device == "cpu" and dtype != "fp32"
    attention = (4 * C * 4 if widened else 3 * C * bytes_of) + 4 * config.n_head
    block = 2 * norm + products + attention
    head = norm + C * bytes_of + 4 * V  # log-probabilities in fp32
    ids = 2 * 8  # token and target, int64
    tokens = batch_size * config.block_size
    return {
        "weights": 4 * count,
        "16-bit copies": 0 if dtype == "fp32" else 2 * multiplied,
        "gradients": 4 * count,
        "moments": 8 * count,
        "activations": tokens * (config.n_layer * block + head + ids),
    }


# Dense 16-bit matrix product peaks in TFLOP/s by the vendors' data sheets, for model FLOP utilisation (MFU).
# The first entry that is a word of the card's name counts; cards that are not here print "n/a".
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A40": 150, "A10G": 70, "A10": 125,
    "L40S": 362, "L4": 121, "T4": 65, "V100": 125, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of the device in a 16-bit dtype, or None where it is not known (fp32 runs too)."""
    if dtype == "fp32":
        return None
    if "Laptop" in device_name:  # slower chips under the same names
        return None
    known = (tflops for name, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next((tflops * 1e12 for tflops in known), None)
