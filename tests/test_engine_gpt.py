"""The backend on the engine: what it refuses and needs, its memory with recomputation, learning.

That its numbers are those of the other backends is in test_backends.py.
"""

import tracemalloc

import numpy as np
import pytest

from amp.scaler import DynamicLossScaler
from data.batches import Batches
from data.corpus import load_corpus
from data.tokenizers import train_tokenizer
from model import engine_backend, numpy_threads
from model.config import GPTConfig
from settings import Settings
from tests.test_numpy_gpt import faults, train_step

SMALL = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.1)


def build(config=SMALL, dtype="fp32", **settings):
    settings = Settings(**{"lr": 3e-3, "seed": 1} | settings)
    return engine_backend.build(settings, engine_backend.hardware("cpu", dtype, "auto"), config)


def batches(batch_size: int) -> Batches:
    return Batches((np.arange(1000) ** 2 // 7 % 11).astype(np.int32), 8, batch_size, seed=1)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_number_of_cores_does_not_change_a_bit(monkeypatch, batch_size):
    states = []
    for cores in (1, 2):
        monkeypatch.setattr(numpy_threads, "cores", lambda cores=cores: cores)
        backend, scaler = build(dtype="fp16"), DynamicLossScaler(2.0**10)
        losses = [train_step(backend, scaler, step, batches(batch_size)) for step in range(3)]
        states.append({"losses": np.array(losses)} | backend.state()["model"])
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


@pytest.mark.filterwarnings("error")
def test_an_overflow_in_fp16_skips_the_step_without_a_warning():
    backend, scaler = build(dtype="fp16"), DynamicLossScaler(2.0**40)
    before = backend.state()["model"]
    train_step(backend, scaler, 0)
    assert scaler.skipped_steps == 1
    for name, array in backend.state()["model"].items():
        assert array.tobytes() == before[name].tobytes(), name


def test_the_same_key_drops_the_same_units_and_another_key_others():
    backend = build(dtype="bf16")
    x, y = batches(4).get("train", 0, 0)
    one, again, other = (backend.model(x, y, key=(1, step, 0)).item() for step in (0, 0, 1))
    assert one == again != other


def test_a_loss_is_a_tensor_that_goes_back_once():
    backend = build()
    loss = backend.model(*batches(4).get("train", 0, 0), key=(1, 0, 0))
    total = 2 * loss / 4 + loss.detach() * 0.5
    assert total.item() == pytest.approx(loss.item(), rel=1e-6)
    total.backward()
    with pytest.raises(RuntimeError, match="has run through this tensor before"):
        loss.backward()
    with pytest.raises(RuntimeError, match="requires no gradient"):
        loss.detach().backward()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_evaluation_computes_in_the_backend_s_dtype_without_dropout(dtype):
    backend, without = build(dtype=dtype), build(GPTConfig(11, 8, 2, 2, 16), dtype)
    x, y = batches(4).get("train", 0, 0)
    with without.autocast():
        loss = without.model(x, y, key=(1, 0, 0)).item()
    assert backend.evaluate(x, y).mean() == pytest.approx(loss, rel=1e-6)
    assert backend.evaluate(x, y).dtype == np.float64
    last = backend.logits(x).astype(np.float64)  # the last token's share of the loss of a row
    nats = np.log(np.exp(last).sum(1)) - last[np.arange(4), y[:, -1]]
    rest = backend.evaluate(x[:, :-1], y[:, :-1]) * 7
    np.testing.assert_allclose(rest + nats, backend.evaluate(x, y) * 8, rtol=1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize(("layers", "saved"), [(4, 0.3), (12, 0.6)])
def test_recomputation_lowers_the_peak_of_memory(layers, saved):
    """Of forward and backward of the preset cpu, besides weights and optimizer."""
    config = GPTConfig(65, 64, layers, n_head=4, n_embd=128)
    x, y = np.random.default_rng(0).integers(0, 65, (2, 12, 64))

    def peak(recompute):
        backend = build(config, recompute=recompute)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            backend.model(x, y, key=(1, 0, 0)).backward()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    kept, recomputed = peak(False), peak(True)
    assert recomputed <= (1 - saved) * kept, f"{recomputed / 2**20:.1f} MiB instead of {kept / 2**20:.1f}"


def learn(config, data, steps: int, dtype: str) -> list[float]:
    backend, scaler, losses = build(config, dtype), DynamicLossScaler(2.0**15), []
    for step in range(steps):
        for group in backend.optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30)
        losses.append(train_step(backend, scaler, step, data))
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


# ---- the command line


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--compile", "--compile: --backend engine has nothing to compile"),
        ("--kernel own", "--kernel: --backend engine has no kernel of its own"),
        ("--device cuda", "--device cuda: --backend engine computes on the CPU: use --device cpu"),
    ],
)
def test_a_flag_that_this_backend_cannot_honour_is_refused_by_name(flag, line):
    assert faults("--backend", "engine", *flag.split()) == [line]
