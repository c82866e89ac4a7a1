"""Recomputation: the same bits as without it, for anything a block may use; and what it keeps."""

import gc
import weakref

import numpy as np
import pytest

from amp import policy
from engine import ops
from engine.autocast import autocast
from engine.recompute import recompute
from engine.tensor import Tensor, no_grad, recording

DTYPES = ("fp32", "bf16", "fp16")


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), requires_grad=True)


def block(x, w, b):
    return x + ops.dropout(ops.gelu(ops.linear(x, w, b)), 0.3)


def gradients(run, dtype: str = "fp32") -> list[np.ndarray]:
    """Of a loss of `run(x, w, b)`, with dropout; backward outside of autocast, as in training."""
    leaves = [leaf(4, 6), leaf(6, 6, seed=1), leaf(6, seed=2)]
    with autocast(dtype), ops.drawing(np.random.default_rng(3)):
        loss = (run(*leaves) ** 2).mean()
    loss.backward()
    return [loss.data, *(tensor.grad for tensor in leaves)]


def assert_same_bits(ours, theirs):
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.tobytes() == other.tobytes(), f"number {n} (the loss, then gradients)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_same_bit_for_bit(dtype):
    def plain(x, w, b):
        for _ in range(3):
            x = block(x, w, b)
        return x

    def one_by_one(x, w, b):
        for _ in range(3):
            x = recompute(block, x, w, b)
        return x

    expected = gradients(plain, dtype)
    assert_same_bits(gradients(lambda *given: recompute(plain, *given), dtype), expected)
    assert_same_bits(gradients(lambda *given: recompute(one_by_one, *given), dtype), expected)  # nested
    loss, dx, *_ = gradients(one_by_one, dtype)  # the weights' three gradients are added in another order
    assert_same_bits([loss, dx], expected[:2])
    assert (gradients(plain, "fp32")[1] != expected[1]).any() == (dtype != "fp32")


def test_what_a_block_uses_without_being_given_it_gets_its_gradient():
    def plain(x, w, b):
        scale = w.sum().tanh()  # neither a leaf nor an argument
        return block(x, w * scale, b)

    def recomputed(x, w, b):
        scale = w.sum().tanh()
        return recompute(lambda x: block(x, w * scale, b), x)

    for ours, theirs in zip(gradients(recomputed), gradients(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)
    weight, constant = leaf(3), Tensor(np.ones(3))  # no argument requires a gradient
    recompute(lambda x: x * weight, constant).sum().backward()
    np.testing.assert_array_equal(weight.grad, np.ones(3))


def test_an_argument_may_come_back_as_it_is_and_others_may_go_unused():
    x, unused = leaf(3), leaf(3)
    recompute(lambda x, unused: x, x, unused).sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones(3))
    assert unused.grad is None


def test_the_state_around_backward_is_neither_used_nor_changed():
    random = np.random.default_rng(7)
    x = leaf(50)
    with autocast("fp16"), ops.drawing(random):
        y = recompute(lambda x: ops.dropout(x, 0.5) * 2, x)
        with no_grad():
            assert not recompute(lambda x: x * 2, x).requires_grad
    before = random.bit_generator.state
    with autocast("bf16"), ops.drawing(random), recording(False):
        y.backward(np.ones(50))
        assert policy.compute_dtype() == "bf16"
    assert random.bit_generator.state == before
    np.testing.assert_array_equal(x.grad != 0, y.data != 0)


def test_only_the_inputs_and_the_result_are_kept():
    kept, x = [], leaf(4)

    def function(x):
        y = x.exp()
        kept.append(weakref.ref(y.data))
        return y.tanh()

    gc.disable()
    try:
        y = recompute(function, x)
        assert kept[0]() is None
        result = weakref.ref(y.data)
        y.backward(np.ones(4))
        assert len(kept) == 2, "the second run"
        assert kept[1]() is None
        del y
        assert result() is None
    finally:
        gc.enable()
