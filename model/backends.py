"""What train.py, sample.py and the benchmarks need from a backend, and which module provides it by which name."""

import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from base.errors import BadInput
from base.flags import name_of

# Each has hardware(device, dtype, emulation) and build(settings, hardware, config), and may have REFUSED, which names
# the flags that it cannot honour.
MODULES = {"torch": "model.torch_backend", "numpy": "model.numpy_backend", "engine": "model.engine_backend"}


class Hardware(NamedTuple):
    """Where and in which precision a run computes."""

    device: str  # "cpu", "cuda", "cuda:1", "mps"
    device_name: str
    dtype: str  # "fp32", "bf16", "fp16"
    emulated: bool
    how: str  # for the header: by which units, or why emulated


class Kernel(NamedTuple):
    """Who computes mlp.c_proj."""

    code: str  # for programs: forward/dx/dW, like "cpu/library/library"
    how: str  # for the header, with the reason where it is not our own code


class Backend(NamedTuple):
    """A model, its optimizer, and the few things that differ between ways to compute. Arrays are NumPy's."""

    model: Callable[[np.ndarray, np.ndarray, tuple[int, int, int]], Any]  # (x, y, key) -> loss, x and y int64 (B, T)
    optimizer: Any  # .param_groups with param_names, .step(), .zero_grad()
    autocast: Callable[[], AbstractContextManager]
    clip_grad_norm_: Callable[[float], Any]  # max_norm, of all gradients together -> the norm before clipping
    evaluate: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x, y) -> (B,) mean loss of each row
    logits: Callable[[np.ndarray], np.ndarray]  # int64 (B, T) -> fp32 (B, V), of the last position
    # (weights "fp32" or "bf16") -> logits with a memory: tokens that go on from its last call cost only what is new
    decoder: Callable[[str], Callable[[np.ndarray], np.ndarray]]
    state: Callable[[], dict[str, dict[str, np.ndarray]]]  # {"model": {name: array}, "optimizer": {name: array}}
    load_state: Callable[[dict[str, dict[str, np.ndarray]]], None]
    kernel: Kernel


def module(name: str):
    """The module of a backend. BadInput where its library is missing."""
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise BadInput(f"--backend {name}: {error.name} is not installed: pip install -r requirements.txt") from None


def refused(name: str, flags: dict) -> dict[str, str]:
    """Of the flags given, those that the backend cannot honour: flag -> what to tell."""
    reasons = getattr(module(name), "REFUSED", {})
    asked = [flag for flag, value in flags.items() if flag in reasons and value != "auto"]
    return {flag: f"{name_of(flag)}: --backend {name} {reasons[flag]}" for flag in asked}


def trained(optimizer) -> list:
    """The parameters of an optimizer, in the order of its groups: sums over them, like a norm, depend on an order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def cpu_name() -> str:
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return name


def versions() -> dict[str, str]:
    """Versions of Python, and of the array libraries that this process has loaded."""
    libraries = {name: sys.modules[name].__version__ for name in ("numpy", "torch") if sys.modules.get(name)}
    return {"python": platform.python_version()} | libraries
