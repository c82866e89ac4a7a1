"""Decoding with a KV cache draws what the whole context would have drawn."""

import shutil

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
    for name, weight in initial_weights(CONFIG, seed=0).items():  # as of a trained model: larger, and with biases
        noise = 0.2 * random.standard_normal(weight.shape, dtype=np.float32)
        weights[name] = 8 * weight if "ln" not in name and name.endswith("weight") else weight + noise
    gpt.load_weights(weights)
    return gpt.eval()


def whole(gpt, dtype="fp32"):
    """Logits from the whole context each time, as the loop's evaluation computes them."""

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
    tokens = np.random.default_rng(0).integers(0, 50, 16)
    return [tokens[None, :length] for length in lengths]


def test_a_token_at_a_time_gives_the_logits_of_the_whole(gpt):
    cached, uncached = decoder(gpt, "fp32", "fp32"), whole(gpt)
    for tokens in contexts(*range(1, 17)):
        np.testing.assert_allclose(cached(tokens), uncached(tokens), rtol=0, atol=2e-5)  # fp32 sums in another order


def test_what_does_not_go_on_from_before_is_read_from_the_start(gpt):
    cached, uncached = decoder(gpt, "fp32", "fp32"), whole(gpt)
    other = contexts(9)[0].copy()
    other[0, 3] += 1
    for tokens in (*contexts(9, 10), other, *contexts(5, 5, 7, 16, 2)):
        np.testing.assert_allclose(cached(tokens), uncached(tokens), rtol=0, atol=2e-5)


def test_only_new_tokens_are_computed(gpt):
    rows = []
    gpt.h[0].ln_1.register_forward_hook(lambda module, arguments, result: rows.append(len(result)))
    cached = decoder(gpt, "fp32", "fp32")
    for tokens in contexts(5, 6, 7, 3, 4):
        cached(tokens)
    assert rows == [5, 1, 1, 3, 1]


def test_packed_weights_and_rounding_on_load_are_the_same_numbers(gpt):
    with_kernel(gpt)
    packed, masters = decoder(gpt, "bf16", "bf16"), decoder(gpt, "bf16", "fp32")
    for tokens in contexts(3, 4, 5, 16):
        assert np.array_equal(packed(tokens), masters(tokens))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounded_weights_without_our_kernel_too(gpt, dtype):
    cached, exact = decoder(gpt, dtype, "bf16"), decoder(gpt, "fp32", "fp32")
    a, b = (decode(contexts(6)[0]) for decode in (cached, exact))
    assert not np.array_equal(a, b)
    bound = {"bf16": 2**-8, "fp16": 2**-11}[dtype] * 8 * np.abs(b).max()  # of each weight, over a few layers
    assert np.abs(a - b).max() < bound


def test_bf16_with_and_without_our_kernel_agree(gpt):
    plain = decoder(gpt, "bf16", "bf16")
    with_kernel(gpt)
    own = decoder(gpt, "bf16", "bf16")
    for tokens in contexts(6, 7, 8):
        np.testing.assert_allclose(own(tokens), plain(tokens), rtol=0, atol=2e-5)


def test_the_text_at_temperature_zero_equals_that_without_a_cache(gpt):
    """Through several fillings of the context; where the texts part, two logits lay nearer than bf16 can tell."""
    with_kernel(gpt)
    uncached = whole(gpt, "bf16")
    ours = list(sample.generate(decoder(gpt, "bf16", "bf16"), [1], 16, 100, temperature=0))
    seen = []

    def remembered(tokens):
        seen.append(uncached(tokens)[0])
        return seen[-1][None]

    theirs = list(sample.generate(remembered, [1], 16, 100, temperature=0))
    if ours != theirs:
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        assert at >= 3, "from the start another text"
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
