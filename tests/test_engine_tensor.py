"""Tensor: its dtypes, its gradients and where they lie in memory, its errors. Its ops: test_engine_ops.py."""

import numpy as np
import pytest

from engine.tensor import Tensor


def leaf(*shape: int, dtype=np.float32, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(dtype), requires_grad=True)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)]
)
def test_values_and_gradients_are_fp32_or_fp64_and_a_number_does_not_widen_them(dtype, expected):
    x = leaf(3, dtype=dtype)
    y = (2 * x / 3 + 1.5) * np.float64(0.5) - x
    assert y.data.dtype == expected
    y.sum().backward()
    assert x.grad.dtype == expected


def test_gradients_of_several_losses_add_up_in_memory_of_their_own():
    x, y = leaf(3), leaf(3, seed=1)
    upstream = np.ones(3, np.float32)
    (x + y).backward(upstream)
    assert not np.shares_memory(x.grad, y.grad)  # clipping works in place
    assert not np.shares_memory(x.grad, upstream)
    kept = x.grad
    (x * 3).backward(upstream)
    np.testing.assert_array_equal(x.grad, np.full(3, 4.0))
    assert x.grad is kept
    np.testing.assert_array_equal(upstream, np.ones(3))


def test_a_detached_tensor_is_outside_the_graph():
    x = leaf(2)
    detached = (x * 2).detach()
    (detached * x).sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)
    assert not (detached * 2).requires_grad


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: (x * 2).backward(), RuntimeError, r"shape \(2, 3\) is no loss"),
        (lambda x: x.backward(np.ones(3)), ValueError, r"gradient of shape \(3,\) for a tensor of shape \(2, 3\)"),
        (lambda x: x.detach().sum().backward(), RuntimeError, "requires no gradient"),
        (lambda x: setattr(x.detach(), "grad", np.ones((2, 3))), RuntimeError, "requires no gradient"),
        (lambda x: Tensor("text"), TypeError, "holds numbers"),
    ],
)
def test_an_error_says_what_is_wrong(call, kind, message):
    with pytest.raises(kind, match=message):
        call(leaf(2, 3))
