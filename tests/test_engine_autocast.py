"""The table of precisions on the engine's ops, and how blocks of autocast nest."""

import numpy as np
import pytest

from amp import policy
from amp.formats import round_to, widen
from engine import ops
from engine.autocast import Weight, autocast
from engine.tensor import Tensor
from optim.adamw import AdamW

LOW = ("bf16", "fp16")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_blocks_nest_and_restore_the_state_also_after_an_exception():
    seen = [policy.compute_dtype()]
    with autocast("bf16"):
        seen.append(policy.compute_dtype())
        with autocast("bf16", enabled=False):
            seen.append(policy.compute_dtype())
            with autocast("fp16"):
                seen.append(policy.compute_dtype())
            seen.append(policy.compute_dtype())
        with pytest.raises(ZeroDivisionError), autocast("fp16"):
            1 / 0  # noqa: B018
        seen.append(policy.compute_dtype())
    assert [*seen, policy.compute_dtype()] == ["fp32", "bf16", "fp32", "fp16", "fp32", "bf16", "fp32"]
    with pytest.raises(ValueError, match="unknown compute dtype 'half'"), autocast("half"):
        pass


# op -> (function, shapes of its inputs, its row of the table)
OPS = {
    "linear": (ops.linear, [(2, 3, 5), (4, 5), (4,)], "linear"),
    "matmul": (ops.matmul, [(3, 5), (5, 4)], "matmul"),
    "attention": (ops.attention, [(3, 2, 2, 5, 4)], "attention"),
    "softmax": (ops.softmax, [(3, 5)], "softmax"),
    "layer_norm": (ops.layer_norm, [(3, 5), (5,), (5,)], "layer_norm"),
    "gelu": (ops.gelu, [(3, 5)], "gelu"),
    "cross_entropy": (lambda z: ops.cross_entropy(z, [0, 2, 4]), [(3, 5)], "cross_entropy"),
    "sum": (lambda x: x.sum(0), [(3, 5)], "reduction"),
    "mean": (lambda x: x.mean(0), [(3, 5)], "reduction"),
    "max": (lambda x: x.max(0), [(3, 5)], "reduction"),
    "add": (ops.add, [(3, 5), (3, 5)], "residual"),
    "embedding": (lambda w: ops.embedding(w, [0, 0, 2]), [(3, 5)], "embedding"),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", OPS)
def test_each_op_obeys_its_row_of_the_table(name, low):
    """A result in fp32 has bits that the low dtype has not; operands are rounded if rounding them changes nothing."""
    function, shapes, row = OPS[name]
    rule = policy.TABLE[row]

    def run(inputs):
        tensors = [Tensor(array, requires_grad=True) for array in inputs]
        with autocast(low):
            y = function(*tensors)
        y.backward(draw(*y.shape, seed=9))
        return y.data, [tensor.grad for tensor in tensors]

    def is_low(array):
        return bool((round_to(array, low) == array).all())

    inputs = [draw(*shape, seed=n) for n, shape in enumerate(shapes)]
    y, gradients = run(inputs)
    y_of_rounded, _ = run([round_to(array, low) for array in inputs])
    moves = not np.array_equal(y, y_of_rounded)
    assert moves == (rule.operands == "fp32"), "operands"
    assert is_low(y) == (rule.result == policy.LOW), "result"
    for number, gradient in enumerate(gradients):
        assert gradient.dtype == np.float32
        assert is_low(gradient) == (rule.grad_input == policy.LOW), f"gradient of input {number}"


@pytest.mark.parametrize("low", LOW)
def test_a_linear_op_is_a_product_of_rounded_operands_in_fp32_and_so_are_its_gradients(low):
    x, w, b, dy = draw(6, 5), draw(4, 5, seed=1), draw(4, seed=2), draw(6, 4, seed=3)
    tensors = [Tensor(array, requires_grad=True) for array in (x, w, b)]
    with autocast(low):
        y = ops.linear(*tensors)
    y.backward(dy)
    x, w, b, dy = (round_to(array, low) for array in (x, w, b, dy))
    np.testing.assert_array_equal(y.data, round_to(x @ w.T + b, low))
    for tensor, expected in zip(tensors, (dy @ w, dy.T @ x, dy.sum(0)), strict=True):
        np.testing.assert_array_equal(tensor.grad, round_to(expected, low))


def test_backward_outside_the_block_keeps_the_forward_s_precision():
    """And rounded gradients add up in fp32."""
    x, w = Tensor(draw(6, 5)), Tensor(draw(4, 5, seed=1), requires_grad=True)
    parts = []
    for seed in (2, 3):
        with autocast("bf16"):
            y = ops.linear(x, w)
        y.backward(draw(6, 4, seed=seed))
        parts.append(w.grad.copy())
    second = parts[1] - parts[0]
    assert (round_to(parts[0], "bf16") == parts[0]).all()
    assert (round_to(parts[1], "bf16") != parts[1]).any()
    np.testing.assert_allclose(second, round_to(second, "bf16"), rtol=1e-5)


@pytest.mark.parametrize("low", LOW)
def test_a_weight_has_an_fp32_master_and_a_shadow_that_products_use(low):
    master = draw(4, 5)
    weight, x = Weight(master.copy(), low), Tensor(np.eye(5, dtype=np.float32))
    optimizer = AdamW([{"params": [weight], "param_names": ["w"], "weight_decay": 0.0}], 1e-2, (0.9, 0.99))
    for _ in range(2):
        with autocast(low):
            y = ops.linear(x, weight)
        np.testing.assert_array_equal(y.data, round_to(weight.data, low).T)
        np.testing.assert_array_equal(ops.linear(x, weight).data, weight.data.T)  # outside, the master
        y.backward(np.ones_like(y.data))
        optimizer.step()
        optimizer.zero_grad()
        np.testing.assert_array_equal(widen(weight.shadow), round_to(weight.data, low))
    assert weight.shadow.itemsize == 2
    assert (round_to(weight.data, low) != weight.data).any()
    np.testing.assert_allclose(weight.data, master - 0.02, rtol=1e-4, atol=1e-4)


def test_fp64_is_left_alone():
    x, w = draw(3, 5).astype(np.float64), draw(2, 5, seed=1).astype(np.float64)
    with autocast("bf16"):
        np.testing.assert_array_equal(ops.linear(Tensor(x), Tensor(w)).data, x @ w.T)
