"""DynamicLossScaler does what torch.amp.GradScaler does, bit for bit, and keeps the promises it makes beyond that."""

import copy
import inspect
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from amp.scaler import DynamicLossScaler, TooManySkips

INF, NAN = math.inf, math.nan
FP32_MAX = float(np.finfo(np.float32).max)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def unbounded(**options) -> DynamicLossScaler:
    """With PyTorch's rule for the scale, which has no lower bound."""
    return DynamicLossScaler(min_scale=None, **options)


def grad_scaler(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


BOTH = pytest.mark.parametrize("make", [unbounded, grad_scaler])


def one_parameter(gradient: float | None = 1.0, dtype=torch.float32):
    """A parameter with a gradient of four equal values, and an SGD for it."""
    parameter = torch.ones(4, dtype=dtype, requires_grad=True)
    parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    return parameter, torch.optim.SGD([parameter], lr=0.1)


def live(scaler, gradient: float):
    """One iteration in which each gradient, as it comes from backward, is `gradient`."""
    parameter, optimizer = one_parameter(gradient)
    scaler.scale(torch.zeros(()))  # GradScaler has no scale before its first scale()
    scaler.step(optimizer)
    scaler.update()
    return parameter


def bits(tensors) -> list:
    """Equal only where the values are equal bit for bit, NaN and -0 included."""
    return [tensor.detach().numpy().tobytes().hex(" ", 4) for tensor in tensors]


# ---- the same life as GradScaler's


@dataclass
class Iteration:
    gradients: list[tuple[float, float | None]]  # per optimizer: the last value in the gradient of both its parameters
    by_backward: bool  # gradients come from a scaled loss, or are put in place as they are
    unscaled: list[bool]  # per optimizer: by a call of unscale_ before step?
    setter: tuple[str, float] | None
    new_scale: float | torch.Tensor | None


class Life:
    """A scaler and the optimizers it serves."""

    def __init__(self, scaler, kinds: list[str]):
        self.scaler = scaler
        self.parameters = [[torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)] for _ in kinds]
        self.optimizers = [OPTIMIZERS[kind](mine) for kind, mine in zip(kinds, self.parameters, strict=True)]
        self.steps = [0] * len(kinds)
        for i, optimizer in enumerate(self.optimizers):
            optimizer.register_step_post_hook(lambda optimizer, *_, i=i: self.count_step(i, optimizer))
        scaler.scale(torch.zeros(()))  # GradScaler has no scale before its first scale()

    def count_step(self, i, optimizer):
        # GradScaler calls a fused optimizer even where an overflow makes its kernel do nothing.
        self.steps[i] += not getattr(optimizer, "found_inf", False)

    def live(self, iteration: Iteration):
        if iteration.setter:
            setter, value = iteration.setter
            getattr(self.scaler, setter)(value)
        for parameters, values in zip(self.parameters, iteration.gradients, strict=True):
            for parameter, value in zip(parameters, values, strict=True):
                self.give_gradient(parameter, value, iteration.by_backward)
        for optimizer, unscaled in zip(self.optimizers, iteration.unscaled, strict=True):
            if unscaled:
                self.scaler.unscale_(optimizer)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update(iteration.new_scale)

    def give_gradient(self, parameter, value, by_backward):
        parameter.grad = None
        if value is None:
            return
        gradient = torch.full_like(parameter, 0.75, requires_grad=False)
        gradient.view(-1)[-1] = value
        if by_backward:
            self.scaler.scale((parameter * gradient).sum()).backward()
        else:
            parameter.grad = gradient

    def seen(self) -> dict:
        every = [parameter for mine in self.parameters for parameter in mine]
        return {"state": self.scaler.state_dict(), "steps": list(self.steps), "parameters": bits(every)}


def assert_same_life(kinds, options, iterations) -> Life:
    ours, theirs = Life(unbounded(**options), kinds), Life(grad_scaler(**options), kinds)
    for i, iteration in enumerate(iterations):
        ours.live(iteration)
        theirs.live(iteration)
        assert ours.seen() == theirs.seen(), f"ours (left) left GradScaler's way in iteration {i}: {iteration}"
    return ours


FINITE = [0.37, -3.0, 0.0, 1e-42, 1e38, -3e38]
OVERFLOWING = [INF, -INF, NAN]


@st.composite
def lives(draw):
    kinds = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=3))
    if "adamw_fused" in kinds:
        # GradScaler lets the fused kernel divide by the scale, we multiply by its reciprocal: the same bits only where
        # the scale is a power of two.
        scales = st.integers(-20, 127).map(lambda power: 2.0**power)
        growths, backoffs = st.sampled_from([2.0, 4.0, 16.0]), st.sampled_from([0.5, 0.25, 0.125])
    else:
        scales = st.floats(0.0, FP32_MAX) | st.floats(1e-3, 1e6)
        growths, backoffs = st.floats(1.0, 1e6, exclude_min=True), st.floats(0.0, 1.0, exclude_max=True)
    intervals = st.integers(1, 4)
    setters = st.one_of(
        st.tuples(st.just("set_growth_factor"), growths),
        st.tuples(st.just("set_backoff_factor"), backoffs),
        st.tuples(st.just("set_growth_interval"), intervals),
    )
    new_scales = scales | scales.map(torch.tensor) | scales.map(lambda scale: torch.tensor(scale, dtype=torch.float64))

    def iteration(values):
        pairs = st.tuples(st.sampled_from(values), st.sampled_from([*values, None]))
        return st.builds(
            Iteration,
            gradients=st.lists(pairs, min_size=len(kinds), max_size=len(kinds)),
            by_backward=st.booleans(),
            unscaled=st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds)),
            setter=st.none() | setters,
            new_scale=st.none() | st.none() | st.none() | new_scales,
        )

    options = st.fixed_dictionaries(
        dict(init_scale=scales, growth_factor=growths, backoff_factor=backoffs, growth_interval=intervals)
    )
    iterations = st.lists(iteration(FINITE) | iteration(FINITE + OVERFLOWING), min_size=1, max_size=12)
    return kinds, draw(options), draw(iterations)


@settings(max_examples=150, deadline=None)
@given(lives())
def test_every_life_is_grad_scalers_life(life):
    assert_same_life(*life)


def test_thousands_of_steps_are_grad_scalers_steps():
    rng = np.random.default_rng(0)

    def iteration():
        values = FINITE + OVERFLOWING if rng.random() < 0.3 else FINITE[:4]
        return Iteration(
            gradients=[tuple(rng.choice(values, 2).tolist()) for _ in OPTIMIZERS],
            by_backward=rng.random() < 0.5,
            unscaled=(rng.random(len(OPTIMIZERS)) < 0.3).tolist(),
            setter=("set_growth_interval", int(rng.integers(1, 6))) if rng.random() < 0.01 else None,
            new_scale=2.0 ** int(rng.integers(0, 30)) if rng.random() < 0.01 else None,
        )

    options = dict(init_scale=2.0**15, growth_interval=3)
    ours = assert_same_life(list(OPTIMIZERS), options, (iteration() for _ in range(2500)))
    assert ours.scaler.skipped_steps + sum(ours.steps) == 2500 * len(OPTIMIZERS)
    assert min(ours.steps) > 1000, "most steps were to be taken"
    assert ours.scaler.skipped_steps > 500, "many steps were to be skipped"


def test_a_scale_that_underflows_to_zero_does_what_grad_scalers_does():
    overflow = Iteration([(INF, 1.0)], False, [False], None, None)
    finite = Iteration([(0.37, 0.0)], False, [True], None, None)
    ours = assert_same_life(["sgd"], dict(init_scale=2.0**-147), [overflow] * 4 + [finite] * 2)
    assert ours.scaler.get_scale() == 0.0


def test_gradients_with_a_graph_of_their_own_are_unscaled():
    parameter, optimizer = one_parameter(None)
    scaler = DynamicLossScaler(8.0)
    loss = scaler.scale((parameter**2).sum())
    parameter.grad = torch.autograd.grad(loss, parameter, create_graph=True)[0]
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [2.0] * 4


# ---- the same interface


def test_public_methods_take_grad_scalers_arguments():
    names = [name for name in dir(torch.amp.GradScaler) if not name.startswith("_")]
    theirs = {name: list(inspect.signature(getattr(torch.amp.GradScaler, name)).parameters) for name in names}
    ours = {name: list(inspect.signature(getattr(DynamicLossScaler, name)).parameters) for name in names}
    assert ours == theirs


def test_the_constructor_takes_grad_scalers_arguments_but_for_the_device():
    ours = list(inspect.signature(DynamicLossScaler).parameters)
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters)
    assert ours[: len(theirs) - 1] == theirs[1:]


def test_setters_change_what_getters_return():
    scaler = DynamicLossScaler(growth_factor=2.0, backoff_factor=0.5, growth_interval=100)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 100)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)


@BOTH
@pytest.mark.parametrize(
    "options", [{"growth_factor": 1.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"backoff_factor": 2.0}]
)
def test_factors_that_do_not_grow_or_back_off_are_refused(make, options):
    with pytest.raises(AssertionError, match="factor must be"):
        make(**options)


# ---- misuse


def unscale_twice(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler, optimizer):
    scaler.step(optimizer)
    scaler.step(optimizer)


def update_with_nothing_recorded(scaler, optimizer):
    scaler.update()


def update_twice(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()
    scaler.update()


def update_after_unscale_without_gradients(scaler, optimizer):
    scaler.unscale_(one_parameter(None)[1])
    scaler.update()


def step_without_backward(scaler, optimizer):
    scaler.step(one_parameter(None)[1])


def step_after_unscale_without_gradients(scaler, optimizer):
    other = one_parameter(None)[1]
    scaler.unscale_(other)
    scaler.step(other)


def step_frozen_parameters(scaler, optimizer):
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    scaler.scale(layer(torch.ones(2)).sum()).backward()
    scaler.step(torch.optim.SGD([layer.weight], lr=0.1))


def step_parameters_of_another_model(scaler, optimizer):
    one, another = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    scaler.scale(one(torch.ones(2)).sum()).backward()
    scaler.step(torch.optim.SGD(another.parameters(), lr=0.1))


def unscale_fp16_gradients(scaler, optimizer):
    scaler.unscale_(one_parameter(1.0, torch.float16)[1])


def step_fp16_gradients(scaler, optimizer):
    scaler.step(one_parameter(1.0, torch.float16)[1])


def step_with_a_closure(scaler, optimizer):
    scaler.step(optimizer, closure=lambda: torch.ones(()))


def update_to_two_scales(scaler, optimizer):
    scaler.update(torch.ones(2))


def update_to_a_scale_with_a_gradient(scaler, optimizer):
    scaler.update(torch.ones((), requires_grad=True))


def load_an_empty_state(scaler, optimizer):
    scaler.load_state_dict({})


def load_a_state_without_a_scale(scaler, optimizer):
    scaler.load_state_dict({"growth_factor": 2.0})


MISUSES = [
    *(unscale_twice, unscale_after_step, step_twice, step_with_a_closure),
    *(update_with_nothing_recorded, update_twice, update_after_unscale_without_gradients),
    *(step_without_backward, step_after_unscale_without_gradients),
    *(step_frozen_parameters, step_parameters_of_another_model),
    *(unscale_fp16_gradients, step_fp16_gradients),
    *(update_to_two_scales, update_to_a_scale_with_a_gradient),
    *(load_an_empty_state, load_a_state_without_a_scale),
]


def raised_by(misuse, scaler) -> type | None:
    scaler.scale(torch.zeros(()))
    try:
        misuse(scaler, one_parameter()[1])
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_what_grad_scaler_raises(misuse):
    expected = raised_by(misuse, grad_scaler())
    assert expected is not None, "GradScaler allows it"
    assert raised_by(misuse, DynamicLossScaler()) is expected


def test_a_positional_closure_is_refused_and_nothing_happens():
    parameter, optimizer = one_parameter(8.0)
    scaler = DynamicLossScaler(8.0)
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, lambda: torch.ones(()))
    assert (parameter.tolist(), parameter.grad.tolist()) == ([1.0] * 4, [8.0] * 4)


@BOTH
def test_refused_fp16_gradients_leave_their_fp32_neighbours_scaled(make):
    neighbour, optimizer = one_parameter(8.0)
    half, _ = one_parameter(8.0, torch.float16)
    optimizer.add_param_group({"params": [half]})
    scaler = make(init_scale=8.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
    assert (neighbour.grad.tolist(), half.grad.tolist()) == ([8.0] * 4, [8.0] * 4)
    half.grad = None
    scaler.unscale_(optimizer)  # the refusal did not count as an unscale_
    assert neighbour.grad.tolist() == [1.0] * 4


def test_an_iteration_starts_over_after_update():
    parameter, optimizer = one_parameter(8.0)
    scaler = DynamicLossScaler(8.0)
    for _ in range(3):
        parameter.grad = torch.full_like(parameter, 8.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == pytest.approx([0.7] * 4)


# ---- scale


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_scaled_loss_has_grad_scalers_dtype_and_values(dtype, shape):
    loss = torch.full(shape, 0.3, dtype=dtype)
    for scale in (3.0, 2.0**15, 2.0**20, 0.1):  # 2**20 is beyond fp16
        ours, theirs = unbounded(init_scale=scale).scale(loss), grad_scaler(init_scale=scale).scale(loss)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


def test_nested_lists_and_tuples_keep_their_types():
    one, two, three = torch.tensor([1.0, 2.0, 3.0])
    scaled = DynamicLossScaler(8.0).scale([one, (two, [three]), ()])
    assert scaled == [8.0, (16.0, [24.0]), ()]


@BOTH
def test_a_generator_of_losses_is_scaled_lazily(make):
    scaled = make(init_scale=8.0).scale(torch.tensor(float(i)) for i in range(3))
    assert next(scaled) == 0.0
    assert list(scaled) == [8.0, 16.0]


@pytest.mark.parametrize("outputs", [3.0, None, object(), [torch.ones(()), 3.0], (None,)])
@BOTH
def test_what_is_no_tensor_is_not_scaled(make, outputs):
    with pytest.raises(ValueError, match="outputs must be"):
        make().scale(outputs)


@pytest.mark.parametrize("outputs", ["loss", b"loss", ["loss"]])
def test_text_is_not_scaled(outputs):
    with pytest.raises(ValueError, match="outputs must be"):
        DynamicLossScaler().scale(outputs)


# ---- a skip


def state_bits(parameters, optimizer) -> dict:
    state = {i: {key: bits([value]) for key, value in of.items()} for i, of in optimizer.state_dict()["state"].items()}
    return {"parameters": bits(parameters), "optimizer": state}


@pytest.mark.parametrize("bad", OVERFLOWING)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "unscale_ and step"])
def test_a_skip_changes_nothing_but_the_scaler(kind, bad, by_hand):
    life = Life(DynamicLossScaler(2.0**10), [kind])
    life.live(Iteration([(0.37, -3.0)], True, [by_hand], None, None))
    before = state_bits(life.parameters[0], life.optimizers[0])
    life.live(Iteration([(0.37, bad)], True, [by_hand], None, None))
    assert state_bits(life.parameters[0], life.optimizers[0]) == before
    assert (life.scaler.get_scale(), life.scaler.skipped_steps) == (2.0**9, 1)
    life.live(Iteration([(0.37, -3.0)], True, [by_hand], None, None))
    after = state_bits(life.parameters[0], life.optimizers[0])
    assert after["parameters"] != before["parameters"], "the next good step is taken"
    assert after["optimizer"] != before["optimizer"], "the next good step is taken"


def test_one_of_several_optimizers_overflows_and_only_that_one_skips():
    one, of_one = one_parameter(8.0)
    two, of_two = one_parameter(INF)
    scaler = DynamicLossScaler(8.0)
    scaler.step(of_one)
    assert not scaler.last_step_skipped
    scaler.step(of_two)
    assert scaler.last_step_skipped
    scaler.update()
    assert (one.tolist(), two.tolist()) == (pytest.approx([0.9] * 4), [1.0] * 4)
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.consecutive_skips) == (4.0, 1, 1)


def test_two_overflowing_optimizers_are_two_skips_and_one_backoff():
    optimizers = [one_parameter(INF)[1], one_parameter(NAN)[1]]
    scaler = DynamicLossScaler(8.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.consecutive_skips) == (4.0, 2, 1)


@BOTH
@pytest.mark.parametrize("gradient", [1e38, -1e38, FP32_MAX])
def test_huge_finite_gradients_are_no_overflow(make, gradient):
    parameter = torch.zeros(1000, requires_grad=True)  # their sum and their norm are inf
    parameter.grad = torch.full((1000,), gradient)
    scaler = make(init_scale=4.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    scaler.update()
    assert torch.equal(parameter.detach(), torch.full((1000,), -gradient / 4))
    assert scaler.get_scale() == 8.0


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


# ---- sparse gradients


def embedding(kind):
    torch.manual_seed(0)
    table = torch.nn.Embedding(8, 3, sparse=True)
    return table, kind(table.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_are_unscaled_like_grad_scalers(kind):
    ours, theirs = unbounded(init_scale=3.0), grad_scaler(init_scale=3.0)
    seen = {}
    for scaler in (ours, theirs):
        table, optimizer = embedding(kind)
        seen[scaler] = []
        for weight in (0.3, INF, -0.7, NAN, 1e-3):
            optimizer.zero_grad()
            scaler.scale((table(torch.tensor([1, 5, 1])) * weight).sum()).backward()  # row 1 twice
            scaler.step(optimizer)
            scaler.update()
            seen[scaler].append((scaler.get_scale(), bits([table.weight])))
    assert table.weight.grad.is_sparse
    assert seen[ours] == seen[theirs]
    assert ours.skipped_steps == 2


# ---- bounds of the scale


@BOTH
def test_growth_stops_below_inf(make):
    scaler = make(init_scale=3e38, growth_interval=1)
    live(scaler, 1.0)
    assert scaler.get_scale() == np.float32(3e38)
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_the_scale_is_an_fp32_value():
    scaler = DynamicLossScaler(1.1, growth_factor=1.3, growth_interval=1)
    assert scaler.get_scale() == np.float32(1.1)
    live(scaler, 1.0)
    assert scaler.get_scale() == np.float32(float(np.float32(1.1)) * 1.3)
    scaler.update(1.7)
    assert scaler.get_scale() == np.float32(1.7)


@pytest.mark.parametrize("scale", [NAN, INF, -INF, -1.0, 1e39])
def test_a_scale_that_is_no_finite_fp32_number_is_refused(scale):
    with pytest.raises(ValueError, match="loss scale must be"):
        DynamicLossScaler(scale)
    scaler = DynamicLossScaler(8.0)
    before = scaler.state_dict()
    for new_scale in (scale, torch.tensor(scale)):
        with pytest.raises(ValueError, match="loss scale must be"):
            scaler.update(new_scale)
    with pytest.raises(ValueError, match="loss scale must be"):
        scaler.load_state_dict(before | {"scale": scale, "growth_interval": 3})
    assert scaler.state_dict() == before


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match="min_scale"):
        DynamicLossScaler(min_scale=4.0, max_scale=2.0)


@pytest.mark.parametrize(
    "bounds", [{"min_scale": INF}, {"min_scale": 1e39}, {"min_scale": NAN}, {"min_scale": None, "max_scale": -1.0}]
)
def test_bounds_that_could_not_be_a_scale_are_refused(bounds):
    with pytest.raises(ValueError, match="scale"):
        DynamicLossScaler(**bounds)


def test_the_lowest_scale_is_one_unless_asked_otherwise():
    assert DynamicLossScaler(0.25).get_scale() == 1.0
    assert DynamicLossScaler(0.25, min_scale=0.5).get_scale() == 0.5
    assert DynamicLossScaler(0.25, min_scale=None).get_scale() == 0.25


@pytest.mark.parametrize(("asked", "held"), [(2.0**-9, 4.0), (2.0**4, 2.0**4), (2.0**40, 2.0**10)])
def test_bounds_hold_the_initial_the_set_and_the_loaded_scale(asked, held):
    bounds = dict(min_scale=4.0, max_scale=2.0**10)
    assert DynamicLossScaler(asked, **bounds).get_scale() == held
    scaler = DynamicLossScaler(**bounds)
    scaler.update(asked)
    assert scaler.get_scale() == held
    scaler = DynamicLossScaler(**bounds)
    scaler.load_state_dict(DynamicLossScaler(asked, min_scale=None).state_dict())
    assert scaler.get_scale() == held


def test_bounds_hold_the_grown_and_the_backed_off_scale():
    scaler = DynamicLossScaler(16.0, growth_interval=1, growth_factor=8.0, min_scale=4.0, max_scale=100.0)
    scales = []
    for gradient in (1.0, 1.0, INF, INF, INF, INF, INF, INF):
        live(scaler, gradient)
        scales.append(scaler.get_scale())
    assert scales == [100.0, 100.0, 50.0, 25.0, 12.5, 6.25, 4.0, 4.0]


events = st.one_of(
    st.tuples(st.just("live"), st.sampled_from([1.0, INF, NAN])),
    st.tuples(st.just("update"), st.floats(0.0, FP32_MAX)),
    st.tuples(st.just("load"), st.floats(0.0, FP32_MAX)),
)


@settings(max_examples=100, deadline=None)
@given(
    bounds=st.lists(st.floats(0.0, FP32_MAX, width=32), min_size=2, max_size=2).map(sorted),
    init_scale=st.floats(0.0, FP32_MAX),
    growth_factor=st.floats(1.0, 1e30, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_max=True),
    happenings=st.lists(events, max_size=12),
)
def test_the_scale_is_within_its_bounds_at_all_times(bounds, init_scale, growth_factor, backoff_factor, happenings):
    low, high = bounds
    scaler = DynamicLossScaler(init_scale, growth_factor, backoff_factor, 1, min_scale=low, max_scale=high)
    scales = [scaler.get_scale()]
    for what, value in happenings:
        if what == "live":
            live(scaler, value)
        elif what == "update":
            scaler.update(value)
        else:
            scaler.load_state_dict(scaler.state_dict() | {"scale": value})
        scales.append(scaler.get_scale())
    assert [scale for scale in scales if not low <= scale <= high] == []
    assert [scale for scale in scales if scale != np.float32(scale)] == []


# ---- state


PATTERN = [1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0, 1.0, 1.0, -INF, 1.0]
OPTIONS = dict(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)


def states(scaler, gradients=PATTERN) -> list[dict]:
    """The scaler's state after each iteration."""
    seen = []
    for gradient in gradients:
        live(scaler, gradient)
        seen.append(scaler.state_dict())
    return seen


def test_the_state_has_grad_scalers_entries():
    ours, theirs = unbounded(**OPTIONS).state_dict(), grad_scaler(**OPTIONS).state_dict()
    assert ours == theirs
    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}


@pytest.mark.parametrize(("make", "make_other"), [(unbounded, grad_scaler), (grad_scaler, unbounded)])
@pytest.mark.parametrize("used", [False, True], ids=["loaded before its first scale", "loaded after its first scale"])
def test_a_state_goes_over_and_the_life_goes_on(make, make_other, used):
    scaler, other = make(**OPTIONS), make_other(growth_interval=9)
    states(scaler, PATTERN[:4])
    assert scaler.state_dict()["_growth_tracker"] == 1
    if used:
        states(other, [INF, 1.0, 1.0])
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert states(other) == states(scaler)


def test_a_pickled_scaler_lives_the_same_life():
    scaler = DynamicLossScaler(**OPTIONS, min_scale=2.0, max_scale=5000.0, max_consecutive_skips=3)
    states(scaler)
    twin = pickle.loads(pickle.dumps(scaler))
    assert vars(twin) == vars(scaler)
    assert states(twin) == states(scaler)
    assert vars(twin) == vars(scaler)


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("dump", [pickle.dumps, copy.deepcopy])
@BOTH
def test_a_scaler_is_not_pickled_in_mid_iteration(make, dump, call):
    scaler = make()
    scaler.scale(torch.zeros(()))
    _, optimizer = one_parameter()
    getattr(scaler, call)(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        dump(scaler)
    scaler.update()
    assert dump(scaler)


# ---- disabled


@BOTH
def test_a_disabled_scaler_passes_everything_through(make):
    scaler = make(enabled=False)
    parameter, optimizer = one_parameter(INF)
    loss = [torch.ones(())]
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [INF] * 4
    parameter.grad.fill_(1.0)
    assert scaler.step(optimizer, lambda: "the loss") == "the loss"
    assert parameter.tolist() == pytest.approx([0.9] * 4)
    scaler.update()
    scaler.update(3.0)
    scaler.load_state_dict({})
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == {}


@BOTH
@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"init_scale": INF}])
def test_a_disabled_scaler_does_not_care_about_its_settings(make, options):
    assert make(enabled=False, **options).get_scale() == 1.0


def test_a_scaler_is_enabled_by_default():
    assert DynamicLossScaler().is_enabled()


# ---- step


class Echo(torch.optim.SGD):
    def step(self, *args, **kwargs):
        return args, kwargs


@pytest.mark.parametrize("enabled", [True, False])
def test_step_passes_arguments_on_and_returns_the_optimizers_result(enabled):
    parameter, _ = one_parameter()
    scaler = DynamicLossScaler(enabled=enabled)
    assert scaler.step(Echo([parameter]), 1, "two", three=3) == ((1, "two"), {"three": 3})


def test_a_skipped_step_returns_none():
    parameter, _ = one_parameter(INF)
    assert DynamicLossScaler().step(Echo([parameter]), 1) is None


# ---- what there is to look at


def test_skips_are_counted():
    scaler = DynamicLossScaler(max_consecutive_skips=None)
    seen = []
    for gradient in (1.0, INF, NAN, 1.0, INF):
        live(scaler, gradient)
        seen.append((scaler.last_step_skipped, scaler.skipped_steps, scaler.consecutive_skips))
    assert seen == [(False, 0, 0), (True, 1, 1), (True, 2, 2), (False, 2, 0), (True, 3, 1)]


def overflowed_parameter(scaler, named: bool, *gradients: float) -> str | None:
    """The name after a step with these gradients, the last of them in a second group."""
    parameters = [one_parameter(gradient)[0] for gradient in gradients]
    entries = [(f"weight {i}", parameter) for i, parameter in enumerate(parameters)] if named else parameters
    scaler.step(torch.optim.SGD([{"params": entries[:-1]}, {"params": entries[-1:]}], lr=0.1))
    scaler.update()
    return scaler.overflowed_parameter


@pytest.mark.parametrize(
    ("gradients", "name", "position"),
    [
        ((1.0, INF, 1.0), "weight 1", "param_groups[0]['params'][1]"),
        ((1.0, NAN, INF), "weight 1", "param_groups[0]['params'][1]"),
        ((1e38, None, -INF), "weight 2", "param_groups[1]['params'][0]"),
    ],
)
def test_the_first_overflowed_parameter_is_named(gradients, name, position):
    assert overflowed_parameter(DynamicLossScaler(), True, *gradients) == name
    assert overflowed_parameter(DynamicLossScaler(), False, *gradients) == position


def test_the_overflowed_parameter_is_that_of_the_latest_overflow():
    scaler = DynamicLossScaler()
    assert overflowed_parameter(scaler, True, 1.0, 1.0) is None
    assert overflowed_parameter(scaler, True, INF, 1.0) == "weight 0"
    assert overflowed_parameter(scaler, True, 1.0, 1.0) == "weight 0"
    assert overflowed_parameter(scaler, True, 1.0, INF) == "weight 1"


def test_the_names_of_a_modules_parameters_are_used():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.named_parameters())
    scaler = DynamicLossScaler()
    scaler.scale(model(torch.ones(2)).sum()).backward()
    model[1].bias.grad[0] = NAN
    scaler.step(optimizer)
    assert scaler.overflowed_parameter == "1.bias"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_too_many_skips_are_an_error_only_past_the_limit(limit):
    scaler = DynamicLossScaler(max_consecutive_skips=limit)
    for _ in range(2):
        for _ in range(limit):
            live(scaler, INF)
        live(scaler, 1.0)  # starts the count over
    for _ in range(limit):
        live(scaler, INF)
    before = scaler.get_scale()
    with pytest.raises(TooManySkips, match=r"param_groups\[0\]\['params'\]\[0\]"):
        live(scaler, INF)
    assert scaler.get_scale() == before / 2
    live(scaler, 1.0)  # who goes on regardless starts a clean iteration
    assert scaler.consecutive_skips == 0


def test_without_a_limit_any_number_of_skips_is_allowed():
    scaler = DynamicLossScaler()
    for _ in range(100):
        live(scaler, INF)
    assert (scaler.consecutive_skips, scaler.get_scale()) == (100, 1.0)


# ---- NumPy


def numpy_optimizer(*gradients):
    """One whose parameters are any objects with a NumPy `.grad`; `step` counts its calls."""
    parameters = [SimpleNamespace(grad=gradient) for gradient in gradients]
    optimizer = SimpleNamespace(param_groups=[{"params": parameters}], steps=0)
    optimizer.step = lambda: vars(optimizer).update(steps=optimizer.steps + 1)
    return optimizer


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
def test_a_numpy_overflow_skips_the_step(bad):
    optimizer = numpy_optimizer(np.ones(3, np.float32), np.array([1.0, bad], np.float32))
    scaler = DynamicLossScaler(8.0)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (optimizer.steps, scaler.get_scale(), scaler.skipped_steps) == (0, 4.0, 1)
    assert scaler.overflowed_parameter == "param_groups[0]['params'][1]"


@pytest.mark.parametrize("gradient", [1e38, -1e38, FP32_MAX])
def test_huge_finite_numpy_gradients_are_no_overflow(gradient):
    optimizer = numpy_optimizer(np.full(1000, gradient, np.float32))
    scaler = DynamicLossScaler(1.0)
    scaler.step(optimizer)
    assert (optimizer.steps, scaler.last_step_skipped) == (1, False)


def test_numpy_fp16_gradients_are_refused_untouched():
    gradient = np.ones(3, np.float16)
    with pytest.raises(ValueError, match="FP16"):
        DynamicLossScaler(8.0).unscale_(numpy_optimizer(gradient))
    assert gradient.tolist() == [1.0] * 3


def test_a_numpy_optimizer_without_gradients_is_refused():
    with pytest.raises(AssertionError, match="No inf checks"):
        DynamicLossScaler().step(numpy_optimizer(None))


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
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=root, capture_output=True, text=True, check=False)
    lines = ["24.0 [3.0, 3.0] False", "inf None True", "40.0 [5.0, 5.0] False", "refused"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")
