"""GPT-2's shape: its sizes, the table of its parameters and their first values, for every backend."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


# One weight has two uses. As the embedding, its rows are looked up in fp32. As the head, it is an operand of a product,
# so it is rounded. The table has it once, as TIED; HEAD names its second use.
TIED, HEAD = "wte.weight", "lm_head.weight"


def is_operand(name: str) -> bool:
    """Whether a weight or bias goes into a matrix product, so that it and its gradient are rounded.

    GPT-2's names tell: the layers that multiply are called c_attn, c_proj and c_fc. All other parameters are fp32.
    """
    return ".c_" in name or name == HEAD


def has_shadow(name: str) -> bool:
    """Whether a master weight also has a 16-bit copy: operands of products, and the tied weight, since the head is one.

    For the backends that keep such copies from step to step; PyTorch's autocast rounds anew at every use.
    """
    return is_operand(name) or name == TIED


class Parameter(NamedTuple):
    """One row of the table of parameters."""

    name: str  # GPT-2's name, without the prefix "transformer."
    shape: tuple[int, ...]  # matrices are (out, in)
    init: float | str  # the standard deviation of a normal distribution, or "ones" or "zeros"
    decay: bool  # weight decay: matrices and embeddings yes, biases and LayerNorm no


def parameters(config: GPTConfig) -> list[Parameter]:
    """The table of all parameters, in model order. The tied embedding stands once, as wte.weight.

    First weights, weight decay, checkpoints and the rounding of operands all follow this table. A layer that multiplies
    needs a name with ".c_" in it, see is_operand.
    """
    C, std = config.n_embd, 0.02
    residual_std = std / (2 * config.n_layer) ** 0.5  # two projections a layer add to the residual stream
    rows: list[tuple[str, tuple[int, ...], float | str]] = [
        ("wte.weight", (config.vocab_size, C), std),
        ("wpe.weight", (config.block_size, C), std),
    ]
    for layer in range(config.n_layer):
        h = f"h.{layer}."
        rows += [
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
    rows += [("ln_f.weight", (C,), "ones"), ("ln_f.bias", (C,), "zeros")]
    return [Parameter(name, shape, init, decay=len(shape) >= 2) for name, shape, init in rows]


def parameter_count(config: GPTConfig) -> int:
    """Numbers that are trained. The tied embedding counts once."""
    return sum(int(np.prod(p.shape)) for p in parameters(config))


def initial_weights(config: GPTConfig, seed: int) -> dict[str, np.ndarray]:
    """First weights by name, fp32. Each parameter has a random stream of its own, keyed by the seed and its name.

    So all backends start from the same bits, and a deeper model has the same embeddings as a shallower one.
    """
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
            weights[name] = (random.standard_normal(shape) * float(init)).astype(np.float32)
    return weights


def checked_weights(config: GPTConfig, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays in the table's order. ValueError names a tensor that is missing, unknown or of a wrong shape."""
    shapes = {p.name: p.shape for p in parameters(config)}
    if unfit := sorted(shapes.keys() ^ weights.keys()):
        fault = "missing" if unfit[0] in shapes else "unknown"
        raise ValueError(f"the weights do not fit this model: {unfit[0]} is {fault}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(weights[name].shape)}")
    return {name: weights[name] for name in shapes}


def optimizer_groups(config: GPTConfig, by_name: Mapping[str, Any], weight_decay: float) -> list[dict[str, Any]]:
    """The two parameter groups of AdamW: what decays, then what does not, each in model order."""
    groups = []
    for decay in (True, False):
        names = [p.name for p in parameters(config) if p.decay == decay]
        parts = [by_name[name] for name in names]
        groups.append({"params": parts, "param_names": names, "weight_decay": weight_decay if decay else 0.0})
    return groups
