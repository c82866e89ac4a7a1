"""The contract of a backend (model/backends.py): the same tests for all three, in each precision.

`PYTHONPATH=. python tests/test_backends.py` records tests/golden_losses.json anew.
"""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sample
import train
from amp.scaler import DynamicLossScaler
from base.dtypes import DTYPES, Dtype
from base.errors import BadInput
from model import backends
from model.backends import Sampler, trained
from model.config import GPTConfig, initial_weights, parameters
from settings import Settings
from tests.conftest import (
    CONFIG,
    assert_same_state,
    batches,
    build,
    gradients,
    random_weights,
    train_steps,
    trained_by_name,
)

BACKENDS = tuple(backends.MODULES)
ON_NUMPY = ("numpy", "engine")
NAMES = [p.name for p in parameters(CONFIG)]
each = pytest.mark.parametrize("name", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def sampler(name: str, dtype: Dtype, config: GPTConfig, weights: dict[str, np.ndarray]) -> Sampler:
    module = backends.module(name)
    return module.sampler(module.hardware("cpu", dtype, "on"), config, weights, "bf16")


# ---- weights and state


@each
def test_a_new_backend_has_the_weights_it_was_given_in_the_table_s_order_and_zero_moments(name):
    weights = random_weights()
    state = build(name, "fp32", weights=dict(reversed(weights.items()))).state()
    assert list(state["model"]) == NAMES
    moments = {
        f"{moment}.{name}": np.zeros_like(weights[name]) for moment in ("exp_avg", "exp_avg_sq") for name in NAMES
    }
    assert_same_state(state, {"model": weights, "optimizer": moments | {"step": np.array(0)}})


@each
@each_dtype
@pytest.mark.parametrize("before", [0, 4])
def test_a_backend_continues_another_one_s_state_bit_by_bit(name, dtype, before):
    data = batches(4)
    first = build(name, dtype)
    train_steps(first, data, range(before))
    state = first.state()
    kept = deepcopy(state)
    second = build(name, dtype, weights=state["model"])
    second.load_optimizer(state["optimizer"])
    assert_same_state(second.state(), kept)
    steps = range(before, before + 4)
    assert train_steps(first, data, steps) == train_steps(second, data, steps)
    assert_same_state(second.state(), first.state())
    assert_same_state(state, kept)  # neither backend trains in the arrays it gave or took
    assert first.state()["optimizer"]["step"] == before + 4


@each
@pytest.mark.parametrize(
    "made", [lambda name, w: build(name, "fp32", weights=w), lambda name, w: sampler(name, "fp32", CONFIG, w)]
)
def test_weights_that_do_not_fit_are_refused_by_name(name, made):
    weights = random_weights()
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.bias is missing"):
        made(name, {n: w for n, w in weights.items() if n != "h.1.mlp.c_fc.bias"})
    with pytest.raises(ValueError, match=r"lm_head\.weight is unknown"):
        made(name, weights | {"lm_head.weight": weights["wte.weight"]})
    with pytest.raises(ValueError, match=r"wpe\.weight: expected shape \(8, 16\), got \(1, 16\)"):
        made(name, weights | {"wpe.weight": weights["wpe.weight"][:1]})  # would broadcast


# ---- dropout


@each
@each_dtype
def test_the_same_key_drops_the_same_units_and_another_key_others(name, dtype):
    backend, data = build(name, dtype), batches(4)
    one = gradients(backend, data, key=(1, 2, 0))
    gradients(backend, data, key=(5, 5, 5))  # numbers drawn in between do not matter
    again = gradients(backend, data, key=(1, 2, 0))
    for parameter, gradient in one.items():
        np.testing.assert_array_equal(gradient, again[parameter], err_msg=parameter)
    for key in ((2, 2, 0), (1, 3, 0), (1, 2, 1)):
        assert (gradients(backend, data, key)["wpe.weight"] != one["wpe.weight"]).any(), key


@each
def test_without_dropout_the_key_does_not_matter(name):
    backend = build(name, "fp32", CONFIG)
    one, other = (gradients(backend, batches(4), key=(1, step, 0)) for step in (0, 1))
    for parameter, gradient in one.items():
        np.testing.assert_array_equal(gradient, other[parameter], err_msg=parameter)


# ---- the optimizer


@each
def test_matrices_decay_vectors_do_not_and_the_tied_weight_counts_once(name):
    groups = build(name, "fp32", weight_decay=0.25, beta1=0.8, beta2=0.7).optimizer.param_groups
    decays = [(n, group["weight_decay"]) for group in groups for n in group["param_names"]]
    assert sorted(decays) == sorted((p.name, 0.25 if len(p.shape) == 2 else 0.0) for p in parameters(CONFIG))
    for group in groups:
        assert [tuple(p.data.shape) for p in group["params"]] == [
            random_weights()[n].shape for n in group["param_names"]
        ]
        assert group["lr"] == 3e-3
        assert tuple(group["betas"]) == (0.8, 0.7)


@each
def test_no_clipping_leaves_gradients_alone_even_where_their_norm_is_beyond_fp32(name):
    backend = build(name, "fp32")
    gradients(backend, batches(4))
    for parameter in trained(backend.optimizer):
        parameter.grad[...] = 3e38
    assert float(backend.clip_grad_norm_(math.inf)) == math.inf
    for parameter in trained(backend.optimizer):
        assert (np.asarray(parameter.grad) == np.float32(3e38)).all()


@each
@pytest.mark.filterwarnings("error")
def test_an_overflow_in_fp16_skips_the_step_without_a_warning(name):
    backend, scaler = build(name, "fp16"), DynamicLossScaler(2.0**40)
    before = backend.state()
    train.step(backend, scaler, batches(4), Settings(seed=1), 0)
    assert scaler.skipped_steps == 1
    assert scaler.overflowed_parameter in before["model"]
    assert_same_state(backend.state(), before)


# ---- the loss


@each
def test_losses_multiply_divide_and_add_and_so_do_their_gradients(name):
    backend, data = build(name, "fp32", CONFIG), batches(4)
    expected = gradients(backend, data)
    backend.optimizer.zero_grad()
    one, two = (backend.model(*data.get("train", 0, 0), key=(1, 0, 0)) for _ in range(2))
    total = 2 * one / 4 + two * 0.5
    assert total.item() == pytest.approx(one.item(), rel=1e-6)
    total.backward()
    for weight, parameter in trained_by_name(backend).items():
        summed = np.asarray(parameter.grad)
        np.testing.assert_allclose(summed, expected[weight], rtol=1e-5, atol=1e-8, err_msg=weight)


@each
def test_backward_runs_once_and_never_on_a_detached_loss(name):
    detached = {"torch": "does not require grad", "numpy": "detached", "engine": "requires no gradient"}
    again = {"torch": "a second time", "numpy": "backward has run", "engine": "has run through this tensor before"}
    loss = build(name, "fp32").model(*batches(4).get("train", 0, 0), key=(1, 0, 0))
    with pytest.raises(RuntimeError, match=detached[name]):
        (loss.detach() * 2).backward()
    loss.backward()
    with pytest.raises(RuntimeError, match=again[name]):
        loss.backward()
    assert loss.detach().item() == loss.item()


@each
def test_without_autocast_the_model_computes_in_fp32(name):
    x, y = batches(4).get("train", 0, 0)
    low, full = (build(name, dtype, CONFIG).model(x, y, key=(1, 0, 0)).item() for dtype in ("fp16", "fp32"))
    assert low == full


# ---- evaluation and sampling


@each
@each_dtype
def test_evaluation_computes_in_the_backend_s_dtype_without_dropout(name, dtype):
    backend, without = build(name, dtype, weights=random_weights()), build(name, dtype, CONFIG, random_weights())
    x, y = batches(3).get("train", 0, 0)
    losses = backend.evaluate(x, y)
    assert losses.dtype == np.float64
    with without.autocast():
        alone = [without.model(x[row : row + 1], y[row : row + 1], key=(1, 0, 0)).item() for row in range(3)]
    # a product over more rows may add up in another order, and then tip a rounding to 16 bits
    np.testing.assert_allclose(losses, alone, rtol={"fp32": 1e-6, "fp16": 3e-5, "bf16": 2e-4}[dtype])
    with without.autocast():
        assert losses.mean() == pytest.approx(without.model(x, y, key=(1, 0, 0)).item(), rel=1e-6)


@each
@each_dtype
def test_a_sampler_s_logits_are_the_last_token_s_share_of_the_loss(name, dtype):
    backend, logits_of = (
        build(name, dtype, weights=random_weights()),
        sampler(name, dtype, CONFIG, random_weights()).logits,
    )
    x, y = batches(3).get("train", 0, 0)
    whole, rest = backend.evaluate(x, y) * 8, backend.evaluate(x[:, :-1], y[:, :-1]) * 7
    for row in range(3):
        logits = logits_of(x[row : row + 1])
        assert logits.dtype == np.float32
        assert logits.shape == (1, 11)
        last = logits[0].astype(np.float64)
        nats = np.log(np.exp(last).sum()) - last[y[row, -1]]
        # rows one token shorter are other products, whose sums may be rounded otherwise
        assert rest[row] + nats == pytest.approx(whole[row], rel={"fp32": 1e-5}.get(dtype, 1e-2))


@each
@each_dtype
def test_a_backend_s_decoder_is_the_sampler_of_its_weights_as_they_are_after_training(name, dtype):
    backend, tokens = build(name, dtype), batches(1).get("train", 0, 0)[0]
    before = backend.decoder("bf16")(tokens)
    train_steps(backend, batches(4), range(2))
    after = backend.decoder("bf16")(tokens)
    config = replace(CONFIG, dropout=0.1)  # which sampling must not draw from
    np.testing.assert_array_equal(after, sampler(name, dtype, config, backend.state()["model"]).logits(tokens))
    assert (after != before).any()


# ---- golden losses

GOLDEN = Path(__file__).with_name("golden_losses.json")


def first_ten_losses(name: str, dtype: Dtype, clip: float) -> list[float]:
    """The first ten losses of a small model without dropout, whose random numbers are no promise of PyTorch."""
    config = GPTConfig(vocab_size=29, block_size=16, n_layer=2, n_head=2, n_embd=32)
    backend = build(name, dtype, config, initial_weights(config, 1337))
    return train_steps(backend, batches(8, 16, 29), range(10), clip)


# Another CPU adds up in another order. In fp32 that moves a loss by a unit in the last place, 2e-7; in 16 bits it tips
# roundings that lie close to a midpoint, and one tipped rounding weighs 2^-9 (bf16) or 2^-12 (fp16) of a value. Between
# instruction sets losses moved by 2e-7 (fp32), 1e-5 (fp16) and 2e-4 (bf16) at most.
@each
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-5), ("fp16", 1e-4), ("bf16", 1e-3)])
def test_the_first_ten_losses_are_the_recorded_ones(name, dtype, tolerance):
    golden = json.loads(GOLDEN.read_text())[name]
    losses = first_ten_losses(name, dtype, golden["clip"])
    assert losses == pytest.approx(golden[dtype], rel=0, abs=tolerance)
    assert losses[9] < losses[0] - 0.2, "nothing was learned"


# ---- hardware and flags


@each
def test_hardware_on_the_cpu(name):
    hardware = backends.module(name).hardware
    for asked, dtype, emulated in (("fp32", "fp32", False), ("auto", "bf16", True), ("fp16", "fp16", True)):
        assert hardware("cpu", asked, "on")[2:4] == (dtype, emulated)
    assert hardware("cpu", "bf16", "off").emulated == (name != "torch")  # NumPy has no 16-bit products


@pytest.mark.parametrize("name", ON_NUMPY)
@pytest.mark.parametrize("device", ["cuda", "mps", "cpu:1"])
def test_backends_on_numpy_compute_on_the_cpu_alone(name, device):
    assert backends.module(name).hardware("auto", "fp32", "auto").device == "cpu"
    with pytest.raises(BadInput, match=f"--device {device}: --backend {name} computes on the CPU: use --device cpu"):
        backends.module(name).hardware(device, "fp32", "auto")


REFUSED = [
    ("--compile", "has nothing to compile"),
    ("--kernel own", "has no kernel of its own"),
    ("--deterministic", "always is"),
    ("--emulation off", "always rounds the operands and multiplies in fp32"),
    ("--emulation on --dtype fp32", "always rounds the operands and multiplies in fp32"),
]


@pytest.mark.parametrize(
    ("name", "flag", "reason"),
    [
        *((name, flag, reason) for name in ON_NUMPY for flag, reason in REFUSED),
        ("numpy", "--recompute", "keeps all that backward needs: use --backend engine or torch"),
    ],
)
def test_a_flag_that_a_backend_cannot_honour_is_refused_by_name(name, flag, reason, capsys):
    assert train.main(["--backend", name, "--steps", "0", *flag.split()]) == 2  # 0 steps: so that nothing trains anyway
    refusal, _ = capsys.readouterr().err.splitlines()
    assert refusal == f"train.py: error: {flag.split()[0]}: --backend {name} {reason}"


@pytest.mark.parametrize("name", ON_NUMPY)
def test_sampling_refuses_such_flags_too(name, capsys):
    assert sample.main(["--backend", name, "--weights", "fp32"]) == 2
    assert capsys.readouterr().err == f"sample.py: error: --weights: --backend {name} has no kernel of its own\n"


def test_auto_is_never_refused_and_torch_and_the_engine_honour_more():
    assert backends.refused("numpy", {"kernel": "auto", "dtype": "bf16"}) == {}
    assert backends.refused("torch", dict.fromkeys(backends.module("numpy").REFUSED, "on")) == {}
    assert backends.refused("engine", {"recompute": True}) == {}


def test_all_refusals_are_told_together(capsys):
    assert train.main(["--backend", "numpy", "--device", "cuda", "--compile", "--steps", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


if __name__ == "__main__":
    recorded = json.loads(GOLDEN.read_text())
    for name, golden in recorded.items():
        golden |= {dtype: first_ten_losses(name, dtype, golden["clip"]) for dtype in DTYPES}
    GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
