"""The model in NumPy: its slopes by finite differences, and the precision in which it computes and keeps numbers."""

import numpy as np
import pytest
import torch

from amp.autocast import autocast
from amp.formats import narrow, round_to
from data.batches import Batches
from data.corpus import load_corpus
from data.tokenizers import train_tokenizer
from model import numpy_gpt
from model.config import HEAD, TIED, GPTConfig, initial_weights, is_operand
from model.minigpt import MiniGPT
from tests.conftest import CONFIG, batches, build, gradients, random_weights, train_steps

LOW = pytest.mark.parametrize("low", ["bf16", "fp16"])


def tied(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights as the model takes them: the tied one under both of its names."""
    return weights | {HEAD: weights[TIED]}


def summed(dweights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Both gradients of the tied weight in one."""
    both = dweights[TIED] + dweights[HEAD]
    return {name: g for name, g in dweights.items() if name != HEAD} | {TIED: both}


# ---- the mathematics, in fp64


def test_every_gradient_is_the_slope_of_the_loss_along_a_random_direction():
    """Needs no oracle, and so covers dropout, whose masks no other backend has."""
    config = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=16, dropout=0.2)
    x, y = batches(3).get("train", 0, 0)
    weights, step = random_weights(np.float64), 1e-5

    def forward(moved):
        losses, cache = numpy_gpt.forward(tied(weights | moved), x, y, config, random=np.random.default_rng(5))
        return losses.mean(), cache

    _, cache = forward({})
    dweights = summed(numpy_gpt.backward(tied(weights), np.full(3, 1 / 3), cache, config))
    for name, w in weights.items():
        direction = np.random.default_rng(1).standard_normal(w.shape)
        up, down = (forward({name: w + side * step * direction})[0] for side in (1, -1))
        slope, claimed = (up - down) / (2 * step), (dweights[name] * direction).sum()
        assert claimed == pytest.approx(slope, rel=1e-6, abs=1e-9), name


def test_a_later_token_does_not_change_earlier_ones():
    weights = tied(random_weights(np.float64))
    x, _ = batches(2).get("train", 0, 0)
    before = numpy_gpt.hidden(weights, x, CONFIG)[0].reshape(2, 8, -1)
    for position in range(1, 8):
        changed = x.copy()
        changed[:, position] = (changed[:, position] + 1) % 11
        after = numpy_gpt.hidden(weights, changed, CONFIG)[0].reshape(2, 8, -1)
        np.testing.assert_array_equal(after[:, :position], before[:, :position], err_msg=f"position {position}")
        assert (after[:, position:] != before[:, position:]).any(), f"position {position}"


# ---- the table of precisions


def narrowed(low: str) -> dict[str, np.ndarray]:
    """The weights as the backend keeps them: operands of products in 16 bits."""
    weights = tied(random_weights())
    return {n: narrow(w, low) if is_operand(n) else w for n, w in weights.items()}


@LOW
def test_gradients_err_at_most_twice_as_much_as_torch_s_emulation(low):
    x, y = batches(8).get("train", 0, 0)
    xt, yt = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y))
    scale = 2.0**12 if low == "fp16" else 1.0

    def by_torch(gpt, dtype):
        gpt.load_weights(random_weights())
        with autocast("cpu", dtype, emulated=True):
            loss = gpt(xt, yt).mean()
        (loss * scale).backward()
        return {name: p.grad.double().numpy() for name, p in gpt.named_parameters()}

    exact, theirs = by_torch(MiniGPT(CONFIG).double(), "fp32"), by_torch(MiniGPT(CONFIG), low)
    weights = narrowed(low)
    _, cache = numpy_gpt.forward(weights, x, y, CONFIG, low)
    ours = summed(numpy_gpt.backward(weights, np.full(8, scale / 8, np.float32), cache, CONFIG, low))
    for name, gradient in exact.items():
        error, bound = (np.linalg.norm(g[name] - gradient) for g in (ours, theirs))
        floor = 1e-4 * np.linalg.norm(gradient)
        assert error <= 2 * bound + floor, f"{name}: error {error:.1e}, torch's {bound:.1e}"
        assert error > 0, f"{name}: nothing was rounded"


def arrays_of(cache) -> list[np.ndarray]:
    """All arrays in a cache, however deep."""
    if isinstance(cache, np.ndarray):
        return [cache]
    return [array for part in cache or () for array in arrays_of(part)]


@LOW
def test_products_operands_are_kept_in_16_bits_and_x_hat_rstd_and_the_head_s_p_in_fp32(low):
    x, y = batches(4).get("train", 0, 0)
    _, cache = numpy_gpt.forward(narrowed(low), x, y, CONFIG, low)
    kept = {"head": cache.f} | {
        f"{layer}.{n}": a for layer, b in enumerate(cache.blocks) for n, a in b._asdict().items()
    }
    for name, array in kept.items():
        if name.endswith(("ln_1", "ln_2")):
            assert {part.dtype for part in array} == {np.dtype(np.float32)}, name
        elif not name.endswith("masks"):
            assert array.dtype == {"bf16": np.uint16, "fp16": np.float16}[low], name
    assert cache.p.dtype == np.float32


@LOW
def test_activations_kept_in_16_bits_take_at_most_62_percent_of_fp32(low):
    """Of the preset cpu, all that lies between forward and backward."""
    config = GPTConfig(65, 64, n_layer=4, n_head=4, n_embd=128)
    x, y = batches(12, 64, 65).get("train", 0, 0)
    weights, size = tied(initial_weights(config, 1)), {}
    for dtype in ("fp32", low):
        used = {n: narrow(w, dtype) if is_operand(n) else w for n, w in weights.items()}
        _, cache = numpy_gpt.forward(used, x, y, config, dtype)
        size[dtype] = sum(array.nbytes for array in arrays_of((cache.blocks, cache.ln_f, cache.f, cache.p)))
    assert size[low] <= 0.62 * size["fp32"], size


@LOW
def test_gradients_of_operands_are_rounded_and_others_are_not(low):
    for name, gradient in gradients(build("numpy", low), batches(4), scale=2.0**10).items():
        if name == TIED:
            continue  # the head's is, the embedding's is not
        assert gradient.dtype == np.float32, name
        assert (round_to(gradient, low) == gradient).all() == is_operand(name), name


def zeros(dweights: dict[str, np.ndarray]) -> dict[str, float]:
    """Share of exact zeros in the gradients of products' operands, without key biases, which are zero in theory."""
    C = dweights["h.0.attn.c_attn.bias"].size // 3
    shares = {}
    for name, gradient in dweights.items():
        if is_operand(name):
            gradient = np.delete(gradient, range(C, 2 * C)) if name.endswith("c_attn.bias") else gradient
            shares[name] = float((gradient == 0).mean())
    return shares


def test_scaling_saves_the_fp16_gradients_that_would_underflow():
    """In a step of 131,072 tokens, as large runs have it, the share of each in the mean is below what fp16 can hold."""
    config = GPTConfig(vocab_size=65, block_size=64, n_layer=2, n_head=2, n_embd=32)
    data, accumulation = batches(64, 64, 65), 32

    def unscaled(dtype, loss_scale):
        factor = loss_scale / accumulation
        scaled = gradients(build("numpy", dtype, config), data, scale=factor)
        return {name: gradient / np.float32(factor) for name, gradient in scaled.items()}

    plain, scaled, exact = unscaled("fp16", 1.0), unscaled("fp16", 2.0**15), unscaled("fp32", 1.0)
    without, with_scale = zeros(plain), zeros(scaled)
    for name in ("h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"):  # of queries and keys nothing is left
        assert without[name] > 0.6, f"{name}: {without[name]:.2%} zeros without scaling"
    for name, share in with_scale.items():
        assert share < 0.002, f"{name}: {share:.2%} zeros with scaling"
    for name, gradient in exact.items():
        error, lost = (np.linalg.norm(g[name] - gradient) / np.linalg.norm(gradient) for g in (scaled, plain))
        assert error < 0.01, f"{name}: scaled, off by {error:.2%}"
        assert lost > 5 * error, f"{name}: off by {lost:.2%} without scaling, {error:.2%} with it"


@pytest.mark.slow
@LOW
def test_losses_with_and_without_mixed_precision_agree_within_0_3_percent_over_500_steps(low):
    text = load_corpus("stdlib").text
    tokenizer = train_tokenizer("char", text, None)
    data = Batches(tokenizer.encode(text), 64, 12, seed=1)
    config = GPTConfig(tokenizer.vocab_size, 64, n_layer=2, n_head=4, n_embd=64)

    def losses(dtype):
        backend, losses = build("numpy", dtype, config, lr=1e-3), []
        for step in range(500):
            for group in backend.optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, (step + 1) / 100)
            losses += train_steps(backend, data, range(step, step + 1), clip=1.0)
        return losses

    exact, mixed = losses("fp32"), losses(low)
    for step in (0, *range(9, 500, 10)):
        difference = abs(mixed[step] / exact[step] - 1)
        assert difference < 0.003, f"step {step + 1}: {mixed[step]:.4f}, fp32 {exact[step]:.4f}"
    assert exact[-1] < 0.7 * exact[0]
