"""DynamicLossScaler does what torch.amp.GradScaler does, bit for bit: over random lives, and where it is misused."""

import copy
import inspect
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp.scaler import DynamicLossScaler

INF, NAN = math.inf, math.nan
FP32_MAX = float(np.finfo(np.float32).max)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def unbounded(**options) -> DynamicLossScaler:
    """Returns a scaler with PyTorch's rule for the scale, which has no lower bound."""
    return DynamicLossScaler(min_scale=None, **options)


def grad_scaler(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


both_scalers = pytest.mark.parametrize("make", [unbounded, grad_scaler])


def one_parameter(gradient: float | None = 1.0, dtype=torch.float32):
    """Returns a parameter with a gradient of four equal values, and an SGD for it."""
    parameter = torch.ones(4, dtype=dtype, requires_grad=True)
    parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    return parameter, torch.optim.SGD([parameter], lr=0.1)


def iterate(scaler, gradient: float):
    """Runs one iteration in which each gradient, as it comes from backward, is `gradient`."""
    parameter, optimizer = one_parameter(gradient)
    scaler.scale(torch.zeros(()))  # GradScaler has no scale before its first scale()
    scaler.step(optimizer)
    scaler.update()
    return parameter


def bits(tensors) -> list:
    """Equal only where the values are equal bit for bit, NaN and -0 included."""
    return [tensor.detach().numpy().tobytes().hex(" ", 4) for tensor in tensors]


# ---- the same decisions as GradScaler's, over random lives


@dataclass
class Iteration:
    gradients: list[tuple[float, float | None]]  # for each optimizer: the last value in its two parameters' gradients
    by_backward: bool = False  # the gradients come from a scaled loss; else they are put in place as they are
    unscaled: tuple[bool, ...] = (False,)  # for each optimizer: whether unscale_ is called before step
    setter: tuple[str, float] | None = None
    new_scale: float | torch.Tensor | None = None


class Life:
    """A scaler and the optimizers that it serves."""

    def __init__(self, scaler, kinds: list[str]):
        self.scaler = scaler
        self.parameters = [[torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)] for _ in kinds]
        self.optimizers = [OPTIMIZERS[kind](pair) for kind, pair in zip(kinds, self.parameters, strict=True)]
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

    def state(self) -> dict:
        getters = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled")
        return {
            "state": self.scaler.state_dict(),
            "getters": {name: getattr(self.scaler, name)() for name in getters},
            "steps": list(self.steps),
            "parameters": bits(parameter for pair in self.parameters for parameter in pair),
        }


def assert_same_life(kinds, options, iterations) -> Life:
    ours, theirs = Life(unbounded(**options), kinds), Life(grad_scaler(**options), kinds)
    for i, iteration in enumerate(iterations):
        ours.live(iteration)
        theirs.live(iteration)
        assert ours.state() == theirs.state(), f"ours (left) left GradScaler's way in iteration {i}: {iteration}"
    return ours


FINITE = [0.37, -3.0, 0.0, 1e-42, 1e38, -3e38]
OVERFLOWING = [INF, -INF, NAN]


@st.composite
def lives(draw):
    kinds = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=3))
    if "adamw_fused" in kinds:
        # GradScaler lets the fused kernel divide by the scale, we multiply by its reciprocal. Both give the same bits
        # only where the scale is a power of two.
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
            unscaled=st.tuples(*[st.booleans()] * len(kinds)),
            setter=st.none() | setters,
            new_scale=st.none() | st.none() | st.none() | new_scales,
        )

    options = st.fixed_dictionaries(
        dict(init_scale=scales, growth_factor=growths, backoff_factor=backoffs, growth_interval=intervals)
    )
    iterations = st.lists(iteration(FINITE) | iteration(FINITE + OVERFLOWING), min_size=1, max_size=20)
    return kinds, draw(options), draw(iterations)


@settings(max_examples=150, deadline=None)
@given(lives())
def test_every_life_is_grad_scalers_life(life):
    assert_same_life(*life)


def test_a_scale_that_underflows_to_zero_does_what_grad_scalers_does():
    overflow, finite = Iteration([(INF, 1.0)]), Iteration([(0.37, 0.0)], unscaled=(True,))
    ours = assert_same_life(["sgd"], dict(init_scale=2.0**-147), [overflow] * 4 + [finite] * 2)
    assert ours.scaler.get_scale() == 0.0


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_are_unscaled_like_grad_scalers(kind):
    states = []
    for scaler in (unbounded(init_scale=3.0), grad_scaler(init_scale=3.0)):
        torch.manual_seed(0)
        table = torch.nn.Embedding(8, 3, sparse=True)
        optimizer = kind(table.parameters(), lr=0.1)
        for weight in (0.3, INF, -0.7, NAN, 1e-3):
            optimizer.zero_grad()
            scaler.scale((table(torch.tensor([1, 5, 1])) * weight).sum()).backward()  # row 1 twice
            scaler.step(optimizer)
            scaler.update()
            states.append((scaler.get_scale(), bits([table.weight])))
    assert table.weight.grad.is_sparse
    assert states[:5] == states[5:]
    assert states[4][0] == 0.75, "two steps were to be skipped"


# ---- the same interface, and the same refusals


def test_methods_and_constructor_take_grad_scalers_arguments_but_for_the_device():
    names = ["__init__", *(name for name in dir(torch.amp.GradScaler) if not name.startswith("_"))]
    theirs = {name: list(inspect.signature(getattr(torch.amp.GradScaler, name)).parameters) for name in names}
    ours = {name: list(inspect.signature(getattr(DynamicLossScaler, name)).parameters) for name in names}
    theirs["__init__"].remove("device")
    ours["__init__"] = ours["__init__"][: len(theirs["__init__"])]
    assert ours == theirs


@both_scalers
@pytest.mark.parametrize("factor", [{"growth_factor": 1.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}])
def test_factors_that_do_not_grow_or_back_off_are_refused(make, factor):
    with pytest.raises(AssertionError, match="factor must be"):
        make(**factor)
    assert make(enabled=False, **factor).get_scale() == 1.0


WITHOUT_GRADIENT = "none of its parameters has a gradient"
# calls of a scaler, with an optimizer that has a gradient and one that has none -> a piece of our error's message
MISUSES = {
    "unscale_ twice": (lambda s, o, _: (s.unscale_(o), s.unscale_(o)), "already been called on this optimizer"),
    "unscale_ after step": (lambda s, o, _: (s.step(o), s.unscale_(o)), "after step"),
    "step twice": (lambda s, o, _: (s.step(o), s.step(o)), "already been called since"),
    "update before a check": (lambda s, o, _: s.update(), "prior to update"),
    "update twice": (lambda s, o, _: (s.step(o), s.update(), s.update()), "prior to update"),
    "update, nothing checked": (lambda s, _, empty: (s.unscale_(empty), s.update()), "prior to update"),
    "step without gradients": (lambda s, _, empty: s.step(empty), WITHOUT_GRADIENT),
    "step, nothing checked": (lambda s, _, empty: (s.unscale_(empty), s.step(empty)), WITHOUT_GRADIENT),
    "step with a closure": (lambda s, o, _: s.step(o, closure=lambda: torch.ones(())), "Closure"),
    "unscale_ in fp16": (lambda s, *_: s.unscale_(one_parameter(1.0, torch.float16)[1]), "FP16"),
    "step in fp16": (lambda s, *_: s.step(one_parameter(1.0, torch.float16)[1]), "FP16"),
    "two new scales": (lambda s, *_: s.update(torch.ones(2)), "one element"),
    "a new scale with a gradient": (lambda s, *_: s.update(torch.ones((), requires_grad=True)), "no gradient"),
    "an empty state": (lambda s, *_: s.load_state_dict({}), "state dict is empty"),
    "half a state": (lambda s, *_: s.load_state_dict({"scale": 2.0}), "growth_factor"),
    "a number as loss": (lambda s, *_: s.scale(3.0), "outputs must be"),
    "None as loss": (lambda s, *_: s.scale(None), "outputs must be"),
    "an object as loss": (lambda s, *_: s.scale(object()), "outputs must be"),
    "a number among losses": (lambda s, *_: s.scale([torch.ones(()), 3.0]), "outputs must be"),
    "None among losses": (lambda s, *_: s.scale((None,)), "outputs must be"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_what_grad_scaler_raises(name):
    misuse, message = MISUSES[name]
    errors = []
    for scaler in (grad_scaler(), DynamicLossScaler()):
        scaler.scale(torch.zeros(()))
        with pytest.raises(Exception) as caught:  # noqa: PT011, the two are compared below
            misuse(scaler, one_parameter()[1], one_parameter(None)[1])
        errors.append(caught.value)
    assert type(errors[1]) is type(errors[0])
    assert message in str(errors[1])


@pytest.mark.parametrize("outputs", ["loss", b"loss", ["loss"]])
def test_text_is_not_scaled(outputs):
    with pytest.raises(ValueError, match="outputs must be"):
        DynamicLossScaler().scale(outputs)


def test_a_positional_closure_is_refused_and_nothing_happens():
    parameter, optimizer = one_parameter(8.0)
    with pytest.raises(RuntimeError, match="Closure"):
        DynamicLossScaler(8.0).step(optimizer, lambda: torch.ones(()))
    assert (parameter.tolist(), parameter.grad.tolist()) == ([1.0] * 4, [8.0] * 4)


@both_scalers
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


# ---- scale and step


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_scaled_loss_has_grad_scalers_dtype_and_values(dtype, shape):
    loss = torch.full(shape, 0.3, dtype=dtype)
    for scale in (3.0, 2.0**15, 2.0**20, 0.1):  # 2**20 is beyond fp16
        ours, theirs = unbounded(init_scale=scale).scale(loss), grad_scaler(init_scale=scale).scale(loss)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


@both_scalers
def test_losses_in_lists_and_tuples_are_scaled_at_once_and_those_of_a_generator_one_by_one(make):
    one, two, three = torch.tensor([1.0, 2.0, 3.0])
    assert make(init_scale=8.0).scale([one, (two, [three]), ()]) == [8.0, (16.0, [24.0]), ()]
    drawn = []
    scaled = make(init_scale=8.0).scale(drawn.append(loss) or loss for loss in (one, two))
    assert next(scaled) == 8.0
    assert drawn == [one]
    assert list(scaled) == [16.0]


class Echo(torch.optim.SGD):
    def step(self, *args, **kwargs):
        return args, kwargs


@pytest.mark.parametrize(("options", "gradient"), [({}, 1.0), ({"enabled": False}, INF)])
def test_step_passes_arguments_on_and_returns_the_optimizers_result(options, gradient):
    parameter, _ = one_parameter(gradient)
    assert DynamicLossScaler(**options).step(Echo([parameter]), 1, "two", three=3) == ((1, "two"), {"three": 3})


@both_scalers
def test_growth_stops_below_inf(make):
    scaler = make(init_scale=3e38, growth_interval=1)
    iterate(scaler, 1.0)
    assert scaler.get_scale() == np.float32(3e38)
    assert scaler.state_dict()["_growth_tracker"] == 0


# ---- state


PATTERN = [1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0, 1.0, 1.0, -INF, 1.0]
OPTIONS = dict(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)


def states(scaler, gradients=PATTERN) -> list[dict]:
    """Returns the scaler's state after each iteration."""
    return [(iterate(scaler, gradient), scaler.state_dict())[1] for gradient in gradients]


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
    assert [type(value) for value in other.state_dict().values()] == [float, float, float, int, int]
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
@both_scalers
def test_a_scaler_is_not_pickled_in_mid_iteration(make, dump, call):
    scaler = make()
    scaler.scale(torch.zeros(()))
    _, optimizer = one_parameter()
    getattr(scaler, call)(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        dump(scaler)
    scaler.update()
    assert dump(scaler)


@both_scalers
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
