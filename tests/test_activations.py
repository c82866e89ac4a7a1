"""The formula of a step's memory against a count of every tensor that autograd keeps."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.activations import activations, kept_bytes
from model import minigpt
from model.config import GPTConfig
from model.cost import memory
from model.minigpt import MiniGPT
from settings import PRESETS

TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("preset", ["tiny", *PRESETS])
def test_activations_counted_and_computed_are_the_same_bytes(preset, dtype):
    sizes = {key: PRESETS.get(preset, {}).get(key) for key in ("block_size", "n_layer", "n_head", "n_embd")}
    config = TINY if preset == "tiny" else GPTConfig(vocab_size=50257, **sizes)
    assert activations(config, 3, dtype) == memory(config, 3, dtype, "cpu")["activations"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_where_attention_multiplies_16_bits_its_operands_are_kept_in_16_bits(dtype, monkeypatch):
    monkeypatch.setattr(
        minigpt, "attention", lambda q, k, v, p: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
    )
    assert activations(TINY, 3, dtype) == memory(TINY, 3, dtype, "cuda")["activations"]


def test_counting_without_content_is_counting():
    """Real tensors hold as much as fake ones: the same count of a forward pass that computes."""
    gpt = MiniGPT(TINY)
    assert 3 * (kept_bytes(gpt, 2, "bf16") - kept_bytes(gpt, 1, "bf16")) == activations(TINY, 3, "bf16")


def test_16_bit_copies_are_those_that_autocast_keeps():
    """What does not grow with the batch: in fp32 the matrices, in bf16 their copies of half the size; else the same."""
    gpt = MiniGPT(TINY)
    fp32, bf16 = (2 * kept_bytes(gpt, 1, dtype) - kept_bytes(gpt, 2, dtype) for dtype in ("fp32", "bf16"))
    assert fp32 - bf16 == memory(TINY, 1, "bf16", "cpu")["16-bit copies"]


def test_the_state_of_a_step_is_what_the_optimizer_holds():
    gpt = MiniGPT(TINY)
    optimizer = torch.optim.AdamW(gpt.parameters())
    gpt(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).mean().backward()
    optimizer.step()
    held = {
        "weights": list(gpt.parameters()),
        "gradients": [p.grad for p in gpt.parameters()],
        "moments": [kept[m] for kept in optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")],
    }
    computed = memory(TINY, 1, "bf16", "cpu")
    for name, tensors in held.items():
        assert sum(t.numel() * t.element_size() for t in tensors) == computed[name], name
