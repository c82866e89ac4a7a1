"""AdamW and clipping in NumPy against PyTorch's, in fp64; and the shadows that mixed precision computes with."""

import math

import numpy as np
import pytest
import torch

from amp.formats import round_to, widen
from optim.adamw import AdamW, Parameter, clip_grad_norm_

SHAPES = {"matrix": (5, 3), "vector": (4,)}


def draw(seed: int, dtype=np.float64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def build(dtype: str = "fp32", storage=np.float64) -> tuple[AdamW, dict[str, Parameter]]:
    named = {name: Parameter(w, dtype) for name, w in draw(0, storage).items()}
    groups = [
        {"params": [named["matrix"]], "param_names": ["matrix"], "weight_decay": 0.1},
        {"params": [named["vector"]], "param_names": ["vector"], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), named


def test_fifty_steps_are_those_of_torch_adamw():
    ours, named = build()
    theirs = {name: torch.nn.Parameter(torch.from_numpy(w)) for name, w in draw(0).items()}
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False, fused=False)
    for step in range(50):
        for name, gradient in draw(step + 1).items():
            gradient *= 10.0 ** (step % 7 - 3)
            named[name].grad, theirs[name].grad = gradient, torch.from_numpy(gradient.copy())
        for group in [*ours.param_groups, *adamw.param_groups]:
            group["lr"] = 1e-2 / (step + 1)  # the loop sets it anew each step
        ours.step()
        adamw.step()
        for name, parameter in named.items():
            difference = np.abs(parameter.data - theirs[name].detach().numpy()).max()
            assert difference <= 1e-12, f"{name} at step {step + 1}: off by {difference:.1e}"


def test_a_parameter_without_a_gradient_stays_as_it_is():
    optimizer, named = build()
    before = named["vector"].data.copy()
    named["matrix"].grad = np.ones((5, 3))
    optimizer.step()
    np.testing.assert_array_equal(named["vector"].data, before)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_shadow_is_the_rounded_master_after_each_step(dtype):
    optimizer, named = build(dtype, np.float32)
    shadow = named["matrix"].shadow.copy()
    for step in range(2):
        for name, gradient in draw(step + 1, np.float32).items():
            named[name].grad = gradient
        optimizer.step()
        for name, parameter in named.items():
            assert parameter.data.dtype == np.float32, name
            assert parameter.shadow.itemsize == 2, name
            np.testing.assert_array_equal(widen(parameter.shadow), round_to(parameter.data, dtype), err_msg=name)
    assert (shadow != named["matrix"].shadow).any()


def test_steps_too_small_for_a_16_bit_weight_add_up_in_the_master():
    parameter = Parameter(np.ones(1, np.float32), "bf16")
    optimizer = AdamW([{"params": [parameter], "param_names": ["w"], "weight_decay": 0.0}], 1e-3, (0.0, 0.0))
    shadows = []
    for _ in range(8):
        parameter.grad = np.ones(1, np.float32)
        optimizer.step()  # by 0.001, and bf16's neighbour of 1 is 0.0039 below
        shadows.append(float(widen(parameter.shadow)[0]))
    assert shadows[0] == 1.0
    assert shadows[-1] < 1.0


def test_zero_grad():
    optimizer, named = build()
    gradient = named["matrix"].grad = np.ones((5, 3))
    optimizer.zero_grad(set_to_none=False)
    assert named["matrix"].grad is gradient
    assert not gradient.any()
    optimizer.zero_grad(set_to_none=True)
    assert named["matrix"].grad is None


def test_the_state_continues_bit_by_bit_and_shares_no_memory():
    first, named = build()
    second, copies = build()
    for step in range(6):
        if step == 3:
            state = first.state_dict()
            second.load_state_dict(state)
            for name, parameter in named.items():
                copies[name].data[...] = parameter.data
        for name, gradient in draw(step).items():
            named[name].grad = copies[name].grad = gradient
        first.step()
        if step >= 3:
            second.step()
    assert state["step"] == 3
    for name, parameter in named.items():
        assert parameter.data.tobytes() == copies[name].data.tobytes(), name


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_clipping_is_torch_s(max_norm):
    _, named = build()
    tensors = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES.values()]
    for tensor, (name, gradient) in zip(tensors, draw(1).items(), strict=True):
        named[name].grad, tensor.grad = gradient, torch.from_numpy(gradient.copy())
    norm, theirs = clip_grad_norm_(list(named.values()), max_norm), torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    assert norm == pytest.approx(theirs.item(), rel=1e-12)
    for tensor, (name, parameter) in zip(tensors, named.items(), strict=True):
        np.testing.assert_allclose(parameter.grad, tensor.grad.numpy(), rtol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("error")
def test_no_clipping_leaves_gradients_alone_even_where_their_norm_is_beyond_fp32():
    parameter = Parameter(np.zeros(4, np.float32))
    parameter.grad = np.full(4, 3e38, np.float32)
    assert clip_grad_norm_([parameter], math.inf) == math.inf
    assert (parameter.grad == np.float32(3e38)).all()
