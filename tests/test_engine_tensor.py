"""The graph and its reverse pass: order, sums, broadcasting, memory, errors; random graphs against PyTorch."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.recompute import recompute
from engine.tensor import Node, Tensor, no_grad, recording


def leaf(*shape: int, dtype=np.float64, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(dtype), requires_grad=True)


def test_a_chain_of_100_000_ops():
    x = y = Tensor(np.float64(1.0), requires_grad=True)
    for _ in range(100_000):
        y = y * 1.00001 + 0.0
    forgotten = y * 1.0
    del forgotten
    y.backward()
    assert x.grad == pytest.approx(1.00001**100_000, rel=1e-9)
    deep = x
    for _ in range(100_000):
        deep = deep * 1.0
    del deep  # freed without backward, and without recursion


def test_a_tensor_used_several_times_gets_the_sum_of_its_gradients_once_all_are_there():
    x = leaf(3)
    y = x * x  # of three uses at different depths
    z = y * 2.0
    (y * z + z.exp() + y).backward(np.ones(3))
    v = x.data
    np.testing.assert_allclose(x.grad, 8 * v**3 + 4 * v * np.exp(2 * v * v) + 2 * v, rtol=1e-12)


def test_gradients_of_several_losses_add_up_in_memory_of_their_own():
    x, y = leaf(3), leaf(3, seed=1)
    upstream = np.ones(3)
    (x + y).backward(upstream)
    assert not np.shares_memory(x.grad, y.grad)  # clipping works in place
    assert not np.shares_memory(x.grad, upstream)
    kept = x.grad
    (x * 3).backward(upstream)
    np.testing.assert_array_equal(x.grad, np.full(3, 4.0))
    assert x.grad is kept
    np.testing.assert_array_equal(upstream, np.ones(3))


@pytest.mark.parametrize(("shape", "other"), [((3,), (2, 3)), ((2, 1), (2, 3)), ((), (2, 3)), ((1, 1), (4, 2, 3))])
def test_what_was_broadcast_gets_a_gradient_of_its_own_shape(shape, other):
    x = leaf(*shape)
    weights = np.arange(float(np.prod(other))).reshape(other)
    (x * weights).sum().backward()
    assert x.grad.shape == shape
    np.testing.assert_allclose(x.grad.sum(), weights.sum())
    if shape == (3,):
        np.testing.assert_array_equal(x.grad, weights.sum(0))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)]
)
def test_gradients_are_fp32_or_wider_and_numbers_do_not_widen(dtype, expected):
    x = leaf(3, dtype=dtype)
    y = (2 * x / 3 + 1.5) * np.float64(0.5) - x
    assert y.data.dtype == expected
    y.sum().backward()
    assert x.grad.dtype == expected


def test_no_grad_and_detach_remember_nothing():
    x = leaf(2)
    with no_grad():
        y = x * 2
        with recording(True):
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad
    assert not y.requires_grad
    assert (x * 2).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        1 / 0  # noqa: B018
    assert (x * 2).requires_grad
    detached = (x * 2).detach()
    (detached * x).sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)
    assert not (detached * 2).requires_grad


def test_errors():
    x = leaf(2, 3)
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) is no loss"):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\) for a tensor of shape \(2, 3\)"):
        (x * 2).backward(np.ones(3))
    with pytest.raises(RuntimeError, match="requires no gradient"):
        x.detach().sum().backward()
    middle = x * 2
    loss = middle.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="has run through this tensor before"):
        loss.backward()
    with pytest.raises(RuntimeError, match="has run through this tensor before"):
        (middle * 3).sum().backward()  # half of its graph is gone: silence would be a wrong gradient
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 2.0))


def small_graph(x):
    return (x @ x.transpose()).exp().tanh().max() * (x**2).mean() / x[0].sum()


@pytest.mark.parametrize("backward", [False, True])
def test_memory_goes_with_the_last_name_without_the_garbage_collector(backward):
    x = leaf(3, 4)
    gc.collect()
    gc.disable()
    try:
        loss = small_graph(x)
        nodes, waiting = [weakref.ref(loss)], [loss.node]
        while waiting:
            node = waiting.pop()
            waiting += node.parents
            if node.derive:
                kept = [cell.cell_contents for cell in node.derive.__closure__ or ()]
                nodes += [weakref.ref(thing) for thing in (node, *kept) if isinstance(thing, Node | np.ndarray)]
        del node, kept
        nodes = [ref for ref in nodes if ref() is not x.node and ref() is not x.data]
        assert len(nodes) > 12
        if backward:
            loss.backward()
            assert [ref for ref in nodes if ref() is not None] == nodes[:2], "the graph outlives its backward"
        del loss
        assert all(ref() is None for ref in nodes)
    finally:
        gc.enable()


# ---- random graphs: a list of (op, first, second) on a growing list of values, each 2 × 3 or broadcast to it

OPS = {  # of two values and zeros of 2 × 3, which stretch what is smaller
    "tanh": lambda a, b, zeros: a.tanh(),
    "gaussian": lambda a, b, zeros: (a * a * -1).exp(),
    "reshaped": lambda a, b, zeros: (a + zeros).reshape(3, 2).reshape(2, 3),
    "mean": lambda a, b, zeros: a.mean(),
    "row": lambda a, b, zeros: (a + zeros)[1],
    "sum of rows": lambda a, b, zeros: (a + zeros).sum(0) / 4,
    "add": lambda a, b, zeros: a + b,
    "sub": lambda a, b, zeros: a - b,
    "mul": lambda a, b, zeros: a * b,
    "div": lambda a, b, zeros: a / (b * b + 1),
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(list(OPS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
)


def execute(program, values, zeros):
    values = list(values)
    for name, first, second in program:
        a, b = (values[i % len(values)] for i in (first, second))
        values.append(OPS[name](a, b, zeros))
    total = values[0] * 0
    for value in values[3:]:
        total = total + value.tanh()
    return total.sum()


@settings(max_examples=80, deadline=None)
@given(PROGRAMS)
def test_random_graphs_have_torch_s_gradients_and_recomputed_ones_the_same_bits(program):
    arrays = [np.random.default_rng(n).standard_normal(shape) for n, shape in enumerate([(2, 3), (3,), ()])]

    def ours(run):
        leaves = [Tensor(array, requires_grad=True) for array in arrays]
        loss = run(leaves)
        loss.backward()
        return [loss.data, *(leaf.grad for leaf in leaves)]

    zeros = np.zeros((2, 3))
    found = ours(lambda leaves: execute(program, leaves, zeros))
    again = ours(lambda leaves: recompute(lambda *given: execute(program, given, zeros), *leaves))
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    expected = execute(program, tensors, torch.from_numpy(zeros))
    expected.backward()
    np.testing.assert_allclose(found[0], expected.item(), rtol=1e-10, atol=1e-12)
    for n, (array, recomputed, tensor) in enumerate(zip(found[1:], again[1:], tensors, strict=True)):
        assert (array is None) == (tensor.grad is None) == (recomputed is None), f"leaf {n}"
        if array is not None:
            np.testing.assert_allclose(array, tensor.grad.numpy(), rtol=1e-10, atol=1e-12, err_msg=f"leaf {n}")
            np.testing.assert_array_equal(array, recomputed, err_msg=f"leaf {n}")
