"""Every op through one helper: value and gradients against PyTorch and against slopes, and the error of 16 bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine import ops
from engine.autocast import autocast
from engine.tensor import Tensor

ENGINE_PAGE = (Path(__file__).resolve().parent.parent / "docs" / "engine.md").read_text(encoding="utf-8")
ROWS = np.random.default_rng(0).integers(0, 7, (2, 5))  # of 7, some twice, some never


def heads(function):
    """PyTorch's attention of (3, B, NH, T, HS)."""
    return lambda qkv: function(*qkv, is_causal=True)


def softplus(x):
    """The op that docs/engine.md adds."""
    code = next(block for block in ENGINE_PAGE.split("```python\n")[1:] if "def softplus" in block).split("```")[0]
    exec(code, names := {})
    return names["softplus"](x)


# id: ours, PyTorch's (None: the same expression), shapes of the inputs, which are normal or "positive"
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
    "split": (lambda x: ops.split(x, 3)[1], lambda x: x.chunk(3, -1)[1], (2, 6)),
    "split an axis": (lambda x: ops.split(x, 2, axis=0)[1], lambda x: x.chunk(2, 0)[1], (4, 3)),
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
    "matmul broadcast": (lambda a, b: a @ b, None, (2, 1, 3, 5), (4, 5, 1)),
    "linear": (ops.linear, F.linear, (2, 3, 5), (4, 5), (4,)),
    "linear without bias": (ops.linear, F.linear, (3, 5), (4, 5)),
    "the op of docs/engine.md": (softplus, F.softplus, (3, 5)),
    "gelu": (ops.gelu, lambda x: F.gelu(x, approximate="tanh"), (3, 7)),
    "softmax": (ops.softmax, lambda x: x.softmax(-1), (2, 3, 5)),
    "layer_norm": (ops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), (2, 3, 8), (8,), (8,)),
    "embedding": (lambda w: ops.embedding(w, ROWS), lambda w: F.embedding(torch.from_numpy(ROWS), w), (7, 3)),
    "cross_entropy": (
        lambda z: ops.cross_entropy(z, ROWS),
        lambda z: F.cross_entropy(z.transpose(1, 2), torch.from_numpy(ROWS), reduction="none"),
        (2, 5, 7),
    ),
    "attention": (ops.attention, heads(F.scaled_dot_product_attention), (3, 2, 2, 5, 4)),
    "attention of one token": (ops.attention, heads(F.scaled_dot_product_attention), (3, 1, 1, 1, 3)),
}


def draw(shapes, dtype=np.float64) -> list[np.ndarray]:
    random, inputs = np.random.default_rng(1), []
    for shape in shapes:
        positive = shape[0] == "positive"
        array = random.standard_normal(shape[positive:])
        inputs.append((np.abs(array) + 0.5 if positive else array).astype(dtype))
    return inputs


def ours(function, inputs, dy, low: str = "fp32") -> list[np.ndarray]:
    """Value and gradients."""
    tensors = [Tensor(array, requires_grad=True) for array in inputs]
    with autocast(low):
        value = function(*tensors)
    value.backward(dy)
    return [value.data, *(tensor.grad for tensor in tensors)]


def torchs(function, inputs, dy, low: str = "fp32") -> list[np.ndarray]:
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}.get(low), enabled=low != "fp32"):
        value = function(*tensors)
    value.backward(torch.from_numpy(np.asarray(dy)).to(value.dtype))
    return [value.detach().double().numpy(), *(tensor.grad.double().numpy() for tensor in tensors)]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_torch_s_and_the_slopes(case):
    function, theirs, *shapes = CASES[case]
    inputs, before = draw(shapes), draw(shapes)
    random, step = np.random.default_rng(2), 1e-6
    dy = random.standard_normal(function(*map(Tensor, inputs)).shape)
    found, expected = ours(function, inputs, dy), torchs(theirs or function, inputs, dy)
    for name, array, reference in zip(["value", "first", "second", "third"], found, expected, strict=False):
        assert array.shape == reference.shape, name
        np.testing.assert_allclose(array, reference, rtol=1e-12, atol=1e-12, err_msg=name)
    for number, (array, gradient) in enumerate(zip(inputs, found[1:], strict=True)):
        direction = random.standard_normal(array.shape)

        def value(side, number=number, direction=direction):
            moved = [a + side * step * direction if n == number else a for n, a in enumerate(inputs)]
            return (function(*map(Tensor, moved)).data * dy).sum()

        slope = (value(1) - value(-1)) / (2 * step)
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-8), f"input {number}"
        np.testing.assert_array_equal(array, before[number], err_msg=f"input {number} was changed")


@pytest.mark.parametrize("low", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_in_16_bits_is_at_most_twice_torch_s(case, low):
    function, theirs, *shapes = CASES[case]
    inputs, theirs = draw(shapes, np.float32), theirs or function
    dy = np.random.default_rng(2).standard_normal(function(*map(Tensor, inputs)).shape).astype(np.float32)
    exact = torchs(theirs, [array.astype(np.float64) for array in inputs], dy)
    for name, array, rival, reference in zip(
        ["value", "first", "second", "third"],
        ours(function, inputs, dy, low),
        torchs(theirs, inputs, dy, low),
        exact,
        strict=False,
    ):
        error, bound = (np.linalg.norm(a - reference) for a in (array, rival))
        assert array.dtype == np.float32, name
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
    """Against a written-out one with the same mask, and the slope."""
    (qkv,) = draw([(3, 1, 2, 4, 3)])

    def value(qkv):
        with ops.drawing(np.random.default_rng(5)):
            return ops.attention(qkv, 0.4)

    kept = np.random.default_rng(5).random((1, 2, 4, 4), dtype=np.float32) >= 0.4
    q, k, v = qkv
    s = np.where(np.tri(4, dtype=bool), q @ k.swapaxes(-1, -2) / 3**0.5, -np.inf)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True) * kept / 0.6
    np.testing.assert_allclose(value(Tensor(qkv)).data, p @ v, rtol=1e-7)  # 1 / (1 - rate) is rounded by no one
    _, gradient = ours(value, [qkv], p @ v)
    direction, step = np.random.default_rng(3).standard_normal(qkv.shape), 1e-6
    up, down = ((value(Tensor(qkv + side * step * direction)).data * (p @ v)).sum() for side in (1, -1))
    assert (gradient * direction).sum() == pytest.approx((up - down) / (2 * step), rel=1e-6)


def test_a_later_token_does_not_change_earlier_ones():
    (qkv,) = draw([(3, 1, 1, 4, 2)])
    before = ops.attention(Tensor(qkv)).data
    qkv[:, :, :, 2:] += 1
    np.testing.assert_array_equal(ops.attention(Tensor(qkv)).data[:, :, :2], before[:, :, :2])


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: zeros(2, 3) + zeros(4), ValueError, r"add: shapes \(2, 3\) and \(4,\) do not fit"),
        (lambda: zeros(2, 3) @ zeros(2, 3), ValueError, r"matmul: shapes \(2, 3\) and \(2, 3\) do not fit"),
        (lambda: zeros(3) @ zeros(3), ValueError, r"matmul: .* takes matrices"),
        (lambda: zeros(2, 3).reshape(4), ValueError, r"reshape: shapes \(2, 3\) do not fit"),
        (lambda: zeros(2, 3).sum(2), ValueError, r"sum: shapes \(2, 3\) do not fit"),
        (lambda: ops.linear(zeros(2, 3), zeros(4, 5)), ValueError, r"linear: shapes \(2, 3\) and \(4, 5\)"),
        (lambda: ops.attention(zeros(2, 2, 2, 2, 2)), ValueError, r"attention: shapes \(2, 2, 2, 2, 2\) do not fit"),
        (lambda: ops.split(zeros(2, 5), 3), ValueError, r"split: shape \(2, 5\) does not fit"),
        (lambda: ops.embedding(zeros(4, 2), [4]), IndexError, "embedding: indices from 4 to 4, but there are 4 rows"),
        (lambda: ops.cross_entropy(zeros(1, 2), [-1]), IndexError, "cross_entropy: indices from -1 to -1"),
        (lambda: zeros(2)[[0, 0]], TypeError, "use embedding"),  # a sum over equal indices would be lost
        (lambda: Tensor("text"), TypeError, "holds numbers"),
    ],
)
def test_what_does_not_fit_is_told_by_name(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape), requires_grad=True)
