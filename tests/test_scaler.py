"""The loss scaler's own promises: skips, bounds of the scale, counts and names, NumPy gradients, no framework.

That its decisions are torch.amp.GradScaler's is tested in test_grad_scaler.py.
"""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp.scaler import DynamicLossScaler, TooManySkips
from tests.test_grad_scaler import (
    FP32_MAX,
    INF,
    NAN,
    OPTIMIZERS,
    OVERFLOWING,
    Iteration,
    Life,
    bits,
    grad_scaler,
    iterate,
    one_parameter,
    unbounded,
)

ROOT = Path(__file__).parents[1]


def numpy_optimizer(*gradients):
    """Returns an optimizer whose parameters have NumPy gradients. Its `step` counts its calls."""
    parameters = [SimpleNamespace(grad=gradient) for gradient in gradients]
    optimizer = SimpleNamespace(param_groups=[{"params": parameters}], steps=0)
    optimizer.step = lambda: vars(optimizer).update(steps=optimizer.steps + 1)
    return optimizer


# ---- a skip


def state_bits(life: Life) -> tuple:
    """Returns the bits of the parameters, and those of the optimizer's state."""
    moments = [sorted(state.items()) for state in life.optimizers[0].state.values()]
    return bits(life.parameters[0]), [(name, bits([value])) for state in moments for name, value in state]


@pytest.mark.parametrize("bad", OVERFLOWING)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("unscaled", [False, True], ids=["step", "unscale_ and step"])
def test_a_skip_changes_nothing_but_the_scaler(kind, bad, unscaled):
    life = Life(DynamicLossScaler(2.0**10), [kind])
    good, overflow = (Iteration([(0.37, value)], by_backward=True, unscaled=(unscaled,)) for value in (-3.0, bad))
    life.live(good)
    before = state_bits(life)
    life.live(overflow)
    assert state_bits(life) == before
    assert (life.scaler.get_scale(), life.scaler.skipped_steps) == (2.0**9, 1)
    life.live(good)
    assert all(after != b for after, b in zip(state_bits(life), before, strict=True)), "the next good step is taken"


@pytest.mark.parametrize("gradients", [(8.0, INF), (INF, 8.0), (INF, NAN)])
def test_each_overflowing_optimizer_skips_and_the_scale_backs_off_once(gradients):
    scaler, skips = DynamicLossScaler(8.0), [not math.isfinite(gradient) for gradient in gradients]
    for gradient, skip in zip(gradients, skips, strict=True):
        parameter, optimizer = one_parameter(gradient)
        assert scaler.step(optimizer) is None
        assert scaler.last_step_skipped == skip
        assert parameter.tolist() == pytest.approx([1.0 if skip else 0.9] * 4)
    scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.consecutive_skips) == (4.0, sum(skips), 1)


@pytest.mark.parametrize("gradient", [1e38, -1e38, FP32_MAX])
def test_huge_finite_gradients_are_no_overflow(gradient):
    """Their sum and their norm would be inf."""
    array = np.full(1000, gradient, np.float32)
    parameter = torch.zeros(1000, requires_grad=True)
    parameter.grad = torch.from_numpy(array.copy())
    for optimizer in (numpy_optimizer(array), torch.optim.SGD([parameter], lr=1.0)):
        scaler = DynamicLossScaler(4.0)
        scaler.step(optimizer)
        assert not scaler.last_step_skipped
    assert parameter.tolist() == [-np.float32(gradient) / 4] * 1000
    assert array.tolist() == [np.float32(gradient) / 4] * 1000


def test_an_iteration_reads_one_value_from_the_device():
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    parameters = [torch.ones(3, requires_grad=True) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = DynamicLossScaler()
    with Reads() as reads:
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert reads.count == 1


def test_gradients_with_a_graph_of_their_own_are_unscaled():
    parameter, optimizer = one_parameter(None)
    scaler = DynamicLossScaler(8.0)
    loss = scaler.scale((parameter**2).sum())
    parameter.grad = torch.autograd.grad(loss, parameter, create_graph=True)[0]
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [2.0] * 4


# ---- bounds of the scale


def test_the_scale_is_an_fp32_value():
    scaler = DynamicLossScaler(1.1, 1.3, 0.7, growth_interval=1, min_scale=None)
    expected = np.float32(1.1)
    assert scaler.get_scale() == expected
    for gradient, factor in ((1.0, 1.3), (INF, 0.7)):
        iterate(scaler, gradient)
        expected = np.float32(float(expected) * factor)
        assert scaler.get_scale() == expected
    scaler.update(1.7)
    assert scaler.get_scale() == np.float32(1.7)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1.9})
    assert scaler.get_scale() == np.float32(1.9)


@pytest.mark.parametrize("scale", [NAN, INF, -INF, -1.0, 1e39])
def test_a_scale_that_is_no_finite_fp32_number_is_refused(scale):
    scaler = DynamicLossScaler(8.0)
    before = scaler.state_dict()
    for set_scale in (
        DynamicLossScaler,
        scaler.update,
        lambda scale: scaler.update(torch.tensor(scale)),
        lambda scale: scaler.load_state_dict(before | {"scale": scale, "growth_interval": 3}),
    ):
        with pytest.raises(ValueError, match="loss scale must be"):
            set_scale(scale)
    assert scaler.state_dict() == before
    assert DynamicLossScaler(scale, enabled=False).get_scale() == 1.0


@pytest.mark.parametrize(
    "bounds",
    [
        *({"min_scale": 4.0, "max_scale": 2.0}, {"min_scale": INF}, {"min_scale": 1e39}, {"min_scale": NAN}),
        *({"min_scale": None, "max_scale": -1.0}, {"max_scale": NAN}),
    ],
)
def test_bounds_that_could_not_be_a_scale_or_are_the_wrong_way_round_are_refused(bounds):
    with pytest.raises(ValueError, match="min_scale"):
        DynamicLossScaler(**bounds)


@pytest.mark.parametrize(
    ("bounds", "asked", "held"),
    [
        ({}, 0.25, 1.0),  # the lowest scale is 1 unless asked otherwise
        ({"min_scale": None}, 0.25, 0.25),
        ({"min_scale": 4.0, "max_scale": 1024.0}, 0.25, 4.0),
        ({"min_scale": 4.0, "max_scale": 1024.0}, 16.0, 16.0),
        ({"min_scale": 4.0, "max_scale": 1024.0}, 2.0**40, 1024.0),
    ],
)
def test_bounds_hold_the_initial_the_set_and_the_loaded_scale(bounds, asked, held):
    made, updated, loaded = DynamicLossScaler(asked, **bounds), DynamicLossScaler(**bounds), DynamicLossScaler(**bounds)
    updated.update(asked)
    loaded.load_state_dict(unbounded(init_scale=asked).state_dict())
    assert [scaler.get_scale() for scaler in (made, updated, loaded)] == [held] * 3


def test_bounds_hold_the_grown_and_the_backed_off_scale():
    scaler = DynamicLossScaler(16.0, growth_interval=1, growth_factor=8.0, min_scale=4.0, max_scale=100.0)
    scales = [(iterate(scaler, gradient), scaler.get_scale())[1] for gradient in [1.0, 1.0] + [INF] * 6]
    assert scales == [100.0, 100.0, 50.0, 25.0, 12.5, 6.25, 4.0, 4.0]


# ---- what the scaler tells about skips


def test_skips_are_counted():
    scaler = DynamicLossScaler()
    counts = []
    for gradient in (1.0, INF, NAN, 1.0, INF):
        iterate(scaler, gradient)
        counts.append((scaler.last_step_skipped, scaler.skipped_steps, scaler.consecutive_skips))
    assert counts == [(False, 0, 0), (True, 1, 1), (True, 2, 2), (False, 2, 0), (True, 3, 1)]
    for _ in range(100):
        iterate(scaler, INF)
    assert (scaler.consecutive_skips, scaler.get_scale()) == (101, 1.0), "without a limit any number is allowed"


@pytest.mark.parametrize(
    ("gradients", "name", "position"),
    [
        ((1.0, INF, 1.0), "weight 1", "param_groups[0]['params'][1]"),
        ((1.0, NAN, INF), "weight 1", "param_groups[0]['params'][1]"),
        ((1e38, None, -INF), "weight 2", "param_groups[1]['params'][0]"),
    ],
)
def test_the_first_parameter_of_the_latest_overflow_is_named(gradients, name, position):
    for named, expected in ((True, name), (False, position)):
        parameters = [one_parameter(gradient)[0] for gradient in gradients]
        entries = [(f"weight {i}", p) for i, p in enumerate(parameters)] if named else parameters
        optimizer = torch.optim.SGD([{"params": entries[:-1]}, {"params": entries[-1:]}], lr=0.1)
        scaler, names = DynamicLossScaler(), []
        for overflows in (False, True, False):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = torch.full_like(parameter, gradient if overflows else 1.0)
            scaler.step(optimizer)
            scaler.update()
            names.append(scaler.overflowed_parameter)
        assert names == [None, expected, expected]
        parameters[0].grad = torch.full_like(parameters[0], NAN)
        scaler.step(optimizer)
        assert scaler.overflowed_parameter == ("weight 0" if named else "param_groups[0]['params'][0]")


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_too_many_skips_are_an_error_only_past_the_limit(limit):
    scaler = DynamicLossScaler(max_consecutive_skips=limit)
    for gradient in [INF] * limit + [1.0] + [INF] * limit + [1.0] + [INF] * limit:  # a good step starts the count over
        iterate(scaler, gradient)
    before = scaler.get_scale()
    with pytest.raises(TooManySkips, match=r"param_groups\[0\]\['params'\]\[0\]"):
        iterate(scaler, INF)
    assert scaler.get_scale() == before / 2
    iterate(scaler, 1.0)  # who goes on regardless starts a clean iteration
    assert scaler.consecutive_skips == 0


# ---- NumPy gradients, and no framework at all


def test_numpy_gradients_are_unscaled_in_place_like_torch_ones():
    values = np.array([0.37, -3.0, 1e-42, 1e38, FP32_MAX], np.float32)
    ours, theirs = values.copy(), torch.tensor(values, requires_grad=True)
    theirs.grad = torch.tensor(values)
    optimizer = numpy_optimizer(ours, None)
    unbounded(init_scale=3.0).step(optimizer)
    scaler = grad_scaler(init_scale=3.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([theirs], lr=0.1))
    assert ours.tobytes() == theirs.grad.numpy().tobytes()
    assert optimizer.steps == 1


@pytest.mark.parametrize("bad", OVERFLOWING)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_numpy_overflow_skips_the_step(scale, bad):
    optimizer = numpy_optimizer(np.ones(3, np.float32), np.array([1.0, bad], np.float32), np.ones(3, np.float32))
    scaler = DynamicLossScaler(scale, min_scale=None)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (optimizer.steps, scaler.get_scale(), scaler.skipped_steps) == (0, scale / 2, 1)
    assert scaler.overflowed_parameter == "param_groups[0]['params'][1]"
    assert optimizer.param_groups[0]["params"][2].grad.tolist() == [1 / scale] * 3, "what follows is unscaled too"


def test_numpy_gradients_in_fp16_and_none_at_all_are_refused():
    gradient = np.ones(3, np.float16)
    with pytest.raises(ValueError, match="FP16"):
        DynamicLossScaler(8.0).unscale_(numpy_optimizer(gradient))
    assert gradient.tolist() == [1.0] * 3
    with pytest.raises(AssertionError, match="No inf checks"):
        DynamicLossScaler().step(numpy_optimizer(None))


def output_of(code: str) -> list[str]:
    """Runs code in a fresh process and returns its lines. Nothing may be written to stderr."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_importing_the_scaler_imports_nothing_but_small_modules_of_the_standard_library():
    code = "import sys; before = set(sys.modules); import amp.scaler; print(*sorted(set(sys.modules) - before))"
    (imported,) = output_of(code)
    assert {"amp", "amp.scaler"} <= set(imported.split()) <= {"amp", "amp.scaler", "math", "struct", "_struct"}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError

import numpy as np
from types import SimpleNamespace
from amp.scaler import DynamicLossScaler

class Loss:
    def __init__(self, value): self.value = value
    def __mul__(self, factor): return Loss(self.value * factor)
    def backward(self): parameter.grad = np.full(2, self.value, np.float32)

parameter = SimpleNamespace(grad=None)
optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}], step=lambda: parameter.grad.tolist())
scaler = DynamicLossScaler(8.0, growth_interval=1)
for value in (3.0, float("inf"), 5.0):
    [loss] = scaler.scale([Loss(value)])
    loss.backward()
    print(loss.value, scaler.step(optimizer), scaler.last_step_skipped)
    scaler.update()
try:
    scaler.scale(3.0)
except ValueError:
    print("refused")
"""


def test_the_scaler_works_where_torch_is_not_there():
    assert output_of(WITHOUT_TORCH) == ["24.0 [3.0, 3.0] False", "inf None True", "40.0 [5.0, 5.0] False", "refused"]
