"""Dynamic loss scaling: keeps fp16 gradients inside fp16's range.

The loss is multiplied by a scale before backward, so that small gradients do not underflow. The gradients are
divided by the scale before the optimizer sees them. The scaler finds a good scale by itself: an overflow
skips the step and halves the scale, many good steps in a row double it. In each iteration an optimizer goes
READY -> UNSCALED -> STEPPED:

    scaler.scale(loss).backward()      # the gradients are `scale` times too large
    scaler.unscale_(optimizer)         # divides them by the scale; is any inf or NaN? the one host read
    clip_grad_norm_(...)               # optional; it sees the true gradients
    scaler.step(optimizer)             # the optimizer's step, or nothing after an overflow
    scaler.update()                    # halves the scale or counts towards doubling it; READY again

The file has three parts. LossScaler is the state machine. It knows no framework, and training needs nothing
else. Two adapters, for torch tensors and NumPy arrays, multiply and check gradients. Below a ruler,
DynamicLossScaler adds the rest of torch.amp.GradScaler's API. Importing this file imports neither torch nor
NumPy.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; PyTorch's
torch/amp/grad_scaler.py, whose decisions and errors are these.
"""

import math
import struct
import sys

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"


class TooManySkips(RuntimeError):
    """More steps in a row overflowed than `max_consecutive_skips` allows. A smaller scale cannot save the run."""


class LossScaler:
    """Dynamic loss scaling for optimizers whose parameters' `.grad` is a torch tensor or a NumPy array.

    `min_scale` and `max_scale` bound the scale at all times; None means no bound, as in PyTorch. `update`
    raises TooManySkips after more than `max_consecutive_skips` iterations with a skip in a row; None means no
    limit.

    Four attributes tell about skips. `last_step_skipped`: whether the latest `step` was skipped.
    `skipped_steps`: how many were skipped since the start. `consecutive_skips`: how many iterations in a row
    had a skip. `overflowed_parameter`: the name of the first parameter with an inf or NaN in the latest
    overflow, None before any.
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float | None = 1.0,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
    ):
        if not growth_factor > 1.0:
            raise AssertionError(f"The growth factor must be > 1.0, got {growth_factor}.")
        if not backoff_factor < 1.0:
            raise AssertionError(f"The backoff factor must be < 1.0, got {backoff_factor}.")
        bounds = [_fp32(bound) for bound in (min_scale, max_scale) if bound is not None]
        if bounds != sorted(bounds) or not all(0.0 <= bound < math.inf for bound in bounds):
            raise ValueError(f"min_scale {min_scale} and max_scale {max_scale} must be finite, not negative, in order")
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.max_consecutive_skips = max_consecutive_skips
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0  # iterations without an overflow since the scale last changed
        self._scale = self._bounded(init_scale)
        self._stages: dict[int, str] = {}  # by id(optimizer); an optimizer that is not in it is READY
        self._overflows: dict[int, bool | None] = {}  # by id(optimizer); None: it had no gradients to check
        self.last_step_skipped = False
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self.overflowed_parameter: str | None = None

    def scale(self, outputs):
        """Returns the loss `outputs` times the scale. Shape and device stay."""
        return outputs * _factor_for(outputs, self._scale)

    def unscale_(self, optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale in place, and records whether any was inf or NaN.

        RuntimeError: it was called twice, or after `step`. ValueError: a gradient is stored in fp16. A
        gradient that overflowed in fp16 storage is lost before anyone can divide it, so the weights must be
        fp32 master weights.
        """
        stage = self._stages.get(id(optimizer), READY)
        if stage == UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage == STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        names, gradients = _names_and_gradients(optimizer)
        if any(map(_is_fp16, gradients)):
            raise ValueError(
                "Attempting to unscale FP16 gradients. Keep the weights in fp32 and compute under autocast."
            )
        # The reciprocal is taken in fp64 and rounded once. Without a min_scale the scale may underflow to 0.
        inverse = _fp32(1.0 / self._scale) if self._scale else math.inf
        # This flag decides about the step and the scale.
        overflow = _multiply_and_check(gradients, inverse) if gradients else None
        if overflow:
            self.overflowed_parameter = _first_overflowed(names, gradients)
        self._overflows[id(optimizer)] = overflow
        self._stages[id(optimizer)] = UNSCALED

    def step(self, optimizer, *args, **kwargs):
        """Returns `optimizer.step(*args, **kwargs)`; after an overflow None, with nothing touched.

        It calls `unscale_` first where the caller has not. Fused optimizers get unscaled gradients, too.
        """
        stage = self._stages.get(id(optimizer), READY)
        if stage == STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if stage == READY:
            self.unscale_(optimizer)
        overflow = self._overflows[id(optimizer)]
        if overflow is None:
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
                "Was backward() called, are the parameters frozen, or do they belong to another model?"
            )
        self.last_step_skipped = overflow
        self.skipped_steps += overflow
        result = None if overflow else optimizer.step(*args, **kwargs)
        self._stages[id(optimizer)] = STEPPED
        return result

    def update(self) -> None:
        """Ends the iteration: an overflow in any optimizer lowers the scale, else it counts towards growth.

        TooManySkips: more iterations in a row overflowed than `max_consecutive_skips` allows.
        """
        overflows = [overflow for overflow in self._overflows.values() if overflow is not None]
        if not overflows:
            raise AssertionError("No inf checks were recorded prior to update: call step() or unscale_() first.")
        if any(overflows):
            self._scale = self._bounded(self._scale * self._backoff_factor)
            self._growth_tracker = 0
            self.consecutive_skips += 1
        else:
            self._growth_tracker += 1
            self.consecutive_skips = 0
            if self._growth_tracker == self._growth_interval:
                grown = _fp32(self._scale * self._growth_factor)
                self._scale = self._bounded(grown) if grown < math.inf else self._scale
                self._growth_tracker = 0
        self._start_over()
        limit = self.max_consecutive_skips
        if limit is not None and self.consecutive_skips > limit:
            raise TooManySkips(
                f"{self.consecutive_skips} steps in a row had an inf or NaN gradient, the last in "
                f"{self.overflowed_parameter}; the loss scale is down to {self._scale:g}: lower the learning rate"
            )

    def get_scale(self) -> float:
        """Returns the current scale, an fp32 value."""
        return self._scale

    def state_dict(self) -> dict:
        """Returns the five entries of GradScaler's state, so that either can load the other's."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores a `state_dict()`. An entry that is missing or bad raises before anything changes."""
        scale = self._bounded(state_dict["scale"])
        growth_factor, backoff_factor = state_dict["growth_factor"], state_dict["backoff_factor"]
        growth_interval, growth_tracker = state_dict["growth_interval"], state_dict["_growth_tracker"]
        self._scale = scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = growth_tracker

    def _start_over(self) -> None:
        self._stages.clear()
        self._overflows.clear()

    def _bounded(self, scale: float) -> float:
        """Returns the scale in fp32 within [min_scale, max_scale]. ValueError: it is negative, inf or NaN."""
        scale = _fp32(scale)
        if not 0.0 <= scale < math.inf:
            raise ValueError(f"the loss scale must be a finite number in fp32 and not negative, got {scale}")
        if self.min_scale is not None:
            scale = max(scale, _fp32(self.min_scale))
        if self.max_scale is not None:
            scale = min(scale, _fp32(self.max_scale))
        return scale


def _fp32(x: float) -> float:
    """Returns x rounded to fp32, in which PyTorch keeps the scale; inf where x is beyond fp32's range."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def _is_fp16(gradient) -> bool:
    return str(gradient.dtype) in ("float16", "torch.float16")


def _names_and_gradients(optimizer) -> tuple[list[str], list]:
    """Returns the names and gradients of the parameters that have a gradient; of a sparse one, its values."""
    names, gradients = [], []
    for number, group in enumerate(optimizer.param_groups):
        places = [f"param_groups[{number}]['params'][{index}]" for index in range(len(group["params"]))]
        for name, parameter in zip(group.get("param_names") or places, group["params"], strict=True):
            gradient = parameter.grad
            if gradient is not None:
                names.append(name)
                gradients.append(gradient._values() if getattr(gradient, "is_sparse", False) else gradient)
    return names, gradients


def _first_overflowed(names: list[str], gradients: list) -> str | None:
    for name, gradient in zip(names, gradients, strict=True):
        if _multiply_and_check([gradient], 1.0):
            return name
    return None


def _multiply_and_check(gradients: list, factor: float) -> bool:
    """Multiplies all gradients by `factor` in place; returns whether any value was inf or NaN before.

    A finite gradient that is huge is no overflow, even where the sum of its values would be.
    """
    tensors = [gradient for gradient in gradients if _is_tensor(gradient)]
    arrays = [gradient for gradient in gradients if not _is_tensor(gradient)]
    tensors_overflow = _multiply_and_check_tensors(tensors, factor) if tensors else False
    arrays_overflow = _multiply_and_check_arrays(arrays, factor) if arrays else False
    return tensors_overflow or arrays_overflow


# ---- the adapter for torch tensors: it finds torch where the caller has imported it


def _is_tensor(x) -> bool:
    torch = sys.modules.get("torch")  # where torch was never imported nothing can be a tensor
    return torch is not None and isinstance(x, torch.Tensor)


def _factor_for(loss, scale: float):
    """Returns the factor of a loss. For a tensor it is an fp32 tensor, so that an fp16 loss becomes fp32."""
    if not _is_tensor(loss):
        return scale
    torch = sys.modules["torch"]
    return torch.full((), scale, dtype=torch.float32, device=loss.device)


def _multiply_and_check_tensors(tensors: list, factor: float) -> bool:
    """Uses PyTorch's primitive for this: a few kernel launches for all tensors, one host read a device."""
    torch = sys.modules["torch"]
    same_kind: dict[tuple, list] = {}
    for tensor in tensors:
        same_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    overflow_flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device, _ in same_kind}
    for (device, _), group in same_kind.items():
        factor_on_device = torch.full((), factor, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow_flags[device], factor_on_device)
    return any(bool(flag) for flag in overflow_flags.values())


# ---- the adapter for NumPy arrays


def _multiply_and_check_arrays(arrays: list, factor: float) -> bool:
    import numpy as np

    overflow = False
    with np.errstate(over="ignore", invalid="ignore"):
        for array in arrays:
            overflow = overflow or not np.isfinite(array).all()
            if factor != 1.0:  # with a scale held at 1 only the check is left
                np.multiply(array, array.dtype.type(factor), out=array)
    return overflow


# ======== The ruler: training needs nothing below. It is here so that the API is torch.amp.GradScaler's. ========


class DynamicLossScaler(LossScaler):
    """LossScaler with all of torch.amp.GradScaler's API. With `enabled=False` every call passes through."""

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
        super().__init__(
            init_scale if enabled else 1.0,
            growth_factor if enabled else 2.0,
            backoff_factor if enabled else 0.5,
            growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            max_consecutive_skips=max_consecutive_skips,
        )
        self._enabled = enabled
        if not enabled:
            self._scale = 1.0  # whatever the bounds

    def scale(self, outputs):
        """Scales a loss, or each loss in nested lists and tuples. Another iterable becomes an iterator."""
        if not self._enabled:
            return outputs
        if hasattr(outputs, "backward"):
            return super().scale(outputs)
        if not hasattr(outputs, "__iter__") or isinstance(outputs, (str, bytes)):
            raise ValueError(f"outputs must be a loss or an iterable of losses, got {type(outputs).__name__}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer) -> None:
        if self._enabled:
            super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        """Returns what LossScaler.step returns. RuntimeError: a closure was given."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise RuntimeError(
                "Closure use is not supported: a closure would compute gradients that were never unscaled."
            )
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None) -> None:
        """Ends the iteration. A `new_scale`, a number or a tensor of one element, becomes the scale instead."""
        if not self._enabled:
            return
        if new_scale is None:
            super().update()
            return
        if _is_tensor(new_scale) and (new_scale.numel() != 1 or new_scale.requires_grad):
            raise AssertionError("new_scale must be a float or a tensor of one element that needs no gradient.")
        self._scale = self._bounded(float(new_scale))
        self._start_over()

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
        return super().state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores a state, ours or GradScaler's. RuntimeError: it is empty, from a disabled scaler."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly because it was saved from a disabled scaler.")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict:
        if self._stages:  # the ids of optimizers mean nothing in another process
            raise AssertionError("A scaler may only be pickled at the beginning of an iteration or after update().")
        return self.__dict__.copy()
