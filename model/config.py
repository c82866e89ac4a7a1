"""GPT-2's shape: its sizes, the table of its parameters, and their first values."""

import hashlib
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


# The embedding and the head are one weight. As an embedding it is looked up in fp32, as the head it is multiplied.
TIED, HEAD = "wte.weight", "lm_head.weight"


def is_operand(name: str) -> bool:
    """Whether a weight goes into products, so that it and its gradient are rounded."""
    return ".c_" in name or name == HEAD


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
