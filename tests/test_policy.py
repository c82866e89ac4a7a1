"""The active compute dtype; the table against what each way to compute does; which files stay free of torch."""

import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import engine.autocast
from amp import policy
from amp.autocast import LOW_DTYPES, autocast
from amp.formats import FORMATS, narrow, round_to, widen
from amp.policy import TABLE, compute_dtype, computing
from engine import ops
from engine.tensor import Tensor
from model import backends, minigpt, numpy_layers
from model.backends import Hardware
from model.config import GPTConfig, initial_weights, is_operand
from settings import Settings

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = [
    *("amp.policy", "amp.formats", "amp.scaler", "model.config", "model.backends", "optim.schedule"),
    *("data.batches", "data.tokenizers", "run.checkpoint"),
]


def test_fp32_is_the_default():
    assert compute_dtype() == "fp32"


def test_blocks_nest_and_restore_what_was_there():
    with computing("bf16"):
        with computing("fp16"):
            assert compute_dtype() == "fp16"
            with computing("fp32"):
                assert compute_dtype() == "fp32"
            assert compute_dtype() == "fp16"
        assert compute_dtype() == "bf16"
    assert compute_dtype() == "fp32"


def test_an_exception_restores_what_was_there():
    with computing("bf16"):
        with pytest.raises(KeyError), computing("fp16"):
            raise KeyError
        assert compute_dtype() == "bf16"
    assert compute_dtype() == "fp32"


def test_each_thread_has_its_own():
    inside = threading.Barrier(2, timeout=10)

    def work(dtype: str) -> tuple[str, str, str]:
        before = compute_dtype()
        with computing(dtype):
            inside.wait()  # both threads are in their blocks now
            during = compute_dtype()
            inside.wait()
        return before, during, compute_dtype()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, ["bf16", "fp16"]))
    assert results == [("fp32", "bf16", "fp32"), ("fp32", "fp16", "fp32")]
    assert compute_dtype() == "fp32"


@pytest.mark.parametrize("operation", TABLE)
def test_every_row_names_known_precisions(operation):
    rule = TABLE[operation]
    assert isinstance(rule, policy.Rule)
    assert set(rule) <= {policy.LOW, "fp32"}, rule
    assert rule.accumulate == "fp32", "nothing is summed in 16 bits"
    if rule.operands == "fp32":
        assert rule.result == rule.grad_input == rule.grad_weight == "fp32", rule


def test_matrix_products_and_nothing_else_are_low():
    assert {name for name, rule in TABLE.items() if rule.operands == policy.LOW} == {"linear", "matmul", "attention"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_does_not_load_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.stdout.strip() == "False", f"{module}: torch loaded, or {process.stderr}"


# ---- each way to compute, measured against the table

LOW = ("bf16", "fp16")
TARGETS, TOKENS = np.array([0, 2, 4]), np.array([0, 0, 2])
# row of the table -> shapes of the inputs; for attention queries, keys and values (B, NH, T, HS)
INPUTS = {
    "linear": [(6, 5), (4, 5), (4,)],
    "matmul": [(6, 5), (5, 4)],
    "attention": [(2, 2, 5, 4)] * 3,
    "softmax": [(3, 5)],
    "layer_norm": [(3, 5), (5,), (5,)],
    "gelu": [(3, 5)],
    "cross_entropy": [(3, 5)],
    "reduction": [(3, 5)],
    "residual": [(3, 5), (3, 5)],
    "embedding": [(3, 5)],
}


def draw(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def is_low(array: np.ndarray, low: str) -> bool:
    """Returns whether the low dtype can represent every value."""
    return bool((round_to(array, low) == array).all())


TORCH_OPS = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, (5,), weight, bias),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "cross_entropy": lambda z: F.cross_entropy(z, torch.from_numpy(TARGETS), reduction="none"),
    "reduction": lambda x: x.sum(0),
    "residual": torch.add,
    "embedding": lambda weight: F.embedding(torch.from_numpy(TOKENS), weight),
}


def by_torch(row: str, inputs: list[np.ndarray], low: str, emulated: bool):
    def attention(*heads):  # they come from a linear: in 16 bits under torch.autocast
        heads = heads if emulated else (x.to(LOW_DTYPES[low]) for x in heads)
        return minigpt.attention(*heads, 0.0)

    leaves = [torch.tensor(array, requires_grad=True) for array in inputs]
    with autocast("cpu", low, emulated):
        y = {**TORCH_OPS, "attention": attention}[row](*leaves)
    y.backward(torch.from_numpy(draw(y.shape)[0]).to(y.dtype))
    return y.detach().float().numpy(), [leaf.grad.numpy() for leaf in leaves]


ENGINE_OPS = {
    "linear": ops.linear,
    "matmul": lambda x, y: x @ y,
    "attention": lambda qkv: ops.attention(qkv),
    "softmax": ops.softmax,
    "layer_norm": ops.layer_norm,
    "gelu": ops.gelu,
    "cross_entropy": lambda z: ops.cross_entropy(z, TARGETS),
    "reduction": lambda x: x.sum(0),
    "residual": lambda x, y: x + y,
    "embedding": lambda weight: ops.embedding(weight, TOKENS),
}


def by_engine(row: str, inputs: list[np.ndarray], low: str):
    inputs = [np.stack(inputs)] if row == "attention" else inputs
    leaves = [Tensor(array, requires_grad=True) for array in inputs]
    with engine.autocast.autocast(low):
        y = ENGINE_OPS[row](*leaves)
    y.backward(draw(y.shape)[0])
    return y.data, [leaf.grad for leaf in leaves]


def by_numpy(row: str, inputs: list[np.ndarray], low: str):
    """The layers of model/numpy_layers.py, with what the model of model/numpy_gpt.py hands them."""
    if row == "linear":
        x, weight, bias = (narrow(array, low) for array in inputs)
        y = numpy_layers.linear(x, weight, bias, low)
        gradients = numpy_layers.linear_backward(draw(y.shape)[0], x, weight, low)
    elif row == "attention":
        B, NH, T, HS = inputs[0].shape
        qkv = narrow(np.stack(inputs).transpose(1, 3, 0, 2, 4).reshape(B * T, 3 * NH * HS), low)
        y, p, kept = numpy_layers.attention(qkv, B, NH, low, 0.0, None)
        gradients = [numpy_layers.attention_backward(draw(y.shape)[0], qkv, p, kept, B, NH, low, 0.0)]
        y = y.reshape(B, T, NH, HS).swapaxes(1, 2)
    elif row == "layer_norm":
        x, weight, bias = inputs
        y, cache = numpy_layers.layer_norm(x, weight, bias)
        gradients = numpy_layers.layer_norm_backward(draw(y.shape)[0], weight, *cache)
    elif row == "gelu":
        x = narrow(inputs[0], low)
        y = numpy_layers.gelu(x, low)
        gradients = [numpy_layers.gelu_backward(draw(y.shape)[0], x)]
    elif row == "cross_entropy":
        y, p = numpy_layers.cross_entropy(inputs[0], TARGETS)
        gradients = [numpy_layers.cross_entropy_backward(draw(y.shape)[0], p, TARGETS)]
    else:
        tokens, positions = TOKENS[None], np.zeros_like(inputs[0])
        y = numpy_layers.embedding(tokens, inputs[0], positions)
        gradients = numpy_layers.embedding_backward(draw(y.shape)[0], tokens, inputs[0], positions)
    return widen(y), gradients


WAYS = {
    "torch.autocast": partial(by_torch, emulated=False),
    "torch, emulated": partial(by_torch, emulated=True),
    "engine": by_engine,
    "numpy": by_numpy,
}
NO_FUNCTION_OF_THEIR_OWN = {("numpy", row) for row in ("matmul", "softmax", "reduction", "residual")}
MEASURABLE = [(way, row) for way in WAYS for row in INPUTS if (way, row) not in NO_FUNCTION_OF_THEIR_OWN]

# Where a way to compute differs from the table on purpose. amp/policy.py says why.
DIFFERENCES = {
    ("numpy", "linear"): {"grad_weight": "fp32"},  # rounded when the parts of a batch are added: see the test below
    ("numpy", "attention"): {"grad_input": "fp32"},  # rounded where linear_backward takes it
    ("numpy", "gelu"): {"operands": policy.LOW, "result": policy.LOW},  # it reads and writes 16 bits
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(("way", "row"), MEASURABLE)
def test_every_way_to_compute_has_the_precisions_of_the_table(way, row, low):
    """An operand is rounded if rounding it before changes nothing. A low result has values of the low dtype alone."""
    inputs = draw(*INPUTS[row])
    y, gradients = WAYS[way](row, inputs, low)
    y_of_rounded_inputs, _ = WAYS[way](row, [round_to(array, low) for array in inputs], low)
    input_gradients = gradients[:2] if row in ("matmul", "residual") else gradients[:1]
    weight_gradients = gradients[len(input_gradients) :]

    def precision(arrays) -> str:
        (all_values_low,) = {is_low(array, low) for array in arrays}  # one answer for all
        return policy.LOW if all_values_low else "fp32"

    expected = TABLE[row]._replace(**DIFFERENCES.get((way, row), {}))
    measured = expected._replace(
        operands=policy.LOW if np.array_equal(y, y_of_rounded_inputs) else "fp32",
        result=precision([y]),
        grad_input=precision(input_gradients),
    )
    if weight_gradients:
        measured = measured._replace(grad_weight=precision(weight_gradients))
    assert measured == expected


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(("way", "row"), [pair for pair in MEASURABLE if TABLE[pair[1]] == policy.PRODUCT])
def test_products_are_summed_in_fp32(way, row, low):
    """The sum of 512 numbers is rounded once, so it is off by half a unit at most. 16-bit sums are off by many."""
    terms = round_to(np.random.default_rng(0).uniform(0.5, 1, 512).astype(np.float32), low)
    if row == "attention":  # all scores are 0: the last token sees the mean of all values
        values = np.zeros((1, 1, 512, 4), np.float32)
        values[..., 0] = terms
        y, _ = WAYS[way](row, [np.zeros_like(values), np.zeros_like(values), values], low)
        result, exact = y[0, 0, -1, 0], terms.mean(dtype=np.float64)
    else:
        ones, bias = np.ones((512, 1), np.float32), np.zeros(1, np.float32)
        y, _ = WAYS[way](row, [terms[None], ones.T, bias] if row == "linear" else [terms[None], ones], low)
        result, exact = y.item(), terms.sum(dtype=np.float64)
    unit = FORMATS[low].eps * 2.0 ** math.floor(math.log2(exact))
    assert abs(result - exact) <= 0.51 * unit


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(("way", "hands_on"), [("torch.autocast", True), ("torch, emulated", False), ("engine", False)])
def test_gelu_after_a_linear_writes_16_bits_only_under_torch_autocast(way, hands_on, low):
    """It reads values of the low dtype everywhere. Where its result is fp32, the linear after it rounds."""
    x, weight = draw((6, 5), (4, 5))
    if way == "engine":
        with engine.autocast.autocast(low):
            y = ops.gelu(ops.linear(Tensor(x), Tensor(weight))).data
    else:
        with autocast("cpu", low, emulated=way == "torch, emulated"):
            y = F.gelu(F.linear(torch.from_numpy(x), torch.from_numpy(weight)), approximate="tanh")
        assert (y.dtype == torch.float32) == (not hands_on)
        y = y.float().numpy()
    assert is_low(y, low) == hands_on


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("way", WAYS)
def test_attention_rounds_its_probabilities_only_in_numpy(way, low):
    """The second token's probabilities are 0.5 + 2^-14 and 0.5 - 2^-14, which round to 0.5. Its values are 1 and -1."""
    queries, keys, values = np.zeros((3, 1, 1, 2, 1), np.float32)
    queries[0, 0, 1], keys[0, 0, 0] = 1, 2.0**-12
    values[0, 0, :, 0] = 1, -1
    y, _ = WAYS[way]("attention", [queries, keys, values], low)
    assert y[0, 0, 1, 0] == (0 if way == "numpy" else pytest.approx(2.0**-13, rel=1e-2))


# ---- whole models: gradients, logits, what lives from step to step


TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16)


def tiny_backend(way: str, low: str):
    backend = "torch" if way.startswith("torch") else way
    hardware = Hardware("cpu", "this CPU", low, way != "torch.autocast", "")
    settings = Settings(backend=backend, lr=1e-2)
    return backends.module(backend).build(settings, hardware, TINY, initial_weights(TINY, 3))


def tiny_logits(way: str, low: str) -> np.ndarray:
    """The logits of a whole model in the precision of training."""
    tokens = np.arange(5)[None]
    if way.startswith("torch"):
        gpt = minigpt.MiniGPT.from_weights(TINY, initial_weights(TINY, 3)).eval()
        with torch.no_grad(), autocast("cpu", low, emulated=way != "torch.autocast"):
            return gpt(torch.from_numpy(tokens)).numpy()
    return (
        backends.module(way)
        .sampler(Hardware("cpu", "", low, True, ""), TINY, initial_weights(TINY, 3), "fp32")
        .logits(tokens)
    )


def train_a_step(backend, batch_size: int) -> dict[str, np.ndarray]:
    """Takes a step and returns the gradients by name, as the optimizer saw them."""
    tokens = np.random.default_rng(0).integers(0, 11, (batch_size, 9))
    with backend.autocast():
        loss = backend.model(tokens[:, :-1], tokens[:, 1:], key=(3, 0, 0))
    (loss * 1024.0).backward()
    gradients = {}
    for group in backend.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            gradients[name] = np.asarray(parameter.grad).copy()
    backend.optimizer.step()
    return gradients


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_products_weights_are_rounded_and_kept_in_fp32(way, batch_size, low):
    """The engine's two threads round the gradients of their halves of a batch; the sums of two are fp32."""
    in_halves = way == "engine" and batch_size > 1
    for name, gradient in train_a_step(tiny_backend(way, low), batch_size).items():
        assert gradient.dtype == np.float32, name
        assert is_low(gradient, low) == (is_operand(name) and not in_halves), name


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_rounded_and_then_widened(way, low):
    logits = tiny_logits(way, low)
    assert logits.dtype == np.float32
    assert is_low(logits, low)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("way", WAYS)
def test_master_weights_and_moments_are_fp32(way, low):
    assert TABLE["optimizer"] == policy.EXACT
    backend = tiny_backend(way, low)
    train_a_step(backend, batch_size=4)
    state = backend.state()
    del state["optimizer"]["step"]
    for kind, arrays in state.items():
        for name, array in arrays.items():
            assert array.dtype == np.float32, f"{kind} {name}"
            assert not is_low(array, low), f"{kind} {name}"
