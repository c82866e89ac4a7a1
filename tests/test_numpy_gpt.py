"""The model in NumPy against the one in PyTorch and against finite differences; its precision; the backend around it.

`PYTHONPATH=. python tests/test_numpy_gpt.py` records tests/golden_losses_numpy.json anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
from amp.autocast import autocast
from amp.formats import round_to
from amp.scaler import DynamicLossScaler
from base.errors import BadInput
from data.batches import Batches
from data.corpus import load_corpus
from data.tokenizers import train_tokenizer
from model import backends, numpy_backend, numpy_gpt
from model.config import HEAD, TIED, GPTConfig, initial_weights, is_operand, parameters
from model.minigpt import MiniGPT
from request import read as read_settings
from settings import Settings
from tests.conftest import assert_same_state

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_name("golden_losses_numpy.json")
CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
DTYPES, LOW = ("fp32", "bf16", "fp16"), ("bf16", "fp16")


def random_weights(dtype=np.float64) -> dict[str, np.ndarray]:
    """No parameter at its start: biases that are not 0, LayerNorms that are not 1, logits that differ."""
    random = np.random.default_rng(0)
    draws = {p.name: 0.2 * random.standard_normal(p.shape) + (p.init == "ones") for p in parameters(CONFIG)}
    return {name: w.astype(dtype) for name, w in draws.items()}


def batches(batch_size: int, block_size: int = 8, vocab_size: int = 11) -> Batches:
    tokens = np.arange(1000) ** 2 // 7 % vocab_size  # to be learned, without being trivial
    return Batches(tokens.astype(np.int32), block_size, batch_size, seed=1)


def tied(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return weights | {HEAD: weights[TIED]}


def summed(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Both gradients of the tied weight in one."""
    both = gradients[TIED] + gradients[HEAD]
    return {name: g for name, g in gradients.items() if name != HEAD} | {TIED: both}


def assert_close(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    """Within `tolerance` of the tensor's largest value; of 1e-3 where all are smaller or, in theory, zero."""
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    error, largest = np.abs(ours - theirs).max(), max(np.abs(theirs).max(), 1e-3)
    assert error <= tolerance * largest, f"{name}: off by {error:.1e}, {error / largest:.1e} of the largest value"


# ---- the mathematics, in fp64


@pytest.mark.parametrize("block_size", [8, 3])
def test_logits_loss_and_every_gradient_are_those_of_the_torch_backend(block_size):
    x, y = batches(4, block_size).get("train", 0, 0)
    gpt = MiniGPT(CONFIG).double()
    gpt.load_weights(random_weights())
    xt, yt = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y))
    expected = gpt(xt, yt)
    expected.mean().backward()

    weights = tied(random_weights())
    hidden, _ = numpy_gpt.hidden(weights, x, CONFIG)
    logits = (hidden @ weights[HEAD].T).reshape(*x.shape, -1)
    assert_close("logits", logits, gpt(xt).detach().numpy(), 1e-10)
    losses, cache = numpy_gpt.forward(weights, x, y, CONFIG)
    assert_close("losses of rows", losses, expected.detach().numpy(), 1e-10)
    gradients = summed(numpy_gpt.backward(weights, np.full(4, 1 / 4), cache, CONFIG))
    theirs = {name: p.grad.numpy() for name, p in gpt.named_parameters()}
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(f"gradient of {name}", gradients[name], gradient, 1e-10)


def test_every_gradient_is_the_slope_of_the_loss_along_a_random_direction():
    """Needs no oracle, and so covers dropout, whose masks no other backend has."""
    config = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=16, dropout=0.2)
    x, y = batches(3).get("train", 0, 0)
    weights, step = random_weights(), 1e-5

    def forward(moved):
        losses, cache = numpy_gpt.forward(tied(weights | moved), x, y, config, random=np.random.default_rng(5))
        return losses.mean(), cache

    _, cache = forward({})
    gradients = summed(numpy_gpt.backward(tied(weights), np.full(3, 1 / 3), cache, config))
    for name, w in weights.items():
        direction = np.random.default_rng(1).standard_normal(w.shape)
        up, down = (forward({name: w + side * step * direction})[0] for side in (1, -1))
        slope, claimed = (up - down) / (2 * step), (gradients[name] * direction).sum()
        assert claimed == pytest.approx(slope, rel=1e-6, abs=1e-9), name


def test_a_later_token_does_not_change_earlier_ones():
    weights = tied(random_weights())
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
    weights = tied(random_weights(np.float32))
    return {n: numpy_gpt.narrow(w, low) if is_operand(n) else w for n, w in weights.items()}


@pytest.mark.parametrize("low", LOW)
def test_gradients_err_at_most_twice_as_much_as_torch_s_emulation(low):
    x, y = batches(8).get("train", 0, 0)
    xt, yt = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y))
    scale = 2.0**12 if low == "fp16" else 1.0

    def by_torch(gpt, dtype):
        gpt.load_weights(random_weights(np.float32))
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


def arrays_of(kept) -> list[np.ndarray]:
    if isinstance(kept, np.ndarray):
        return [kept]
    return [array for part in kept or () for array in arrays_of(part)]


@pytest.mark.parametrize("low", LOW)
def test_operands_are_kept_in_16_bits_and_all_else_in_fp32(low):
    x, y = batches(4).get("train", 0, 0)
    _, cache = numpy_gpt.forward(narrowed(low), x, y, CONFIG, low)
    kept = {"head": cache.f} | {
        f"{layer}.{n}": a for layer, b in enumerate(cache.blocks) for n, a in b._asdict().items()
    }
    for name, array in kept.items():
        if name.endswith(("ln_1", "ln_2")):
            assert {part.dtype for part in array} == {np.dtype(np.float32)}, name
        elif not name.endswith("kept"):
            assert array.dtype == {"bf16": np.uint16, "fp16": np.float16}[low], name
    assert cache.p.dtype == np.float32


@pytest.mark.parametrize("low", LOW)
def test_activations_kept_in_16_bits_take_at_most_62_percent_of_fp32(low):
    """Of the preset cpu, all that lies between forward and backward."""
    config = GPTConfig(65, 64, n_layer=4, n_head=4, n_embd=128)
    x, y = batches(12, 64, 65).get("train", 0, 0)
    weights, size = tied(initial_weights(config, 1)), {}
    for dtype in ("fp32", low):
        used = {n: numpy_gpt.narrow(w, dtype) if is_operand(n) else w for n, w in weights.items()}
        _, cache = numpy_gpt.forward(used, x, y, config, dtype)
        size[dtype] = sum(array.nbytes for array in arrays_of((cache.blocks, cache.ln_f, cache.f, cache.p)))
    assert size[low] <= 0.62 * size["fp32"], size


@pytest.mark.parametrize("low", LOW)
def test_gradients_of_operands_are_rounded_and_others_are_not(low):
    backend = build(low)
    for name, gradient in backend_gradients(backend, (1, 0, 0), scale=2.0**10).items():
        if name == TIED:
            continue  # the head's is, the embedding's is not
        assert gradient.dtype == np.float32, name
        assert (round_to(gradient, low) == gradient).all() == is_operand(name), name


def zeros(gradients: dict[str, np.ndarray]) -> dict[str, float]:
    """Share of exact zeros in the gradients of products' operands, without key biases, which are zero in theory."""
    C = gradients["h.0.attn.c_attn.bias"].size // 3
    shares = {}
    for name, gradient in gradients.items():
        if is_operand(name):
            gradient = np.delete(gradient, range(C, 2 * C)) if name.endswith("c_attn.bias") else gradient
            shares[name] = float((gradient == 0).mean())
    return shares


def test_scaling_saves_the_fp16_gradients_that_would_underflow():
    """In a step of 131,072 tokens, as large runs have it, the share of each in the mean is below what fp16 can hold."""
    config = GPTConfig(vocab_size=65, block_size=64, n_layer=2, n_head=2, n_embd=32)
    data, accumulation = batches(64, 64, 65), 32

    def gradients(dtype, loss_scale):
        backend = numpy_backend.build(Settings(seed=1), numpy_backend.hardware("cpu", dtype, "auto"), config)
        factor = loss_scale / accumulation
        found = backend_gradients(backend, (1, 0, 0), factor, data)
        return {name: gradient / np.float32(factor) for name, gradient in found.items()}

    plain, scaled, exact = gradients("fp16", 1.0), gradients("fp16", 2.0**15), gradients("fp32", 1.0)
    without, with_scale = zeros(plain), zeros(scaled)
    for name in ("h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"):  # of queries and keys nothing is left
        assert without[name] > 0.6, f"{name}: {without[name]:.2%} zeros without scaling"
    for name, share in with_scale.items():
        assert share < 0.002, f"{name}: {share:.2%} zeros with scaling"
    for name, gradient in exact.items():
        error, lost = (np.linalg.norm(g[name] - gradient) / np.linalg.norm(gradient) for g in (scaled, plain))
        assert error < 0.01, f"{name}: scaled, off by {error:.2%}"
        assert lost > 5 * error, f"{name}: off by {lost:.2%} without scaling, {error:.2%} with it"


@pytest.mark.filterwarnings("error")
def test_an_overflow_in_fp16_skips_the_step_without_a_warning():
    backend, scaler = build("fp16"), DynamicLossScaler(2.0**40)
    before = backend.state()
    train_step(backend, scaler, 0)
    assert scaler.skipped_steps == 1
    assert scaler.overflowed_parameter in before["model"]
    assert_same_state(backend.state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW)
def test_losses_with_and_without_mixed_precision_agree_within_0_3_percent_over_500_steps(low):
    text = load_corpus("stdlib").text
    tokenizer = train_tokenizer("char", text, None)
    data = Batches(tokenizer.encode(text), 64, 12, seed=1)
    config = GPTConfig(tokenizer.vocab_size, 64, n_layer=2, n_head=4, n_embd=64)

    def losses(dtype):
        backend = numpy_backend.build(Settings(lr=1e-3, seed=1), numpy_backend.hardware("cpu", dtype, "auto"), config)
        scaler, found = DynamicLossScaler(2.0**15), []
        for step in range(500):
            for group in backend.optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, (step + 1) / 100)
            found.append(train_step(backend, scaler, step, data))
        return found

    exact, mixed = losses("fp32"), losses(low)
    for step in (0, *range(9, 500, 10)):
        difference = abs(mixed[step] / exact[step] - 1)
        assert difference < 0.003, f"step {step + 1}: {mixed[step]:.4f}, fp32 {exact[step]:.4f}"
    assert exact[-1] < 0.7 * exact[0]


# ---- the backend


def build(dtype: str, dropout: float = 0.1, seed: int = 1, **settings):
    config = GPTConfig(CONFIG.vocab_size, CONFIG.block_size, n_layer=2, n_head=2, n_embd=16, dropout=dropout)
    hardware = numpy_backend.hardware("cpu", dtype, "auto")
    return numpy_backend.build(Settings(lr=3e-3, seed=seed, **settings), hardware, config)


def train_step(backend, scaler, step: int, data: Batches | None = None) -> float:
    """As train.py does it."""
    data = data or batches(4)
    with backend.autocast():
        loss = backend.model(*data.get("train", step, 0), key=(1, step, 0))
    scaler.scale(loss).backward()
    scaler.unscale_(backend.optimizer)
    backend.clip_grad_norm_(1.0)
    scaler.step(backend.optimizer)
    scaler.update()
    backend.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def backend_gradients(backend, key, scale: float = 1.0, data: Batches | None = None) -> dict[str, np.ndarray]:
    backend.optimizer.zero_grad()
    with backend.autocast():
        loss = backend.model(*(data or batches(4)).get("train", 0, 0), key=key)
    (loss * scale).backward()
    groups = backend.optimizer.param_groups
    return {name: p.grad for g in groups for name, p in zip(g["param_names"], g["params"], strict=True)}


def test_a_loss_multiplies_divides_and_adds_and_so_do_its_gradients():
    backend = build("fp32", dropout=0.0)
    whole = backend_gradients(backend, (1, 0, 0))
    backend.optimizer.zero_grad()
    one, two = (backend.model(*batches(4).get("train", 0, 0), key=(1, 0, 0)) for _ in range(2))
    total = 2 * one / 4 + two * 0.5
    assert total.item() == pytest.approx(one.item(), rel=1e-6)
    total.backward()
    for group in backend.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            np.testing.assert_allclose(parameter.grad, whole[name], rtol=1e-5, atol=1e-8, err_msg=name)


def test_backward_runs_once_and_never_on_a_detached_loss():
    backend = build("fp32")
    loss = backend.model(*batches(4).get("train", 0, 0), key=(1, 0, 0))
    with pytest.raises(RuntimeError, match="detached"):
        (loss.detach() * 2).backward()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward has run"):
        loss.backward()
    assert loss.detach().item() == loss.item()


def test_without_autocast_the_model_computes_in_fp32():
    low, full = build("bf16", dropout=0.0), build("fp32", dropout=0.0)
    losses = [backend.model(*batches(4).get("train", 0, 0), key=(1, 0, 0)).item() for backend in (low, full)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_key_drops_the_same_units_and_another_key_others(dtype):
    backend = build(dtype)
    one, again = backend_gradients(backend, (1, 2, 0)), backend_gradients(backend, (1, 2, 0))
    for name, gradient in one.items():
        np.testing.assert_array_equal(gradient, again[name], err_msg=name)
    for key in ((2, 2, 0), (1, 3, 0), (1, 2, 1)):
        assert (backend_gradients(backend, key)["wpe.weight"] != one["wpe.weight"]).any(), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_continues_another_one_s_state_bit_by_bit(dtype):
    first, second, scaler = build(dtype, seed=1), build(dtype, seed=2), DynamicLossScaler(2.0**10)
    for step in range(4):
        train_step(first, scaler, step)
    state = first.state()
    kept = {kind: {name: array.copy() for name, array in arrays.items()} for kind, arrays in state.items()}
    second.load_state(state)
    assert_same_state(second.state(), kept)
    for step in range(4, 8):
        assert train_step(first, scaler, step) == train_step(second, scaler, step)
    assert_same_state(second.state(), first.state())
    assert_same_state(state, kept)  # neither backend trains in the arrays it gave or took
    assert scaler.skipped_steps == 0


def test_weights_that_do_not_fit_are_refused_by_name():
    backend = build("fp32")
    weights = backend.state()["model"]
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.bias is missing"):
        backend.load_state({"model": {n: w for n, w in weights.items() if n != "h.1.mlp.c_fc.bias"}})
    with pytest.raises(ValueError, match=r"wpe\.weight: expected shape \(8, 16\), got \(1, 16\)"):
        backend.load_state({"model": weights | {"wpe.weight": weights["wpe.weight"][:1]}})  # would broadcast


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_computes_in_the_backend_s_dtype_without_dropout(dtype):
    backend, without = build(dtype), build(dtype, dropout=0.0)
    x, y = batches(3).get("train", 0, 0)
    with without.autocast():
        loss = without.model(x, y, key=(1, 0, 0)).item()
    assert backend.evaluate(x, y).dtype == np.float64
    assert backend.evaluate(x, y).mean() == pytest.approx(loss, rel=1e-6)
    logits = backend.logits(x)
    assert logits.dtype == np.float32
    assert logits.shape == (3, 11)
    last = logits.astype(np.float64)  # the last token's share of the loss of a row
    nats = np.log(np.exp(last).sum(1)) - last[np.arange(3), y[:, -1]]
    rest = np.array([backend.evaluate(x[:, :-1], y[:, :-1])]).ravel() * 7
    # rows one token shorter are other products, whose sums may round otherwise
    np.testing.assert_allclose(rest + nats, backend.evaluate(x, y) * 8, rtol={"fp32": 1e-5}.get(dtype, 1e-2))


def test_matrices_decay_vectors_do_not():
    backend = build("fp32", weight_decay=0.25, beta1=0.8, beta2=0.7)
    decays = {n: g["weight_decay"] for g in backend.optimizer.param_groups for n in g["param_names"]}
    assert decays == {p.name: 0.25 if len(p.shape) == 2 else 0.0 for p in parameters(CONFIG)}
    assert {group["betas"] for group in backend.optimizer.param_groups} == {(0.8, 0.7)}


# ---- golden losses


def golden_run(dtype: str) -> list[float]:
    config = GPTConfig(vocab_size=29, block_size=16, n_layer=2, n_head=2, n_embd=32)
    backend = numpy_backend.build(Settings(lr=3e-3, seed=1337), numpy_backend.hardware("cpu", dtype, "auto"), config)
    scaler = DynamicLossScaler(2.0**10)
    return [train_step(backend, scaler, step, batches(8, 16, 29)) for step in range(10)]


# The tolerances of tests/test_minigpt.py, and their reasons.
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-5), ("fp16", 1e-4), ("bf16", 1e-3)])
def test_the_first_ten_losses_are_the_recorded_ones(dtype, tolerance):
    losses = golden_run(dtype)
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[dtype], rel=0, abs=tolerance)
    assert losses[9] < losses[0] - 0.2, "nothing was learned"


# ---- the command line


def faults(*argv: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        read_settings([*argv, "--corpus", "stdlib"])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--compile", "--compile: --backend numpy has nothing to compile"),
        ("--kernel own", "--kernel: --backend numpy has no kernel of its own"),
        ("--deterministic", "--deterministic: --backend numpy always is"),
        (
            "--recompute",
            "--recompute: --backend numpy keeps all that backward needs: use --backend engine or torch",
        ),
        ("--emulation off", "--emulation: --backend numpy always rounds the operands and multiplies in fp32"),
        (
            "--emulation on --dtype fp32",
            "--emulation: --backend numpy always rounds the operands and multiplies in fp32",
        ),
        ("--device cuda", "--device cuda: --backend numpy computes on the CPU: use --device cpu"),
        ("--device mps", "--device mps: --backend numpy computes on the CPU: use --device cpu"),
    ],
)
def test_a_flag_that_this_backend_cannot_honour_is_refused_by_name(flag, line):
    assert faults("--backend", "numpy", *flag.split()) == [line]


def test_sampling_refuses_them_too(capsys):
    assert sample.main(["--backend", "numpy", "--weights", "fp32"]) == 2
    assert capsys.readouterr().err == "sample.py: error: --weights: --backend numpy has no kernel of its own\n"


def test_what_is_auto_is_not_refused_and_torch_refuses_none_of_them():
    assert backends.refused("numpy", {"kernel": "auto", "dtype": "bf16"}) == {}
    assert backends.refused("torch", dict.fromkeys(numpy_backend.REFUSED, "on")) == {}


def test_all_refusals_are_told_together():
    assert len(faults("--backend", "numpy", "--device", "cuda", "--compile", "--steps", "0")) == 3


def test_hardware():
    assert numpy_backend.hardware("auto", "auto", "auto")[2:4] == ("bf16", True)
    assert numpy_backend.hardware("cpu", "fp16", "off")[:1] + numpy_backend.hardware("cpu", "fp16", "off")[2:4] == (
        "cpu",
        "fp16",
        True,
    )
    assert numpy_backend.hardware("cpu", "fp32", "auto")[2:4] == ("fp32", False)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError
import {script}
status = {script}.main({argv})
assert sys.modules["torch"] is None
sys.exit(status)
"""


def without_torch(script: str, argv: list[str], folder: Path) -> subprocess.CompletedProcess:
    code = WITHOUT_TORCH.format(script=script, argv=argv)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("script", ["train", "sample"])
def test_without_torch_its_backend_is_refused_in_one_line(script, tmp_path):
    refused = without_torch(script, [], tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"{script}.py: error: --backend torch: torch is not installed: pip install -r requirements.txt\n"
    )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({dtype: golden_run(dtype) for dtype in DTYPES}, indent=2) + "\n")
