"""Every op, one line of CASES each: value, gradients and slopes in fp64, the error in fp32 and in 16 bits.

A new op needs a line in CASES, and in RULES of test_engine_autocast.py if it has a row in the table of
precisions.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine import ops
from engine.autocast import autocast
from engine.tensor import Tensor

ROOT = Path(__file__).resolve().parent.parent
INDICES = np.random.default_rng(0).integers(0, 7, (2, 5))  # of 7, some twice, some never
MATRIX = np.random.default_rng(3).standard_normal((5, 5))


def documented_softplus(x):
    """The op that the documentation adds as its example."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    blocks = (block.split("```")[0] for page in pages for block in page.split("```python\n")[1:])
    exec(next(block for block in blocks if "def softplus" in block), names := {})
    return names["softplus"](x)


def torch_attention(qkv):  # (3, B, NH, T, HS)
    return F.scaled_dot_product_attention(*qkv, is_causal=True)


def torch_cross_entropy(logits):
    return F.cross_entropy(logits.transpose(1, 2), torch.from_numpy(INDICES), reduction="none")


# name: our op, PyTorch's (None: the same expression), the shape of each input; "positive" inputs are above 0.5
CASES = {
    "add": (lambda a, b: a + b, None, (3, 5), (3, 5)),
    "add broadcast": (lambda a, b: a + b, None, (2, 3, 1), (4,)),
    "add a number": (lambda a: 2 + a + 0.5, None, (3,)),
    "sub": (lambda a, b: a - b, None, (3, 1), (1, 5)),
    "sub from a number": (lambda a: 1 - a, None, (3,)),
    "mul": (lambda a, b: a * b, None, (3, 5), (5,)),
    "mul by itself": (lambda a: a * a * a, None, (3, 5)),
    "div": (lambda a, b: a / b, None, (3, 5), ("positive", 3, 1)),
    "div a number": (lambda a: 1 / a, None, ("positive", 3)),
    "power": (lambda x: x**3, None, (3, 5)),
    "power of a half": (lambda x: x**-0.5, None, ("positive", 3, 5)),
    "power of zero": (lambda x: x**0, None, (3,)),
    "exp": (lambda x: x.exp(), None, (3, 5)),
    "log": (lambda x: x.log(), None, ("positive", 3, 5)),
    "tanh": (lambda x: x.tanh(), None, (3, 5)),
    "reshape": (lambda x: x.reshape(5, -1), None, (3, 5, 2)),
    "transpose": (lambda x: x.transpose(2, 0, 1), lambda x: x.permute(2, 0, 1), (3, 5, 2)),
    "transpose all": (lambda x: x.transpose(), lambda x: x.T, (3, 5)),
    "slice": (lambda x: x[1:, ::2], None, (3, 5, 2)),
    "slice a new axis": (lambda x: x[..., None, -1], None, (3, 5)),
    "split": (lambda x: x.split(3)[1], lambda x: x.chunk(3, -1)[1], (2, 6)),
    "split an axis": (lambda x: x.split(2, axis=0)[1], lambda x: x.chunk(2, 0)[1], (4, 3)),
    "sum": (lambda x: x.sum(), None, (3, 5)),
    "sum an axis": (lambda x: x.sum(-1), None, (3, 5)),
    "sum two axes": (lambda x: x.sum((0, 2), keepdims=True), lambda x: x.sum((0, 2), keepdim=True), (3, 5, 2)),
    "mean": (lambda x: x.mean(), None, (3, 5)),
    "mean two axes": (lambda x: x.mean((0, 2)), None, (3, 5, 2)),
    "max": (lambda x: x.max(), None, (3, 5)),
    "max an axis": (lambda x: x.max(1), lambda x: x.amax(1), (3, 5)),
    "max kept": (lambda x: x.max(0, keepdims=True), lambda x: x.amax(0, keepdim=True), (3, 5)),
    "max shared": (lambda x: (x + np.zeros(5)).max(1), lambda x: (x + torch.zeros(5)).amax(1), (3, 1)),
    "matmul": (lambda a, b: a @ b, None, (3, 5), (5, 2)),
    "matmul batched": (lambda a, b: a @ b, None, (2, 4, 3, 5), (2, 4, 5, 3)),
    "matmul with an array": (lambda a: a @ MATRIX, lambda a: a @ a.new_tensor(MATRIX), (3, 5)),
    "matmul of an array": (lambda a: MATRIX @ a, lambda a: a.new_tensor(MATRIX) @ a, (5, 3)),
    "matmul broadcast": (lambda a, b: a @ b, None, (2, 1, 3, 5), (4, 5, 1)),
    "linear": (ops.linear, F.linear, (2, 3, 5), (4, 5), (4,)),
    "linear without bias": (ops.linear, F.linear, (3, 5), (4, 5)),
    "the documented op": (documented_softplus, F.softplus, (3, 5)),
    "gelu": (ops.gelu, lambda x: F.gelu(x, approximate="tanh"), (3, 7)),
    "softmax": (ops.softmax, lambda x: x.softmax(-1), (2, 3, 5)),
    "layer_norm": (ops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), (2, 3, 8), (8,), (8,)),
    "embedding": (lambda w: ops.embedding(w, INDICES), lambda w: F.embedding(torch.from_numpy(INDICES), w), (7, 3)),
    "cross_entropy": (lambda z: ops.cross_entropy(z, INDICES), torch_cross_entropy, (2, 5, 7)),
    "attention": (ops.attention, torch_attention, (3, 2, 2, 5, 4)),
    "attention of one token": (ops.attention, torch_attention, (3, 1, 1, 1, 3)),
}


def draw(shapes, dtype=np.float64) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    inputs = []
    for shape in shapes:
        positive = shape[0] == "positive"
        array = random.standard_normal(shape[positive:])
        inputs.append((np.abs(array) + 0.5 if positive else array).astype(dtype))
    return inputs


def by_engine(function, inputs, dy, dtype: str = "fp32") -> dict[str, np.ndarray]:
    """Value and gradients."""
    tensors = [Tensor(array, requires_grad=True) for array in inputs]
    with autocast(dtype):
        value = function(*tensors)
    value.backward(dy)
    return {"value": value.data} | {f"gradient {n}": tensor.grad for n, tensor in enumerate(tensors)}


def by_torch(function, inputs, dy, dtype: str = "fp32") -> dict[str, np.ndarray]:
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype), enabled=dtype != "fp32"):
        value = function(*tensors)
    value.backward(torch.from_numpy(np.asarray(dy)).to(value.dtype))
    gradients = {f"gradient {n}": tensor.grad.double().numpy() for n, tensor in enumerate(tensors)}
    return {"value": value.detach().double().numpy()} | gradients


def slope(function, inputs, number: int, direction, dy) -> float:
    """Of the sum of value · dy, when the input of this number moves in a direction: by central differences."""
    step = 1e-6
    before, after = list(inputs), list(inputs)
    before[number] = inputs[number] - step * direction
    after[number] = inputs[number] + step * direction
    rise = function(*map(Tensor, after)).data - function(*map(Tensor, before)).data
    return (rise * dy).sum() / (2 * step)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_torch_s_and_gradients_are_slopes(case):
    function, theirs, *shapes = CASES[case]
    inputs = draw(shapes)
    random = np.random.default_rng(2)
    dy = random.standard_normal(function(*map(Tensor, inputs)).shape)
    found, expected = by_engine(function, inputs, dy), by_torch(theirs or function, inputs, dy)
    for name, reference in expected.items():
        assert found[name].shape == reference.shape, name
        np.testing.assert_allclose(found[name], reference, rtol=1e-12, atol=1e-12, err_msg=name)
    for number, (array, before) in enumerate(zip(inputs, draw(shapes), strict=True)):
        np.testing.assert_array_equal(array, before, err_msg=f"input {number} was changed")
        direction = random.standard_normal(array.shape)
        expected_slope = slope(function, inputs, number, direction, dy)
        along = (found[f"gradient {number}"] * direction).sum()
        assert along == pytest.approx(expected_slope, rel=1e-6, abs=1e-8), f"input {number}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_in_each_dtype_is_at_most_twice_torch_s(case, dtype):
    function, theirs, *shapes = CASES[case]
    theirs = theirs or function
    inputs = draw(shapes, np.float32)
    dy = np.random.default_rng(2).standard_normal(function(*map(Tensor, inputs)).shape).astype(np.float32)
    found, rival = by_engine(function, inputs, dy, dtype), by_torch(theirs, inputs, dy, dtype)
    exact = by_torch(theirs, [array.astype(np.float64) for array in inputs], dy)
    for name, reference in exact.items():
        error, bound = (np.linalg.norm(arrays[name] - reference) for arrays in (found, rival))
        assert found[name].dtype == np.float32, name
        assert error <= 2 * bound + 1e-6 * np.linalg.norm(reference), f"{name}: {error:.1e}, torch's {bound:.1e}"


def test_softmax_and_cross_entropy_do_not_overflow():
    logits = Tensor(np.array([[1e4, 0.0], [-1e4, 0.0]]))
    np.testing.assert_array_equal(ops.cross_entropy(logits, [0, 0]).data, [0, 1e4])
    np.testing.assert_array_equal(ops.softmax(logits).data, [[1, 0], [0, 1]])
    same = np.full((3, 1, 1, 2, 2), 1e4, np.float32)  # scores of 1e8
    np.testing.assert_array_equal(ops.attention(Tensor(same)).data, same[0])


def test_dropout_keeps_the_mean_drops_its_share_and_lets_the_same_gradients_through():
    x = Tensor(np.ones((200, 500), np.float32), requires_grad=True)
    with ops.drawing(np.random.default_rng(0)):
        y, z = ops.dropout(x, 0.3), ops.dropout(x, 0.3)
    assert abs((y.data == 0).mean() - 0.3) < 0.01
    assert abs(y.data.mean() - 1) < 0.01
    assert (y.data != z.data).any()
    y.backward(np.ones_like(y.data))
    np.testing.assert_array_equal(x.grad, y.data)
    assert ops.dropout(x, 0.0) is x
    with pytest.raises(RuntimeError, match="drawing"):
        ops.dropout(x, 0.3)


def test_attention_drops_probabilities():
    (qkv,) = draw([(3, 1, 2, 4, 3)])

    def attention(qkv):
        with ops.drawing(np.random.default_rng(5)):
            return ops.attention(qkv, 0.4)

    kept = np.random.default_rng(5).random((1, 2, 4, 4), dtype=np.float32) >= 0.4
    q, k, v = qkv
    scores = np.where(np.tri(4, dtype=bool), q @ k.swapaxes(-1, -2) / 3**0.5, -np.inf)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) * kept / 0.6
    found = by_engine(attention, [qkv], dy=p @ v)
    np.testing.assert_allclose(found["value"], p @ v, rtol=1e-7)  # p / 0.6 and p · (1 / 0.6) round differently
    direction = np.random.default_rng(3).standard_normal(qkv.shape)
    expected = slope(attention, [qkv], 0, direction, dy=p @ v)
    assert (found["gradient 0"] * direction).sum() == pytest.approx(expected, rel=1e-6)


def test_a_later_token_does_not_change_the_attention_of_earlier_ones():
    (qkv,) = draw([(3, 1, 1, 4, 2)])
    before = ops.attention(Tensor(qkv)).data
    qkv[:, :, :, 2:] += 1
    np.testing.assert_array_equal(ops.attention(Tensor(qkv)).data[:, :, :2], before[:, :, :2])


def test_sum_losses_has_the_gradients_of_its_losses_added_in_their_order():
    def leaves_and_losses():
        x, y = (Tensor(array, requires_grad=True) for array in draw([(50,), (50,)], np.float32))
        return (x, y), [(x * scale).tanh().sum() for scale in (0.3, 0.7, 1.1)] + [(x * y).sum()]

    expected, losses = leaves_and_losses()
    for loss in losses:
        loss.backward()
    found, again = leaves_and_losses()
    total = ops.sum_losses(again)
    total.backward()
    assert total.item() == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.grad, other.grad)


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape), requires_grad=True)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: zeros(2, 3) + zeros(4), ValueError, r"add: shapes \(2, 3\) and \(4,\) do not fit"),
        (lambda: zeros(2, 3) @ zeros(2, 3), ValueError, r"matmul: shapes \(2, 3\) and \(2, 3\) do not fit"),
        (lambda: zeros(3) @ zeros(3), ValueError, r"matmul: .* takes matrices"),
        (lambda: zeros(2, 3).reshape(4), ValueError, r"reshape: shapes \(2, 3\) do not fit"),
        (lambda: zeros(2, 3).sum(2), ValueError, r"sum: shapes \(2, 3\) do not fit"),
        (lambda: zeros(2)[[0, 0]], TypeError, "use embedding"),  # equal indices would overwrite each other's gradient
        (lambda: zeros(2, 5).split(3), ValueError, r"split: shape \(2, 5\) does not fit"),
        (lambda: ops.linear(zeros(2, 3), zeros(4, 5)), ValueError, r"linear: shapes \(2, 3\) and \(4, 5\)"),
        (lambda: ops.attention(zeros(2, 2, 2, 2, 2)), ValueError, r"attention: shapes \(2, 2, 2, 2, 2\) do not fit"),
        (lambda: ops.embedding(zeros(4, 2), [4]), IndexError, "embedding: indices from 4 to 4, but there are 4 rows"),
        (lambda: ops.cross_entropy(zeros(1, 2), [-1]), IndexError, "cross_entropy: indices from -1 to -1"),
    ],
)
def test_an_error_names_the_op_and_its_shapes(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
