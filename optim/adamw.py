"""AdamW in NumPy: fp32 master weights and moments, and what mixed precision computes with, refreshed after each step.

Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", as torch.optim.AdamW computes it.
"""

import math

import numpy as np

from amp.formats import narrow


class Parameter:
    """A master weight `.data`, its gradient `.grad` of the same type, and its 16-bit `.shadow`, for products."""

    def __init__(self, data: np.ndarray, dtype: str = "fp32"):
        self.data, self.grad, self.dtype = data, None, dtype
        self.refresh()

    def refresh(self) -> None:
        self.shadow = narrow(self.data, self.dtype)  # in fp32 the weight itself


class AdamW:
    """`param_groups` as torch's: dicts of params, param_names, weight_decay, lr, betas and eps."""

    def __init__(self, param_groups: list[dict], lr: float, betas: tuple[float, float], eps: float = 1e-8):
        self.param_groups = [{"lr": lr, "betas": betas, "eps": eps, **group} for group in param_groups]
        self.steps = 0
        named = [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
        self.exp_avg = {name: np.zeros_like(parameter.data) for name, parameter in named}
        self.exp_avg_sq = {name: np.zeros_like(parameter.data) for name, parameter in named}

    def step(self) -> None:
        """w -= lr · (m̂ / (sqrt(v̂) + eps) + decay · w), m̂ and v̂ the moments without their bias towards zero.

        The bias of v is taken out of the fraction: sqrt(v̂) + eps = (sqrt(v) + eps · root) / root.
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
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad[...] = 0

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the moments by parameter name, and the number of steps."""
        moments = {f"exp_avg.{name}": m.copy() for name, m in self.exp_avg.items()}
        moments |= {f"exp_avg_sq.{name}": v.copy() for name, v in self.exp_avg_sq.items()}
        return moments | {"step": np.array(self.steps, dtype=np.int64)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name in self.exp_avg:
            self.exp_avg[name][...] = state[f"exp_avg.{name}"]
            self.exp_avg_sq[name][...] = state[f"exp_avg_sq.{name}"]
        self.steps = int(state["step"])


def clip_grad_norm_(parameters: list[Parameter], max_norm: float) -> float:
    """Scales all gradients so that their common norm is `max_norm` at most, and returns the norm they had.

    With no bound they are left alone: beyond fp32's range the norm is inf, and inf / inf is no factor.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in gradients))
        factor = max_norm / (norm + 1e-6)  # 1e-6 as in PyTorch
        if max_norm < math.inf and not factor >= 1:
            for grad in gradients:
                grad *= factor
    return norm
