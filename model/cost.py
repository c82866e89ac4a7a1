"""What a model costs: its FLOPs per token, the memory of a training step, and the peaks of devices."""

import re

import numpy as np

from model.config import GPTConfig, parameter_count, parameters


def flops_per_token(config: GPTConfig) -> int:
    """FLOPs of forward and backward per token: 6 for each weight of a matrix product, plus attention's products.

    Source: Chowdhery et al. 2022, "PaLM", appendix B. Positions are looked up, not multiplied; the tied head is.
    """
    multiplied = parameter_count(config) - config.block_size * config.n_embd
    return 6 * multiplied + 12 * config.n_layer * config.n_embd * config.block_size


def memory(config: GPTConfig, batch_size: int, dtype: str, device: str) -> dict[str, int]:
    """Bytes that a step of the torch backend holds when its forward pass is done, by kind of array; without dropout.

    It follows the table of amp/policy.py. Weights, gradients and moments are fp32 in every precision. 16 bits make the
    activations smaller that wait for the backward pass, and add a copy of every matrix that is multiplied. `device` is
    "cuda" or "cpu"; on a CPU attention multiplies in fp32.
    """
    count, C, V = parameter_count(config), config.n_embd, config.vocab_size
    bytes_of = 4 if dtype == "fp32" else 2  # of an operand
    multiplied = sum(int(np.prod(p.shape)) for p in parameters(config) if len(p.shape) == 2 and p.name != "wpe.weight")
    norm = 4 * C + 2 * 4  # its input, from the residual stream, mean and deviation, in fp32
    # Operands of products: LayerNorms' outputs (C each), attention's output (C), GELU's input (4 C) and output (4 C).
    products = 11 * C * bytes_of
    # Attention's backward keeps q, k, v (3 C), its output (C; the same array as above if the dtype is the same), and
    # the softmax's normaliser of each head, in fp32.
    widened = device == "cpu" and dtype != "fp32"
    attention = (4 * C * 4 if widened else 3 * C * bytes_of) + 4 * config.n_head
    block = 2 * norm + products + attention
    head = norm + C * bytes_of + 4 * V  # V log-probabilities in fp32
    token_and_target = 2 * 8  # int64
    tokens = batch_size * config.block_size
    return {
        "weights": 4 * count,
        "16-bit copies": 0 if dtype == "fp32" else 2 * multiplied,
        "gradients": 4 * count,
        "moments": 8 * count,
        "activations": tokens * (config.n_layer * block + head + token_and_target),
    }


# Dense 16-bit matrix product peaks in TFLOP/s by the vendors' data sheets, for model FLOP utilisation (MFU).
# The first entry that is a word of the card's name counts. For cards that are not in this list, MFU is "n/a".
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A40": 150, "A10G": 70, "A10": 125,
    "L40S": 362, "L4": 121, "T4": 65, "V100": 125, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of the device in a 16-bit dtype. None where it is not known, and for fp32."""
    if dtype == "fp32" or "Laptop" in device_name:  # laptops have slower chips under the same names
        return None
    matching = (tflops for name, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next((tflops * 1e12 for tflops in matching), None)
