"""What a model costs: its FLOPs per token, the memory of a training step, and the peaks of devices."""

import re

import numpy as np

from model.config import GPTConfig, parameter_count, parameters


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
