"""Each layer's value and gradients against the same in PyTorch, in fp64; and where it rounds."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from amp.formats import narrow, round_to, widen
from model import numpy_layers

B, T, C, NH, V = 2, 5, 8, 2, 11
TOKENS, TARGETS = (np.random.default_rng(seed).integers(0, V, (B, T)) for seed in (0, 1))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def torch_attention(qkv):
    q, k, v = qkv.view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B * T, C)


def our_attention(qkv):
    o, p, kept = numpy_layers.attention(qkv, B, NH, "fp32", 0.0, None)
    return o, lambda do: [numpy_layers.attention_backward(do, qkv, p, kept, B, NH, "fp32", 0.0)]


def our_layer_norm(x, weight, bias):
    y, cache = numpy_layers.layer_norm(x, weight, bias)
    return y, lambda dy: numpy_layers.layer_norm_backward(dy, weight, *cache)


def our_cross_entropy(logits):
    losses, p = numpy_layers.cross_entropy(logits, TARGETS.ravel())
    return losses, lambda dlosses: [numpy_layers.cross_entropy_backward(dlosses, p, TARGETS.ravel())]


def our_linear(x, w, b):
    return numpy_layers.linear(x, w, b, "fp32"), lambda dy: numpy_layers.linear_backward(dy, x, w, "fp32")


def our_embedding(wte, wpe):
    return numpy_layers.embedding(TOKENS, wte, wpe), lambda dx: numpy_layers.embedding_backward(dx, TOKENS, wte, wpe)


LAYERS = {  # name -> (inputs, PyTorch's function of them, ours: value and backward)
    "embedding": (
        [draw(V, C), draw(T + 2, C)],  # more positions than are used
        lambda wte, wpe: (F.embedding(torch.from_numpy(TOKENS), wte) + wpe[:T]).view(B * T, C),
        our_embedding,
    ),
    "layer_norm": (
        [draw(B * T, C), draw(C), draw(C, seed=1)],
        lambda x, w, b: F.layer_norm(x, (C,), w, b),
        our_layer_norm,
    ),
    "linear": ([draw(B * T, C), draw(3, C), draw(3)], F.linear, our_linear),
    "gelu": (
        [4 * draw(B * T, C)],
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: (numpy_layers.gelu(x, "fp32"), lambda dy: [numpy_layers.gelu_backward(dy, x)]),
    ),
    "attention": ([draw(B * T, 3 * C)], torch_attention, our_attention),
    "cross_entropy": (
        [3 * draw(B * T, V)],
        lambda z: F.cross_entropy(z, torch.from_numpy(TARGETS.ravel()), reduction="none"),
        our_cross_entropy,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_value_and_gradients_are_pytorch_s(name):
    inputs, theirs, ours = LAYERS[name]
    before = [array.copy() for array in inputs]
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    expected = theirs(*tensors)
    value, backward = ours(*inputs)
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-12, atol=1e-12, err_msg=f"{name}: value")
    dy = draw(*value.shape, seed=2)
    gradients = backward(dy)
    expected.backward(torch.from_numpy(dy))
    for n, (gradient, tensor) in enumerate(zip(gradients, tensors, strict=True)):
        expected_gradient = tensor.grad.numpy()
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-12, err_msg=f"{name}: input {n}")
    for n, array in enumerate(inputs):
        np.testing.assert_array_equal(array, before[n], err_msg=f"{name}: input {n} was changed")


def test_a_linear_layer_without_bias():
    x, w = draw(4, C), draw(3, C)
    np.testing.assert_array_equal(numpy_layers.linear(x, w, None, "fp32"), x @ w.T)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_linear_layer_multiplies_rounded_operands_in_fp32_and_rounds(low):
    x, w, b, dy = (array.astype(np.float32) for array in (draw(6, C), draw(3, C), draw(3), draw(6, 3)))
    kept = [narrow(array, low) for array in (x, w, b)]
    y = numpy_layers.linear(*kept, low)
    x, w, b = (round_to(array, low) for array in (x, w, b))
    np.testing.assert_array_equal(widen(y), round_to(x @ w.T + b, low))
    dx, dw, db = numpy_layers.linear_backward(dy, kept[0], kept[1], low)
    dy = round_to(dy, low)
    np.testing.assert_array_equal(dx, round_to(dy @ w, low))
    np.testing.assert_array_equal(dw, dy.T @ x)  # rounded later, when the parts of the batch are summed
    np.testing.assert_array_equal(db, dy.sum(0))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_both_products_of_attention_take_rounded_operands(low):
    qkv, do = draw(B * T, 3 * C).astype(np.float32), round_to(draw(B * T, C).astype(np.float32), low)
    kept = narrow(qkv, low)
    o, p, _ = numpy_layers.attention(kept, B, NH, low, 0.0, None)
    dqkv = numpy_layers.attention_backward(do, kept, p, None, B, NH, low, 0.0)
    q, k, v = numpy_layers._heads(widen(kept), B, NH, 3)
    do, dq, dk, dv = *numpy_layers._heads(do, B, NH), *numpy_layers._heads(dqkv, B, NH, 3)
    p, HS = widen(p), C // NH
    assert (p == round_to(p, low)).all()
    dp = do @ v.swapaxes(-1, -2)
    ds = round_to(p * (dp - (dp * p).sum(-1, keepdims=True)) * np.float32(HS**-0.5), low)
    # 1e-6 is fp32's rounding; without that of the operands the results are off by 1e-4 (fp16) or 1e-3 (bf16)
    for name, ours, expected in (
        ("o", numpy_layers._heads(widen(o), B, NH)[0], round_to(p @ v, low)),
        ("dq", dq, ds @ k),
        ("dk", dk, ds.swapaxes(-1, -2) @ q),
        ("dv", dv, p.swapaxes(-1, -2) @ do),
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_softmax_and_cross_entropy_do_not_overflow():
    logits = np.array([[1e4, 0.0], [-1e4, 0.0]], np.float32)
    losses, p = numpy_layers.cross_entropy(logits, np.array([0, 0]))
    np.testing.assert_array_equal(losses, np.array([0, 1e4], np.float32))
    np.testing.assert_array_equal(p, [[1, 0], [0, 1]])
    qkv = np.full((2, 6), 1e4, np.float32)  # T = 2, one head of 2 channels: scores of 1e8
    np.testing.assert_array_equal(numpy_layers.attention(qkv, 1, 1, "fp32", 0.0, None)[0], qkv[:, :2])


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = np.ones((200, 500), np.float32)
    y, kept = numpy_layers.dropout(x, 0.3, np.random.default_rng(0))
    assert y.dtype == np.float32
    assert abs((y == 0).mean() - 0.3) < 0.01
    assert abs(y.mean() - 1) < 0.01
    np.testing.assert_array_equal(numpy_layers.dropout_backward(x, 0.3, kept), y)


def test_no_dropout_without_a_rate_or_a_generator():
    x = draw(2, 2)
    for y, kept in (numpy_layers.dropout(x, 0.0, np.random.default_rng(0)), numpy_layers.dropout(x, 0.5, None)):
        assert y is x
        assert kept is None
