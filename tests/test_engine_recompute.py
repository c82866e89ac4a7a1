"""Recomputation: when gradients have the same bits as without it, what a block may use, and what is kept."""

import gc
import weakref

import numpy as np
import pytest

from amp import policy
from engine import ops
from engine.autocast import autocast
from engine.graph import no_grad, recording
from engine.recompute import recompute
from engine.tensor import Tensor
from tests.test_engine_tensor import leaf


def block(x, w, b):
    return x + ops.dropout(ops.gelu(ops.linear(x, w, b)), 0.3)


def two_blocks(x, w, b):
    return block(block(x, w, b), w, b)


def loss_and_gradients(function, dtype: str = "fp32") -> dict[str, np.ndarray]:
    """Of a loss of `function(x, w, b)`, with dropout; backward outside of autocast, as in training."""
    leaves = {"x": leaf(4, 6), "w": leaf(6, 6, seed=1), "b": leaf(6, seed=2)}
    with autocast(dtype), ops.drawing(np.random.default_rng(3)):
        loss = (function(*leaves.values()) ** 2).mean()
    loss.backward()
    return {"loss": loss.data} | {name: tensor.grad for name, tensor in leaves.items()}


def differing(ours: dict, theirs: dict) -> list[str]:
    return [name for name, array in theirs.items() if array.tobytes() != ours[name].tobytes()]


def plain(x, w, b):
    return two_blocks(two_blocks(x, w, b), w, b)


def each_block(x, w, b):
    for _ in range(4):
        x = recompute(block, x, w, b)
    return x


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_loss_and_gradients_are_the_same_bit_for_bit(dtype):
    expected = loss_and_gradients(plain, dtype)
    assert (loss_and_gradients(plain, "fp32")["x"] != expected["x"]).any() == (dtype != "fp32")
    for function in (
        each_block,  # a weight that each recomputed block uses once
        lambda *leaves: recompute(plain, *leaves),
        lambda *leaves: recompute(each_block, *leaves),  # nested
    ):
        assert differing(loss_and_gradients(function, dtype), expected) == []


def test_gradients_of_a_tensor_used_several_times_inside_and_again_after_are_summed_in_another_order():
    def by_twos(x, w, b):
        return recompute(two_blocks, recompute(two_blocks, x, w, b), w, b)

    ours, theirs = loss_and_gradients(by_twos), loss_and_gradients(plain)
    assert differing(ours, theirs) == ["w", "b"]
    for name in ("w", "b"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_a_tensor_that_is_used_without_being_an_argument_gets_its_gradient():
    def kept(x, w, b):
        scale = w.sum().tanh()  # neither a leaf nor an argument
        return block(x, w * scale, b)

    def recomputed(x, w, b):
        scale = w.sum().tanh()
        return recompute(lambda x: block(x, w * scale, b), x)

    assert differing(loss_and_gradients(recomputed), loss_and_gradients(kept)) == []
    weight, constant = leaf(3), Tensor(np.ones(3))  # no argument requires a gradient
    recompute(lambda x: x * weight, constant).sum().backward()
    np.testing.assert_array_equal(weight.grad, np.ones(3))


def test_an_argument_may_be_the_result_and_another_may_go_unused():
    x, unused = leaf(3), leaf(3)
    recompute(lambda x, unused: x, x, unused).sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones(3))
    assert unused.grad is None


def test_a_function_whose_second_result_requires_no_gradient_is_an_error():
    x, runs = leaf(3), []

    def function(x):
        runs.append(x)
        return x * 2 if len(runs) == 1 else x.detach()

    with pytest.raises(RuntimeError, match="none in the second"):
        recompute(function, x).sum().backward()


def test_the_second_run_neither_uses_nor_changes_the_state_around_backward():
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
    computed, x = [], leaf(4)

    def function(x):
        y = x.exp()
        computed.append(weakref.ref(y.data))
        return y.tanh()

    gc.disable()
    try:
        y = recompute(function, x)
        assert computed[0]() is None
        result = weakref.ref(y.data)
        y.backward(np.ones(4))
        assert len(computed) == 2, "the second run"
        assert computed[1]() is None
        del y
        assert result() is None
    finally:
        gc.enable()
