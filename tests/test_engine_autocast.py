"""The engine's ops obey the table of precisions; autocast blocks nest; weights have a 16-bit shadow."""

import numpy as np
import pytest

from amp import policy
from amp.formats import round_to, widen
from engine import ops
from engine.autocast import Weight, autocast
from engine.tensor import Tensor
from optim.adamw import AdamW
from tests.test_engine_ops import CASES, by_engine, draw

LOW = ("bf16", "fp16")


def standard_normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_blocks_nest_and_restore_the_former_dtype_also_after_an_exception():
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


RULES = {  # a case of test_engine_ops.py -> its row of the table
    "linear": "linear",
    "matmul": "matmul",
    "attention": "attention",
    "softmax": "softmax",
    "layer_norm": "layer_norm",
    "gelu": "gelu",
    "cross_entropy": "cross_entropy",
    "sum an axis": "reduction",
    "mean two axes": "reduction",
    "max an axis": "reduction",
    "add": "residual",
    "embedding": "embedding",
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("case", RULES)
def test_each_op_obeys_its_row_of_the_table(case, low):
    """An fp32 result has bits that the low dtype lacks. If rounding operands changes nothing, the op rounds."""
    function, _, *shapes = CASES[case]
    rule = policy.TABLE[RULES[case]]

    def is_low(array):
        return bool((round_to(array, low) == array).all())

    inputs = draw(shapes, np.float32)
    dy = standard_normal(*function(*map(Tensor, inputs)).shape, seed=9)
    found = by_engine(function, inputs, dy, low)
    of_rounded = by_engine(function, [round_to(array, low) for array in inputs], dy, low)
    changes = not np.array_equal(found["value"], of_rounded["value"])
    assert changes == (rule.operands == "fp32"), "operands"
    assert is_low(found.pop("value")) == (rule.result == policy.LOW), "result"
    for name, gradient in found.items():
        assert gradient.dtype == np.float32
        assert is_low(gradient) == (rule.grad_input == policy.LOW), name


@pytest.mark.parametrize("low", LOW)
def test_linear_and_its_gradients_are_rounded_fp32_products_of_rounded_operands(low):
    shapes = [(6, 5), (4, 5), (4,), (6, 4)]
    x, w, b, dy = (standard_normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    tensors = [Tensor(array, requires_grad=True) for array in (x, w, b)]
    with autocast(low):
        y = ops.linear(*tensors)
    y.backward(dy)
    x, w, b, dy = (round_to(array, low) for array in (x, w, b, dy))
    np.testing.assert_array_equal(y.data, round_to(x @ w.T + b, low))
    for tensor, expected in zip(tensors, (dy @ w, dy.T @ x, dy.sum(0)), strict=True):
        np.testing.assert_array_equal(tensor.grad, round_to(expected, low))


@pytest.mark.parametrize("low", LOW)
def test_matmul_rounds_an_array_like_a_tensor(low):
    x, array = Tensor(standard_normal(20, 20)), standard_normal(20, 20, seed=1)
    with autocast(low):
        np.testing.assert_array_equal((x @ array).data, (x @ Tensor(array)).data)
        np.testing.assert_array_equal((array @ x).data, (Tensor(array) @ x).data)


def test_backward_outside_the_block_rounds_as_inside_and_gradients_add_up_in_fp32():
    x, w = Tensor(standard_normal(6, 5)), Tensor(standard_normal(4, 5, seed=1), requires_grad=True)
    parts = []
    for seed in (2, 3):
        with autocast("bf16"):
            y = ops.linear(x, w)
        y.backward(standard_normal(6, 4, seed=seed))
        parts.append(w.grad.copy())
    second = parts[1] - parts[0]
    assert (round_to(parts[0], "bf16") == parts[0]).all()
    assert (round_to(parts[1], "bf16") != parts[1]).any()
    np.testing.assert_allclose(second, round_to(second, "bf16"), rtol=1e-5)


@pytest.mark.parametrize("low", LOW)
def test_products_use_a_weight_s_16_bit_shadow_and_the_optimizer_its_fp32_master(low):
    master = standard_normal(4, 5)
    weight, x = Weight(master.copy(), low), Tensor(np.eye(5, dtype=np.float32))
    optimizer = AdamW([{"params": [weight], "param_names": ["w"], "weight_decay": 0.0}], 1e-2, (0.9, 0.99))
    for _ in range(2):
        with autocast(low):
            y = ops.linear(x, weight)
        np.testing.assert_array_equal(y.data, round_to(weight.data, low).T)
        np.testing.assert_array_equal(ops.linear(x, weight).data, weight.data.T)  # outside of autocast: the master
        y.backward(np.ones_like(y.data))
        optimizer.step()
        optimizer.zero_grad()
        np.testing.assert_array_equal(widen(weight.shadow), round_to(weight.data, low))
    assert weight.shadow.itemsize == 2
    assert (round_to(weight.data, low) != weight.data).any()
    np.testing.assert_allclose(weight.data, master - 0.02, rtol=1e-4, atol=1e-4)


def test_a_weight_is_rounded_anew_for_a_dtype_that_is_not_its_shadow_s():
    weight, x = Weight(standard_normal(4, 5), "bf16"), Tensor(np.eye(5, dtype=np.float32))
    with autocast("fp16"):
        np.testing.assert_array_equal(ops.linear(x, weight).data, round_to(weight.data, "fp16").T)
    weight.shadow[...] = 0
    with autocast("bf16"):
        np.testing.assert_array_equal(ops.linear(x, weight).data, np.zeros((5, 4)))  # here the shadow itself


def test_fp64_is_not_rounded():
    x, w = standard_normal(3, 5).astype(np.float64), standard_normal(2, 5, seed=1).astype(np.float64)
    with autocast("bf16"):
        np.testing.assert_array_equal(ops.linear(Tensor(x), Tensor(w)).data, x @ w.T)
