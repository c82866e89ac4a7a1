"""The contract of a backend: what train.py, sample.py and the benchmarks call, and which module answers to which name.

A module of MODULES has three functions, and perhaps REFUSED:

    hardware(device, dtype, emulation) -> Hardware             resolves "auto"; BadInput where the device is not here
    build(settings, hardware, config, weights) -> Backend      to train
    sampler(hardware, config, weights, held) -> Sampler        to draw text: no optimizer, evaluation mode
    REFUSED: {flag: reason}                                    flags that the backend cannot honour

`weights` are fp32 arrays by the names of model/config.py: its initial_weights, or a checkpoint's. They are copied, so
the caller's arrays never change. ValueError names a tensor that does not fit.
`held` says how our bf16 kernel holds weights when it decodes: "bf16", rounded once, or "fp32", rounded at each use.
"""

import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from base.dtypes import Dtype
from base.errors import BadInput
from base.flags import name_of

MODULES = {"torch": "model.torch_backend", "numpy": "model.numpy_backend", "engine": "model.engine_backend"}

Arrays = dict[str, np.ndarray]  # by name
Logits = Callable[[np.ndarray], np.ndarray]  # int64 (1, T) -> fp32 (1, V), of the last position


class Hardware(NamedTuple):
    """Where and in which precision a run computes."""

    device: str  # "cpu", "cuda", "cuda:1", "mps"
    device_name: str
    dtype: Dtype
    emulated: bool
    how: str  # for the header: by which units, or why emulated


class Kernel(NamedTuple):
    """Who computes mlp.c_proj."""

    code: str  # for programs: forward/dx/dW, like "cpu/library/library"
    how: str  # for the header, with the reason where it is not our own code


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A model, its optimizer, and the few things that differ between ways to compute. Arrays are NumPy's.

    A gradient norm and a loss may still lie on the device: float() and .item() wait for it, so the loop decides when.
    """

    model: Callable[..., Any]  # (x, y, key) -> mean loss; x and y int64 (B, T); key (seed, step, micro) for dropout
    optimizer: Any  # .param_groups with param_names, .step(), .zero_grad()
    autocast: Callable[[], AbstractContextManager]  # the precision of training, for the forward pass
    clip_grad_norm_: Callable[[float], Any]  # max_norm, of all gradients together -> the norm before clipping
    evaluate: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x, y) -> fp64 (B,), mean loss of each row, no dropout
    decoder: Callable[[str], Logits]  # held -> logits by the weights as they are now; it may remember what it has read
    state: Callable[[], dict[str, Arrays]]  # copies, as a checkpoint keeps them: {"model": …, "optimizer": …}
    load_optimizer: Callable[[Arrays], None]  # takes the "optimizer" of a state, and copies it
    kernel: Kernel


class Sampler(NamedTuple):
    """A model to draw text from."""

    logits: Logits  # may remember: tokens that go on from its last call then cost only what is new
    kernel: Kernel


def module(name: str) -> ModuleType:
    """The module of a backend. BadInput where its library is not installed."""
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise BadInput(f"--backend {name}: {error.name} is not installed: pip install -r requirements.txt") from None


def refused(name: str, flags: dict[str, Any]) -> dict[str, str]:
    """The flags among those given that a backend cannot honour: {flag: what to tell the user}."""
    reasons = getattr(module(name), "REFUSED", {})
    asked = [flag for flag, value in flags.items() if flag in reasons and value != "auto"]
    return {flag: f"{name_of(flag)}: --backend {name} {reasons[flag]}" for flag in asked}


def trained(optimizer: Any) -> list:
    """The parameters of an optimizer in the order of its groups: a sum over them, like a norm, depends on the order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def cpu_name() -> str:
    """The model of this CPU, as the system tells it."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return name


def versions() -> dict[str, str]:
    """Versions of Python, and of the array libraries that this process has loaded."""
    libraries = {name: sys.modules[name].__version__ for name in ("numpy", "torch") if sys.modules.get(name)}
    return {"python": platform.python_version()} | libraries
