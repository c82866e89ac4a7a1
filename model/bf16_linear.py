"""minigpt::bf16_linear(x, weight, bias): the linear layer whose forward is our own kernel (csrc/).

x (..., K) fp32 or bf16, weight (M, K) and bias (M) fp32 or bf16 -> (..., M) in x's dtype. Weight and bias are rounded
to bf16 as they are loaded, products and sums are fp32, and the result is rounded once, to x's dtype. With a bf16 x that
is the row "linear" of amp/policy.py, so the op stands for F.linear under autocast. An fp32 x is not rounded.

PyTorch's dispatcher chooses who computes. Once csrc/build.py has loaded the extension, its kernels are registered for
CPU and CUDA. Elsewhere the fallback below computes the same sums, in the order of PyTorch's libraries. The gradients
are products of these libraries everywhere. The op has no double backward and no forward-mode derivative.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from amp.autocast import native_units
from csrc import build
from model.backends import Kernel

LIBRARY = "library/library/library"  # who computes y, dx and dW: the products of PyTorch's libraries
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"


# ---- the op: fallback, derivative, registration


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """RuntimeError where a dtype, shape or device does not fit; csrc/bindings.cpp makes the same checks."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(f"bf16_linear: {name} must be fp32 or bf16, not {tensor.dtype}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        shapes = f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}"
        raise RuntimeError(f"bf16_linear: {shapes}: they must be (..., K) and (M, K)")
    if len({tensor.device for tensor in (x, weight, bias) if tensor is not None}) > 1:
        raise RuntimeError("bf16_linear: x, weight and bias must be on one device")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"bf16_linear: bias must be (M = {weight.shape[0]}), not {tuple(bias.shape)}")


def _library_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y from a library's product: in bf16 where the device has units for it, else of rounded operands in fp32."""
    _check(x, weight, bias)
    weight = weight.bfloat16()
    bias = None if bias is None else bias.bfloat16()
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == torch.bfloat16 and native_units(x.device, "bf16")[0]:
            return F.linear(x, weight, bias)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _fake_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty y of the right shape and dtype, for torch.compile and the meta device."""
    _check(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, dy: torch.Tensor):
    """dx = dy W, dW = dyᵀ x, db = the sum of dy over all vectors; each is summed in fp32, then rounded as x is."""
    x, weight = ctx.saved_tensors
    low = x.dtype  # bf16, or fp32 where only weight and bias are rounded
    N = math.prod(x.shape[:-1])
    x_rows = x.reshape(N, x.shape[-1])  # (N, K)
    dy_rows = dy.reshape(N, weight.shape[0])  # (N, M)
    weight_low = weight.bfloat16().to(low)
    if low == torch.bfloat16 and not native_units(x.device, "bf16")[0]:
        x_rows, dy_rows, weight_low = x_rows.float(), dy_rows.float(), weight_low.float()
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = (dy_rows @ weight_low).to(low).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        dw = (dy_rows.T @ x_rows).to(low).to(weight.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = dy_rows.sum(0).to(low).to(ctx.bias_dtype)  # PyTorch sums 16-bit numbers in fp32
    return dx, dw, db


def _define(name: str) -> Callable[..., torch.Tensor]:
    """Registers an op with this file's schema, fallback and derivative; csrc/ adds kernels to the one of its name."""
    torch.library.define(f"minigpt::{name}", SCHEMA)
    torch.library.impl(f"minigpt::{name}", "CompositeExplicitAutograd")(_library_forward)
    torch.library.register_fake(f"minigpt::{name}")(_fake_forward)
    torch.library.register_autograd(f"minigpt::{name}", _backward, setup_context=_setup_context)
    return getattr(torch.ops.minigpt, name).default


bf16_linear = _define("bf16_linear")
bf16_linear_library = _define("bf16_linear_library")  # for --kernel library: never has a kernel of csrc/


class BF16Linear(nn.Linear):
    """nn.Linear that computes with `op` where one is set; x (..., K) -> (..., M) in x's dtype."""

    op: Callable[..., torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.op is None:
            return super().forward(x)
        return self.op(x.to(torch.bfloat16), self.weight, self.bias).to(x.dtype)


# ---- which op a run uses


class ChosenOp(NamedTuple):
    """The op for BF16Linear, and who computes it."""

    op: Callable[..., torch.Tensor] | None  # None: F.linear
    kernel: Kernel


def choose_op(kernel: str, device: torch.device, dtype: str, shape: tuple[int, int, int]) -> ChosenOp:
    """The op for --kernel auto, own, library, off or require. build.Unavailable where `require` finds none of our code.

    shape: (N, M, K) of training's products: N vectors times a weight (M, K). It decides which of our kernels runs.
    """
    if dtype != "bf16":
        return ChosenOp(None, Kernel(LIBRARY, f"PyTorch's linear, since bf16_linear is for bf16, not {dtype}"))
    if kernel == "off":
        return ChosenOp(None, Kernel(LIBRARY, "PyTorch's linear (--kernel off)"))
    if kernel == "library":
        return ChosenOp(bf16_linear_library, Kernel(LIBRARY, "bf16_linear with PyTorch's products (--kernel library)"))
    try:
        kernel_in_use = our_kernel(device, shape, tensor_cores_only=kernel == "auto")
    except build.Unavailable as error:
        if kernel == "require":
            raise
        return ChosenOp(bf16_linear_library, Kernel(LIBRARY, f"bf16_linear with PyTorch's products: {error}"))
    return ChosenOp(bf16_linear, kernel_in_use)


def our_kernel(device: torch.device, shape: tuple[int, int, int], tensor_cores_only: bool) -> Kernel:
    """Our code for (N, M, K) on this device. build.Unavailable with the reason where there is none.

    tensor_cores_only: on CUDA take v5 or nothing, because v4 reads W again for every 8 vectors.
    """
    if device.type not in ("cpu", "cuda"):
        raise build.Unavailable(f"csrc/ has code for cpu and cuda, not for {device.type}")
    kernels = build.load()
    if device.type == "cpu":
        code, source = "cpu", f"csrc/bf16_linear_cpu.cpp, {kernels.instruction_set()}"
    elif not kernels.with_cuda:
        raise build.Unavailable(f"csrc/ is built without CUDA: {build.why_without_cuda()}")
    else:
        with torch.cuda.device(device):
            version = kernels.cuda_version_for(*shape, True, False)  # bf16 x, fp32 master weights
        if version != 5 and tensor_cores_only:
            raise build.Unavailable(f"no tensor cores for this card or shape (--kernel own takes v{version})")
        units = " on tensor cores" if version == 5 else ""
        code, source = f"cuda-v{version}", f"csrc/bf16_linear.cu, v{version}{units}"
    how = f"bf16_linear with our own forward ({source}), PyTorch's products for dx and dW"
    return Kernel(f"{code}/library/library", how)
