"""Whole models under torch.autocast and under the emulation: operands, logits, gradients, evaluation."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp.autocast import LOW_DTYPES, autocast
from model import torch_backend
from model.backends import Hardware
from model.config import GPTConfig, initial_weights
from settings import Settings
from tests.test_autocast import CONFIG, both_ways, is_representable, low, tiny_batch, tiny_gpt

# ---- whole models


class Recorder(TorchDispatchMode):
    """Notes (operation, floating-point operands, first result) of everything that reaches the device."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, list[torch.Tensor], torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        floats = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.calls.append((func.overloadpacket.__name__, floats, tree_leaves(result)[0]))
        return result


def record(dtype: str, emulated: bool):
    """The calls of MiniGPT's forward, and those of its backward."""
    gpt, (x, y) = tiny_gpt(), tiny_batch()
    with Recorder() as forward, autocast("cpu", dtype, emulated):
        loss = gpt(x, y).mean()
    with Recorder() as backward:
        loss.backward()
    return forward.calls, backward.calls


def is_product(operation: str) -> bool:
    return operation in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot") or "dot_product" in operation


# aten's operations that the table keeps in fp32 -> how many of their first floating-point operands it speaks of. Of
# "add" it is the residual stream; the other operand comes as its operation left it, and is widened exactly.
FP32_OPERATIONS = {
    "native_layer_norm": 3,
    "_log_softmax": 1,
    "nll_loss_forward": 1,
    "mean": 1,
    "embedding": 1,
    "add": 1,
}
FP32_OPERATIONS |= {"native_layer_norm_backward": 2, "_log_softmax_backward_data": 2, "nll_loss_backward": 1}
FP32_OPERATIONS |= {"embedding_dense_backward": 1}


@low
@both_ways
def test_products_of_the_model_see_rounded_operands_and_all_else_sees_fp32(emulated, dtype):
    products, others = Counter(), set()
    for direction, calls in zip(("forward", "backward"), record(dtype, emulated), strict=True):
        for operation, operands, result in calls:
            if is_product(operation):
                attention = "dot_product" in operation
                products[direction, "attention" if attention else "linear"] += 1
                # Attention's backward also reads its own fp32 result and sums; its gradient, q, k and v come first.
                for n, operand in enumerate(operands[:4] if attention else operands):
                    where = f"{direction} {operation}, operand {n}, shape {tuple(operand.shape)}"
                    assert is_representable(operand, dtype), where
            elif operation in FP32_OPERATIONS:
                others.add(operation)
                for tensor in [*operands[: FP32_OPERATIONS[operation]], result]:
                    assert tensor.dtype == torch.float32, operation
    linears = 4 * CONFIG.n_layer + 1
    assert products == {
        ("forward", "linear"): linears,
        ("backward", "linear"): 2 * linears,
        ("forward", "attention"): CONFIG.n_layer,
        ("backward", "attention"): CONFIG.n_layer,
    }
    assert others == FP32_OPERATIONS.keys()


def run_tiny(dtype: str, emulated: bool, seed: int = 0):
    """Logits, loss and gradients by name of the tiny model."""
    gpt, (x, y) = tiny_gpt(seed), tiny_batch()
    with autocast("cpu", dtype, emulated):
        logits = gpt(x)
        loss = gpt(x, y).mean()
    loss.backward()
    return logits.detach(), loss.item(), {name: p.grad for name, p in gpt.named_parameters()}


@low
def test_the_emulated_model_s_logits_and_loss_are_those_of_torch_autocast(dtype):
    # Products agree to a unit, attention to its softmax's rounding; so logits agree to about a unit of the largest. A
    # token's loss moves by at most twice the change of a logit, and over n tokens that averages out by sqrt(n).
    logits, loss, _ = run_tiny(dtype, emulated=True)
    their_logits, their_loss, _ = run_tiny(dtype, emulated=False)
    assert logits.dtype == their_logits.dtype == torch.float32
    unit = logits.abs().max().item() * torch.finfo(LOW_DTYPES[dtype]).eps
    assert (logits - their_logits).abs().max().item() <= 2 * unit
    tokens = logits.shape[0] * logits.shape[1]
    assert abs(loss - their_loss) <= 2 * unit / math.sqrt(tokens)


@low
def test_the_emulated_model_s_gradients_are_no_less_exact_than_torch_autocast_s(dtype):
    # Twice, as for attention, over several models: a single vector's error is a few roundings, some of them lucky.
    our_error, their_error = Counter(), Counter()
    for seed in range(6):
        _, _, exact = run_tiny("fp32", emulated=False, seed=seed)
        for errors, emulated in ((our_error, True), (their_error, False)):
            for name, gradient in run_tiny(dtype, emulated, seed)[2].items():
                errors[name] += (gradient - exact[name]).square().sum().item()
    for name in their_error:
        ratio = math.sqrt(our_error[name] / their_error[name])
        assert 0 < ratio <= 2, f"{name}: {ratio:.2f} times torch.autocast's error"


# ---- evaluation and training


def build(dtype: str, emulated: bool):
    settings = Settings(lr=1e-2, dropout=0.1, seed=3)
    config = GPTConfig(11, 8, n_layer=1, n_head=2, n_embd=16, dropout=0.1)
    hardware = Hardware("cpu", "this CPU", dtype, emulated, "")
    return torch_backend.build(settings, hardware, config, initial_weights(config, 3))


def weights_after_training(backend, evaluate: bool) -> dict[str, np.ndarray]:
    x, y = (t.numpy() for t in tiny_batch())
    for step in range(4):
        with backend.autocast():
            loss = backend.model(x, y, key=(3, step, 0))
        if evaluate:  # also between forward and backward
            backend.evaluate(x, y)
        loss.backward()
        backend.optimizer.step()
        backend.optimizer.zero_grad()
        if evaluate:
            backend.evaluate(x, y)
            backend.evaluate(x[:1, :3], y[:1, :3])
    return backend.state()["model"]


DTYPES = pytest.mark.parametrize(
    ("dtype", "emulated"), [("fp32", False), ("bf16", False), ("bf16", True), ("fp16", True)]
)


@DTYPES
def test_evaluation_does_not_change_training(dtype, emulated):
    without = weights_after_training(build(dtype, emulated), evaluate=False)
    for name, values in weights_after_training(build(dtype, emulated), evaluate=True).items():
        assert values.tobytes() == without[name].tobytes(), name


@DTYPES
def test_evaluation_is_without_dropout_and_repeats(dtype, emulated):
    backend = build(dtype, emulated)
    x, y = (t.numpy() for t in tiny_batch())
    first = backend.evaluate(x, y)
    assert first.dtype == np.float64
    assert first.shape == (4,)
    assert first.tobytes() == backend.evaluate(x, y).tobytes()


@pytest.mark.parametrize(("dtype", "emulated"), [("bf16", False), ("bf16", True), ("fp16", True)])
def test_evaluation_inside_a_training_block_is_refused(dtype, emulated):
    backend = build(dtype, emulated)
    x, y = (t.numpy() for t in tiny_batch())
    with backend.autocast():
        with pytest.raises(RuntimeError, match="leave the block first"):
            backend.evaluate(x, y)
        loss = backend.model(x, y, key=(0, 0, 0))
    loss.backward()
    for group in backend.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert parameter.grad is not None, name
    backend.evaluate(x, y)
