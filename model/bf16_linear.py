"""minigpt::bf16_linear(x, weight, bias): the linear layer whose forward is our own kernel (csrc/).

x (..., K) fp32 or bf16, weight (M, K) and bias (M) fp32 or bf16 -> (..., M) in x's dtype. Weight and bias are rounded
to bf16 as they are loaded, products and sums are fp32, the result is rounded once. With a bf16 x that is the row
"linear" of amp/policy.py, so the op stands for F.linear under autocast; with an fp32 x only weight and bias are.

The dispatcher chooses: where csrc/ has been loaded its kernels are registered for CPU and CUDA; elsewhere the products
of PyTorch's libraries on rounded weights answer. The gradients are always those products; there are none of gradients
(double backward), nor forward-mode ones.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from amp.autocast import native_units
from csrc import build
from model.backends import Kernel

LIBRARY = "library/library/library"
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"


def _library_forward(x, weight, bias=None):
    """The same numbers from a library's product: in bf16 where the device has units for it, else in fp32."""
    _check(x, weight, bias)
    weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == torch.bfloat16 and native_units(x.device, "bf16")[0]:
            return F.linear(x, weight, bias)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _check(x, weight, bias):
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(f"bf16_linear: {name} must be fp32 or bf16, not {tensor.dtype}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"bf16_linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}: (..., K), (M, K)"
        )
    if len({tensor.device for tensor in (x, weight, bias) if tensor is not None}) > 1:
        raise RuntimeError("bf16_linear: x, weight and bias must be on one device")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"bf16_linear: bias must be (M = {weight.shape[0]}), not {tuple(bias.shape)}")


def _shape_of_result(x, weight, bias=None):
    _check(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, dy):
    """dx = dy W, dW = dyᵀ x, db = the sum of dy over all vectors; each summed in fp32, then rounded as x is."""
    x, weight = ctx.saved_tensors
    low = x.dtype  # bf16, or fp32 where nothing but the weight was rounded
    N = math.prod(x.shape[:-1])
    rows, dy = x.reshape(N, x.shape[-1]), dy.reshape(N, weight.shape[0])  # (N, K), (N, M)
    weight_low = weight.bfloat16().to(low)
    if low == torch.bfloat16 and not native_units(x.device, "bf16")[0]:
        rows, dy, weight_low = rows.float(), dy.float(), weight_low.float()
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = (dy @ weight_low).to(low).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        dw = (dy.T @ rows).to(low).to(weight.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = dy.sum(0).to(low).to(ctx.bias_dtype)  # PyTorch sums 16-bit numbers in fp32
    return dx, dw, db


def _define(name: str):
    """Registers an op with this file's schema, fallback and derivative; csrc/ adds kernels to the one of its name."""
    torch.library.define(f"minigpt::{name}", SCHEMA)
    torch.library.impl(f"minigpt::{name}", "CompositeExplicitAutograd")(_library_forward)
    torch.library.register_fake(f"minigpt::{name}")(_shape_of_result)
    torch.library.register_autograd(f"minigpt::{name}", _backward, setup_context=_setup_context)
    return getattr(torch.ops.minigpt, name).default


bf16_linear = _define("bf16_linear")
bf16_linear_library = _define("bf16_linear_library")  # for --kernel library: never our kernels


class BF16Linear(nn.Linear):
    """nn.Linear that goes through `op` once there is one; x (..., K) -> (..., M) in x's dtype."""

    op = None

    def forward(self, x):
        if self.op is None:
            return super().forward(x)
        return self.op(x.to(torch.bfloat16), self.weight, self.bias).to(x.dtype)


class Choice(NamedTuple):
    """Which op computes, and who that is."""

    op: Any  # None: F.linear
    kernel: Kernel


def choose(kernel: str, device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Choice:
    """The op for --kernel auto, own, library, off, require. build.Unavailable where `require` finds no code of ours.

    shape: (N, M, K) of training's products, to name the code that computes them.
    """
    if dtype != "bf16":
        return Choice(None, Kernel(LIBRARY, f"PyTorch's linear, since bf16_linear is for bf16, not {dtype}"))
    if kernel == "off":
        return Choice(None, Kernel(LIBRARY, "PyTorch's linear (--kernel off)"))
    if kernel == "library":
        return Choice(bf16_linear_library, Kernel(LIBRARY, "bf16_linear with PyTorch's products (--kernel library)"))
    try:
        return own(kernel, device, shape)
    except build.Unavailable as error:
        if kernel == "require":
            raise
        return Choice(bf16_linear_library, Kernel(LIBRARY, f"bf16_linear with PyTorch's products: {error}"))


def own(kernel: str, device: torch.device, shape: tuple[int, int, int]) -> Choice:
    """Our code on this device. build.Unavailable with the reason where there is none."""
    if device.type not in ("cpu", "cuda"):
        raise build.Unavailable(f"csrc/ has code for cpu and cuda, not for {device.type}")
    kernels = build.load()
    if device.type == "cpu":
        code, file = "cpu", f"csrc/bf16_linear_cpu.cpp, {kernels.instruction_set()}"
    elif not kernels.with_cuda:
        raise build.Unavailable(f"csrc/ is built without CUDA: {build.cuda_reason()}")
    else:
        with torch.cuda.device(device):
            version = kernels.choice(*shape, True, False)  # bf16 x, fp32 master weights
        if version != 5 and kernel == "auto":
            raise build.Unavailable(f"no tensor cores for this card or shape (--kernel own takes v{version})")
        code, file = f"cuda-v{version}", f"csrc/bf16_linear.cu, v{version}{' on tensor cores' if version == 5 else ''}"
    how = f"bf16_linear with our own forward ({file}), PyTorch's products for dx and dW"
    return Choice(bf16_linear, Kernel(f"{code}/library/library", how))
