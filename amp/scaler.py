"""DynamicLossScaler: keeps fp16 gradients inside fp16's range.

The loss is multiplied by a scale before backward, so that small gradients do not underflow; the gradients are divided
by it before the optimizer sees them. The scale finds itself: an overflow skips the step and halves the scale, a run of
good steps doubles it. Per iteration an optimizer goes READY -> UNSCALED -> STEPPED, and update() starts over:

    scaler.scale(loss).backward()      # gradients are scale times too large
    scaler.unscale_(optimizer)         # divide by the scale; was any of them inf or NaN? (the one host read)
    clip_grad_norm_(...)               # optional, on true gradients
    scaler.step(optimizer)             # the optimizer's step, or nothing at all
    scaler.update()                    # back off or count towards growth

API and decisions are torch.amp.GradScaler's, errors included. Sources: Micikevicius et al. 2018, section 3.2; PyTorch.
"""

import math
import sys
from collections.abc import Iterable

import numpy as np

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"


class TooManySkips(RuntimeError):
    """More consecutive overflows than `max_consecutive_skips`: the run diverged, a smaller scale cannot save it."""


def _fp32(x: float) -> float:
    """Rounds to fp32, the precision in which PyTorch keeps the scale; beyond its range the result is inf."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def _is_torch(x) -> bool:
    torch = sys.modules.get("torch")  # where torch was never imported nothing can be a tensor
    return torch is not None and isinstance(x, torch.Tensor)


class DynamicLossScaler:
    """Dynamic loss scaling for torch optimizers and for any optimizer whose parameters have a NumPy `.grad`.

    `min_scale` and `max_scale` bound the scale at all times (None: no bound, as in PyTorch). `max_consecutive_skips`
    (None: no limit) makes `update` raise TooManySkips. `enabled=False` turns every call into a pass-through.

    To look at: `last_step_skipped` (of the latest `step`), `skipped_steps` (since the start), `consecutive_skips`, and
    `overflowed_parameter`, the first parameter with an inf or NaN gradient in the latest overflow (None before any).
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = 1.0,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
    ):
        if enabled and not growth_factor > 1.0:
            raise AssertionError(f"The growth factor must be > 1.0, got {growth_factor}.")
        if enabled and not backoff_factor < 1.0:
            raise AssertionError(f"The backoff factor must be < 1.0, got {backoff_factor}.")
        lowest, highest = 0.0 if min_scale is None else _fp32(min_scale), 0.0 if max_scale is None else _fp32(max_scale)
        if not (0.0 <= lowest < math.inf and 0.0 <= highest < math.inf) or (max_scale is not None and lowest > highest):
            raise ValueError(f"min_scale {min_scale} and max_scale {max_scale} must be finite, not negative, in order")
        self._enabled = enabled
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0
        self.min_scale, self.max_scale, self.max_consecutive_skips = min_scale, max_scale, max_consecutive_skips
        self._scale = self._bounded(init_scale) if enabled else 1.0
        self._stages: dict[int, str] = {}  # id(optimizer) -> UNSCALED or STEPPED; absent: READY
        self._overflows: dict[int, bool | None] = {}  # id(optimizer) -> found inf or NaN? None: no gradients
        self.last_step_skipped, self.skipped_steps, self.consecutive_skips = False, 0, 0
        self.overflowed_parameter: str | None = None

    def _bounded(self, scale: float) -> float:
        """An fp32 value within [min_scale, max_scale]; ValueError where that is no finite number >= 0."""
        scale = _fp32(scale)
        if not 0.0 <= scale < math.inf:
            raise ValueError(f"the loss scale must be a finite number in fp32 and not negative, got {scale}")
        if self.min_scale is not None:
            scale = max(scale, _fp32(self.min_scale))
        if self.max_scale is not None:
            scale = min(scale, _fp32(self.max_scale))
        return scale

    # ---- scale -> unscale_ -> step -> update

    def scale(self, outputs):
        """Multiplies a loss, or each loss in nested lists and tuples, by the scale. Shapes and devices are kept."""
        if not self._enabled:
            return outputs
        if _is_torch(outputs):  # a tensor of no dimensions promotes as PyTorch's scale does: an fp16 loss becomes fp32
            torch = sys.modules["torch"]
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if hasattr(outputs, "backward"):
            return outputs * self._scale
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a loss or an iterable of losses, got {type(outputs).__name__}")

    def unscale_(self, optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale in place, and records whether any was inf or NaN.

        Raises RuntimeError when called twice or after `step`, ValueError for fp16 gradients: keep fp32 master weights,
        since a gradient that overflowed in fp16 storage is lost before anyone can divide it.
        """
        if not self._enabled:
            return
        stage = self._stages.get(id(optimizer), READY)
        if stage == UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage == STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        # The reciprocal is taken in fp64 and rounded once; only PyTorch's rule (min_scale=None) lets the scale reach 0.
        inverse = _fp32(1.0 / self._scale) if self._scale else math.inf
        gradients = list(_gradients(optimizer))
        if any(str(grad.dtype).removeprefix("torch.") == "float16" for _, grad in gradients):
            raise ValueError(
                "Attempting to unscale FP16 gradients. Keep the weights in fp32 and compute under autocast."
            )
        overflow = _divide_and_check([grad for _, grad in gradients], inverse) if gradients else None
        if overflow:
            self.overflowed_parameter = next((name for name, grad in gradients if not _all_finite(grad)), None)
        self._stages[id(optimizer)], self._overflows[id(optimizer)] = UNSCALED, overflow

    def step(self, optimizer, *args, **kwargs):
        """`optimizer.step(*args, **kwargs)` and its result, or None with nothing touched if a gradient overflowed.

        Calls `unscale_` first where the caller has not. A fused optimizer is given unscaled gradients like any other.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise RuntimeError(
                "Closure use is not supported: a closure would compute gradients that were never unscaled."
            )
        stage = self._stages.get(id(optimizer), READY)
        if stage == STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if stage == READY:
            self.unscale_(optimizer)
        if self._overflows[id(optimizer)] is None:
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
                "Was backward() called, are the parameters frozen, or do they belong to another model?"
            )
        self.last_step_skipped = self._overflows[id(optimizer)]
        self.skipped_steps += self.last_step_skipped
        result = None if self.last_step_skipped else optimizer.step(*args, **kwargs)
        self._stages[id(optimizer)] = STEPPED
        return result

    def update(self, new_scale=None) -> None:
        """Ends the iteration: backs off after an overflow in any optimizer, else counts towards growth.

        `new_scale` (a float, or a tensor of one element) sets the scale instead and leaves the counter alone.
        """
        if not self._enabled:
            return
        overflows = [found for found in self._overflows.values() if found is not None]
        if new_scale is not None:
            if _is_torch(new_scale) and (new_scale.numel() != 1 or new_scale.requires_grad):
                raise AssertionError("new_scale must be a float or a tensor of one element that needs no gradient.")
            self._scale = self._bounded(float(new_scale))
        elif not overflows:
            raise AssertionError("No inf checks were recorded prior to update: call step() or unscale_() first.")
        elif any(overflows):
            self._scale = self._bounded(self._scale * self._backoff_factor)
            self._growth_tracker, self.consecutive_skips = 0, self.consecutive_skips + 1
        else:
            self._growth_tracker, self.consecutive_skips = self._growth_tracker + 1, 0
            if self._growth_tracker == self._growth_interval:
                grown = _fp32(self._scale * self._growth_factor)
                self._scale = self._bounded(grown) if grown < math.inf else self._scale
                self._growth_tracker = 0
        self._stages.clear()
        self._overflows.clear()
        limit = self.max_consecutive_skips
        if new_scale is None and limit is not None and self.consecutive_skips > limit:
            raise TooManySkips(
                f"{self.consecutive_skips} steps in a row had an inf or NaN gradient, the last in "
                f"{self.overflowed_parameter}; the loss scale is down to {self._scale:g}: lower the learning rate"
            )

    # ---- settings and state

    def get_scale(self) -> float:
        return self._scale

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict:
        """The five entries of GradScaler's state, so that states go either way; empty when disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores `state_dict()`, ours or GradScaler's. RuntimeError where it is empty, from a disabled scaler."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly because it was saved from a disabled scaler.")
        scale, factors = self._bounded(state_dict["scale"]), (state_dict["growth_factor"], state_dict["backoff_factor"])
        interval, tracker = state_dict["growth_interval"], state_dict["_growth_tracker"]
        self._scale, (self._growth_factor, self._backoff_factor) = scale, factors
        self._growth_interval, self._growth_tracker = interval, tracker

    def __getstate__(self) -> dict:
        if self._stages:  # ids of optimizers mean nothing in another process
            raise AssertionError("A scaler may only be pickled at the beginning of an iteration or after update().")
        return self.__dict__.copy()


# ---- gradients: torch tensors (dense or sparse) and NumPy arrays


def _gradients(optimizer):
    """Yields (name, gradient) of every parameter that has one; of a sparse gradient, its values."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{g}]['params'][{p}]" for p in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            grad = parameter.grad
            if grad is not None:
                yield name, grad._values() if getattr(grad, "is_sparse", False) else grad


def _divide_and_check(grads: list, inverse: float) -> bool:
    """grad *= inverse for all; True if any value was inf or NaN before. Huge finite values are no overflow."""
    overflow = False
    for array in (grad for grad in grads if not _is_torch(grad)):
        overflow |= not _all_finite(array)
        if inverse != 1.0:  # of a scale held at 1 only the check is left
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(array, array.dtype.type(inverse), out=array)
    tensors = [grad for grad in grads if _is_torch(grad)]
    if not tensors:
        return overflow
    torch = sys.modules["torch"]
    groups: dict[tuple, list] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found = {device: torch.zeros((), dtype=torch.float32, device=device) for device, _ in groups}
    for (device, _), same in groups.items():
        # Check and product in one pass over all tensors: PyTorch's primitive for just this, a few launches on CUDA.
        factor = torch.full((), inverse, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, found[device], factor)
    return overflow | any(bool(flag) for flag in found.values())  # one host read per device


def _all_finite(grad) -> bool:
    return bool(grad.isfinite().all()) if _is_torch(grad) else bool(np.isfinite(grad).all())
