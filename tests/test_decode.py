"""Decoding with a KV cache gives the logits and the text that the whole context gives."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
from amp.autocast import autocast
from csrc import build
from model.bf16_linear import bf16_linear
from model.config import GPTConfig, initial_weights
from model.decode import decoder
from model.minigpt import MiniGPT

CONFIG = GPTConfig(vocab_size=50, block_size=16, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def gpt():
    gpt = MiniGPT(CONFIG)
    random = np.random.default_rng(0)
    weights = {}
    for name, weight in initial_weights(CONFIG, seed=0).items():  # larger and with biases, as after training
        noise = 0.2 * random.standard_normal(weight.shape, dtype=np.float32)
        weights[name] = 8 * weight if "ln" not in name and name.endswith("weight") else weight + noise
    gpt.load_weights(weights)
    return gpt.eval()


def without_cache(gpt, dtype="fp32"):
    """A function that computes logits from the whole context each time, as the training loop's evaluation does."""

    @torch.no_grad()
    def logits(tokens):
        with autocast("cpu", dtype, emulated=True):
            return gpt(torch.from_numpy(tokens))[:, -1].numpy()

    return logits


def with_kernel(gpt):
    if shutil.which(build.compiler()) is None:
        pytest.skip("no C++ compiler")
    build.load()
    for block in gpt.h:
        block.mlp.c_proj.op = bf16_linear


def contexts(*lengths):
    """The first tokens of one random text, so many of them for each length."""
    tokens = np.random.default_rng(0).integers(0, 50, 16)
    return [tokens[None, :length] for length in lengths]


def test_a_token_at_a_time_gives_the_logits_of_the_whole_context(gpt):
    cached, uncached = decoder(gpt, "fp32", "fp32"), without_cache(gpt)
    for tokens in contexts(*range(1, 17)):
        np.testing.assert_allclose(cached(tokens), uncached(tokens), rtol=0, atol=2e-5)  # fp32 sums in another order


def test_tokens_that_do_not_continue_the_last_call_are_read_from_the_start(gpt):
    cached, uncached = decoder(gpt, "fp32", "fp32"), without_cache(gpt)
    other = contexts(9)[0].copy()
    other[0, 3] += 1
    for tokens in (*contexts(9, 10), other, *contexts(10, 5, 5, 7, 16, 2)):  # 10: as long as other and one more
        np.testing.assert_allclose(cached(tokens), uncached(tokens), rtol=0, atol=2e-5)


def test_only_new_tokens_are_computed(gpt):
    computed = []
    gpt.h[0].ln_1.register_forward_hook(lambda module, arguments, result: computed.append(len(result)))
    cached = decoder(gpt, "fp32", "fp32")
    for tokens in contexts(5, 6, 7, 3, 4):
        cached(tokens)
    assert computed == [5, 1, 1, 3, 1]


def test_packed_weights_and_rounding_on_load_are_the_same_numbers(gpt):
    with_kernel(gpt)
    packed, masters = decoder(gpt, "bf16", "bf16"), decoder(gpt, "bf16", "fp32")
    for tokens in contexts(3, 4, 5, 16):
        assert np.array_equal(packed(tokens), masters(tokens))


def test_every_linear_layer_and_the_head_go_through_our_kernel(gpt, monkeypatch):
    with_kernel(gpt)
    kernels, dtypes = build.load(), []

    def counted(x, weight, bias=None):
        dtypes.append(weight.dtype)
        return kernels.bf16_linear(x, weight, bias)

    monkeypatch.setattr(build, "load", lambda: SimpleNamespace(bf16_linear=counted))
    for weights, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        dtypes.clear()
        decoder(gpt, "bf16", weights)(contexts(3)[0])
        assert dtypes == [dtype] * (4 * CONFIG.n_layer + 1), weights


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_our_kernel_too_weights_are_rounded(gpt, dtype):
    rounded, exact = (decoder(gpt, name, "bf16")(contexts(6)[0]) for name in (dtype, "fp32"))
    assert not np.array_equal(rounded, exact)
    bound = {"bf16": 2**-8, "fp16": 2**-11}[dtype] * 8 * np.abs(exact).max()  # of each weight, over a few layers
    assert np.abs(rounded - exact).max() < bound


def test_bf16_with_and_without_our_kernel_agree(gpt):
    with_pytorch = decoder(gpt, "bf16", "bf16")
    with_kernel(gpt)
    with_ours = decoder(gpt, "bf16", "bf16")
    for tokens in contexts(6, 7, 8):
        np.testing.assert_allclose(with_ours(tokens), with_pytorch(tokens), rtol=0, atol=2e-5)


def test_the_text_at_temperature_zero_equals_that_without_a_cache(gpt):
    """The text is longer than several contexts. Where the texts differ, two logits lay nearer than bf16 can tell."""
    with_kernel(gpt)
    uncached = without_cache(gpt, "bf16")
    ours = list(sample.generate(decoder(gpt, "bf16", "bf16"), [1], 16, 100, temperature=0))
    seen = []

    def remembered(tokens):
        seen.append(uncached(tokens)[0])
        return seen[-1][None]

    theirs = list(sample.generate(remembered, [1], 16, 100, temperature=0))
    if ours != theirs:
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        assert at >= 3, "the texts differ from the start"
        assert seen[at][theirs[at]] - seen[at][ours[at]] < 2**-6 * np.abs(seen[at]).max()


def test_the_backend_hands_it_out():
    from model import torch_backend
    from model.backends import Hardware
    from settings import Settings

    hardware, weights = Hardware("cpu", "this CPU", "fp32", False, ""), initial_weights(CONFIG, 0)
    backend = torch_backend.build(Settings(), hardware, CONFIG, weights)
    tokens = contexts(5)[0]
    expected = MiniGPT.from_weights(CONFIG, weights).eval()(torch.from_numpy(tokens))[:, -1].detach().numpy()
    for logits in (backend.decoder("fp32"), torch_backend.sampler(hardware, CONFIG, weights, "fp32").logits):
        np.testing.assert_allclose(logits(tokens), expected, rtol=0, atol=2e-5)
