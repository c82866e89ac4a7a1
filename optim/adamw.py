"""AdamW in NumPy, for the backends that do not import torch: master weights, their 16-bit shadows, moments, clipping.

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", as torch.optim.AdamW computes it.
"""

import math
from collections.abc import Mapping

import numpy as np

from amp.formats import narrow
from base.dtypes import Dtype


class Parameter:
    """An fp32 master weight `.data`, its gradient `.grad` of the same type, and its copy `.shadow` in `dtype`.

    The shadow is an operand of products, kept as amp/formats.py's `narrow` keeps 16 bits. In fp32 it is `.data` itself.
    """

    def __init__(self, data: np.ndarray, dtype: Dtype = "fp32"):
        self.data, self.dtype = data, dtype
        self.grad: np.ndarray | None = None
        self.refresh()

    def refresh(self) -> None:
        """Rounds the master weight into the shadow anew, after a step has changed it."""
        self.shadow = narrow(self.data, self.dtype)


class AdamW:
    """The optimizer. `param_groups` are torch's: dicts of params, param_names, weight_decay, lr, betas and eps."""

    def __init__(self, param_groups: list[dict], lr: float, betas: tuple[float, float], eps: float = 1e-8):
        self.param_groups = [{"lr": lr, "betas": betas, "eps": eps, **group} for group in param_groups]
        self.steps = 0
        named = [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
        self.exp_avg = {name: np.zeros_like(parameter.data) for name, parameter in named}
        self.exp_avg_sq = {name: np.zeros_like(parameter.data) for name, parameter in named}

    def step(self) -> None:
        """w -= lr · (m̂ / (sqrt(v̂) + eps) + decay · w), with m̂ and v̂ the moments without their bias towards zero.

        v̂ = v / root², so sqrt(v̂) + eps = (sqrt(v) + eps · root) / root. A parameter without a gradient stays as it is.
        """
        self.steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            root = math.sqrt(1 - beta2**self.steps)
            step_size = group["lr"] * root / (1 - beta1**self.steps)
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                g, w, m, v = parameter.grad, parameter.data, self.exp_avg[name], self.exp_avg_sq[name]
                if g is None:
                    continue
                m += (1 - beta1) * (g - m)
                v *= beta2
                v += (1 - beta2) * g * g
                w *= 1 - group["lr"] * group["weight_decay"]
                w -= step_size * m / (np.sqrt(v) + group["eps"] * root)
                parameter.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, or fills their arrays with zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad[...] = 0

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of both moments, as exp_avg.NAME and exp_avg_sq.NAME, and the number of steps, as step."""
        moments = {f"exp_avg.{name}": m.copy() for name, m in self.exp_avg.items()}
        moments |= {f"exp_avg_sq.{name}": v.copy() for name, v in self.exp_avg_sq.items()}
        return moments | {"step": np.array(self.steps, dtype=np.int64)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Copies what `state_dict` returned."""
        for name in self.exp_avg:
            self.exp_avg[name][...] = state[f"exp_avg.{name}"]
            self.exp_avg_sq[name][...] = state[f"exp_avg_sq.{name}"]
        self.steps = int(state["step"])


def state(masters: Mapping[str, Parameter], optimizer: AdamW) -> dict[str, dict[str, np.ndarray]]:
    """Copies of all that AdamW changes, as a checkpoint keeps it: {"model": weights, "optimizer": moments and step}."""
    return {"model": {name: p.data.copy() for name, p in masters.items()}, "optimizer": optimizer.state_dict()}


def clip_grad_norm_(parameters: list[Parameter], max_norm: float) -> float:
    """Scales all gradients so that their common norm is `max_norm` at most. Returns the norm that they had.

    `max_norm` inf scales nothing: where a norm is beyond fp32's range, inf / inf would be NaN.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in gradients))
        factor = max_norm / (norm + 1e-6)  # 1e-6 as in PyTorch
        if max_norm < math.inf and not factor >= 1:
            for grad in gradients:
                grad *= factor
    return norm
