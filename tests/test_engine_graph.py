"""The graph and its reverse pass: order, sums, broadcasting, memory; random graphs against PyTorch."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.graph import Node, no_grad, recording
from engine.recompute import recompute
from engine.tensor import Tensor
from tests.test_engine_tensor import leaf


def test_a_graph_of_100_000_ops_in_a_row_is_differentiated_and_freed_without_recursion():
    x = y = Tensor(np.float64(1.0), requires_grad=True)
    for _ in range(100_000):
        y = y * 1.00001 + 0.0
    unused = y * 1.0
    del unused
    y.backward()
    assert x.grad == pytest.approx(1.00001**100_000, rel=1e-9)
    deep = x
    for _ in range(100_000):
        deep = deep * 1.0
    del deep  # freed without backward


def test_a_tensor_used_at_several_depths_gets_the_sum_of_all_gradients():
    x = leaf(3, dtype=np.float64)
    y = x * x
    z = y * 2.0
    (y * z + z.exp() + y).backward(np.ones(3))
    v = x.data
    np.testing.assert_allclose(x.grad, 8 * v**3 + 4 * v * np.exp(2 * v * v) + 2 * v, rtol=1e-12)


def test_adding_to_a_gradient_leaves_the_array_that_another_tensor_shares_with_it():
    x, y = leaf(3), leaf(3, seed=1)
    older = x * 2
    (older + (x + y)).backward(np.ones(3))  # x and y get the same array from x + y, and x gets more from `older`
    np.testing.assert_array_equal(x.grad, np.full(3, 3.0))
    np.testing.assert_array_equal(y.grad, np.ones(3))


@pytest.mark.parametrize(("shape", "other"), [((3,), (2, 3)), ((2, 1), (2, 3)), ((), (2, 3)), ((1, 1), (4, 2, 3))])
def test_a_tensor_that_numpy_stretched_gets_a_gradient_of_its_own_shape(shape, other):
    x = leaf(*shape)
    weights = np.arange(float(np.prod(other))).reshape(other)
    (x * weights).sum().backward()
    assert x.grad.shape == shape
    stretched = np.broadcast_to(np.arange(x.data.size).reshape(shape), other)  # which number of x stood where
    np.testing.assert_allclose(x.grad.ravel(), np.bincount(stretched.ravel(), weights.ravel()))


def test_ops_inside_no_grad_add_nothing_to_the_graph():
    x = leaf(2)
    with no_grad():
        assert not (x * 2).requires_grad
        with recording(True):
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        1 / 0  # noqa: B018
    assert (x * 2).requires_grad


def test_backward_runs_once_and_a_graph_half_consumed_is_an_error():
    x = leaf(2, 3)
    middle = x * 2
    loss = middle.sum()
    loss.backward()
    for again in (loss, (middle * 3).sum()):  # silence would be a wrong gradient
        with pytest.raises(RuntimeError, match="has run through this tensor before"):
            again.backward()
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 2.0))


def small_graph(x):
    return (x @ x.transpose()).exp().tanh().max() * (x**2).mean() / x[0].sum()


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_freed_with_the_last_name_without_the_garbage_collector(backward):
    x = leaf(3, 4)
    gc.collect()
    gc.disable()
    try:
        loss = small_graph(x)
        held = [weakref.ref(loss)]
        waiting = [loss.node]
        while waiting:
            node = waiting.pop()
            waiting += node.parents
            if node.backward:
                kept = [cell.cell_contents for cell in node.backward.__closure__ or ()]
                held += [weakref.ref(thing) for thing in (node, *kept) if isinstance(thing, Node | np.ndarray)]
        del node, kept
        held = [ref for ref in held if ref() is not x.node and ref() is not x.data]
        assert len(held) > 12
        if backward:
            loss.backward()
            assert [ref for ref in held if ref() is not None] == held[:2], "the graph outlives its backward"
        del loss
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.reshape(4, 3),
        lambda x: x.transpose(),
        lambda x: x[1:],
        lambda x: x.sum(0),
        lambda x: x.mean(0),
        lambda x: x + 1,
    ],
)
def test_an_op_whose_derivative_needs_no_numbers_keeps_none(op):
    x = leaf(3, 4)
    middle = x + 1
    numbers = weakref.ref(middle.data)
    y = op(middle) + 1
    del middle
    assert numbers() is None
    y.sum().backward()


# ---- random graphs: a program is a list of (op, first, second), numbers of a growing list of values

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
    zeros = np.zeros((2, 3))

    def by_engine(run):
        leaves = [Tensor(array, requires_grad=True) for array in arrays]
        loss = run(leaves)
        loss.backward()
        return [loss.data, *(leaf.grad for leaf in leaves)]

    kept = by_engine(lambda leaves: execute(program, leaves, zeros))
    recomputed = by_engine(lambda leaves: recompute(lambda *inputs: execute(program, inputs, zeros), *leaves))
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    loss = execute(program, tensors, torch.from_numpy(zeros))
    loss.backward()
    expected = [loss.detach().numpy(), *(None if tensor.grad is None else tensor.grad.numpy() for tensor in tensors)]
    for name, one, again, reference in zip(["loss", *"xyz"], kept, recomputed, expected, strict=True):
        assert (one is None) == (again is None) == (reference is None), name
        if one is not None:
            np.testing.assert_allclose(one, reference, rtol=1e-10, atol=1e-12, err_msg=name)
            np.testing.assert_array_equal(one, again, err_msg=name)
