"""The model on the engine: its memory with recomputation, and that it learns. Its numbers: test_backends*.py."""

import tracemalloc

import numpy as np
import pytest

from data.batches import Batches
from data.corpus import load_corpus
from data.tokenizers import train_tokenizer
from model.config import GPTConfig
from tests.conftest import build, train_steps


@pytest.mark.parametrize(("layers", "saved"), [(4, 0.3), (12, 0.6)])
def test_recomputation_lowers_the_peak_of_memory(layers, saved):
    """Of forward and backward of the preset cpu, not counting weights and optimizer."""
    config = GPTConfig(65, 64, layers, n_head=4, n_embd=128)
    x, y = np.random.default_rng(0).integers(0, 65, (2, 12, 64))

    def peak(recompute):
        backend = build("engine", "fp32", config, recompute=recompute)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            backend.model(x, y, key=(1, 0, 0)).backward()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    kept, recomputed = peak(False), peak(True)
    assert recomputed <= (1 - saved) * kept, f"{recomputed / 2**20:.1f} MiB instead of {kept / 2**20:.1f}"


def learn(config: GPTConfig, data: Batches, steps: int, dtype: str) -> list[float]:
    """The losses of a run with a warm-up of 30 steps."""
    backend, losses = build("engine", dtype, config), []
    for step in range(steps):
        for group in backend.optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30)
        losses += train_steps(backend, data, range(step, step + 1), clip=1.0, scale=2.0**15)
    return losses


@pytest.mark.slow
def test_200_steps_lower_the_loss_by_more_than_1_nat():
    text = load_corpus("stdlib").text
    tokenizer = train_tokenizer("char", text, None)
    data = Batches(tokenizer.encode(text), 64, 12, seed=1)
    losses = learn(GPTConfig(tokenizer.vocab_size, 64, n_layer=4, n_head=4, n_embd=128), data, 200, "bf16")
    assert np.mean(losses[-10:]) < losses[0] - 1


@pytest.mark.slow
def test_a_model_of_4096_byte_pairs_starts_at_their_logarithm_and_learns():
    text = load_corpus("stdlib").text
    tokenizer = train_tokenizer("bpe", text, 4096)
    data = Batches(tokenizer.encode(text), 64, 8, seed=1)
    losses = learn(GPTConfig(tokenizer.vocab_size, 64, n_layer=2, n_head=2, n_embd=64), data, 50, "fp16")
    assert losses[0] == pytest.approx(8.3, abs=0.1)
    assert np.mean(losses[-10:]) < 7.5
