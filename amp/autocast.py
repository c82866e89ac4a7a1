"""Mixed precision in PyTorch: torch.autocast where the hardware has 16-bit units, emulation elsewhere.

On a CPU without 16-bit units torch's own bf16 and fp16 matrix products are about a hundred times slower than
fp32. Emulation computes what a tensor core computes, at nearly fp32 speed. It rounds the operands to the low
dtype, multiplies and accumulates in fp32, and rounds the result. It does the same with the gradients. All
values are stored in fp32 tensors. The table of amp/policy.py says which functions it rounds.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from amp import policy
from amp.formats import FORMATS
from csrc import build

LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The names of torch's functions -> their rows of policy.TABLE. x @ y arrives as "matmul".
PRODUCTS = {"linear": "linear", "scaled_dot_product_attention": "attention"} | dict.fromkeys(
    ("matmul", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm"), "matmul"
)
# The emulation does not know where these products round inside. To run them in fp32 would silently break the
# table, so they raise. The list has names only: it misses functions of a later PyTorch, and torch.ops.aten
# called by hand.
UNKNOWN_PRODUCTS = frozenset("""
    einsum tensordot inner vdot vecdot bilinear chain_matmul multi_dot cdist matrix_power matrix_exp cov corrcoef
    kron outer conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution grouped_mm
    _grouped_mm multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell addmm_ addmv_ addbmm_ baddbmm_ addr addr_ ger _addmm_activation _scaled_mm linear_cross_entropy
    _sparse_mm _sparse_addmm smm hspmm sspaddmm sspaddmm_ _scaled_dot_product_attention_math
""".split())  # fmt: skip  # noqa: SIM905


class _Round(torch.autograd.Function):
    """Rounds an fp32 tensor to a low dtype, and later its gradient. Both stay fp32 tensors."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return round_tensor(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return round_tensor(grad, ctx.dtype), None


class _Linear(torch.autograd.Function):
    """The table's row "linear": y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, db = Σ dy, each rounded once.

    The result is that of _Round around each operand and the result. It is faster: new tensors are rounded in
    place.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.dtype = dtype
        ctx.has_bias = bias is not None
        x = round_tensor(x.float(), dtype)  # (..., in)
        weight = round_tensor(weight.float(), dtype)  # (out, in)
        bias = round_tensor(bias.float(), dtype) if ctx.has_bias else None  # (out,)
        ctx.save_for_backward(x, weight)
        return round_tensor_(F.linear(x, weight, bias), dtype)  # (..., out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        dy = round_tensor(dy, ctx.dtype)  # (..., out)
        flat_dy = dy.reshape(-1, dy.shape[-1])  # (N, out)
        flat_x = x.reshape(-1, x.shape[-1])  # (N, in)
        if ctx.needs_input_grad[0]:
            dx = round_tensor_(dy @ weight, ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = round_tensor_(flat_dy.T @ flat_x, ctx.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = round_tensor_(flat_dy.sum(0), ctx.dtype)
        return dx, dw, db, None


def round_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of an fp32 tensor rounded to a low dtype, ties to even, as an fp32 tensor."""
    kernels = _kernels() if x.device.type == "cpu" else None
    return kernels.rounded(x, dtype == torch.float16) if kernels else x.to(dtype).float()


def round_tensor_(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds x in place and returns it. Nobody else may hold x: autograd is not told that it changes."""
    kernels = _kernels() if x.device.type == "cpu" else None
    return kernels.round_(x, dtype == torch.float16) if kernels else x.copy_(x.to(dtype))


@cache
def _kernels():
    """The module that csrc/build.py builds, or None where it cannot be built."""
    try:
        return build.load()
    except build.Unavailable:
        return None


def who_rounds(device: torch.device) -> str:
    """Returns whose code rounds on this device, for the header. On a CPU that code is loaded, or built."""
    return "csrc/bf16_linear_cpu.cpp" if device.type == "cpu" and _kernels() else "PyTorch's casts"


def _is_rounded_under_autocast(value) -> bool:
    """torch.autocast rounds floating-point tensors. It leaves fp64 tensors and everything else alone."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _round_operand(value, dtype: torch.dtype):
    return _Round.apply(value.float(), dtype) if _is_rounded_under_autocast(value) else value


def _arguments_of_linear(input, weight, bias=None):
    """Puts the arguments of F.linear in order, however they were given."""
    return input, weight, bias


class _Emulation(TorchFunctionMode):
    """Intercepts matrix products. Every other function runs unchanged, on fp32 tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        dtype = LOW_DTYPES.get(policy.compute_dtype())  # None in a nested block that is fp32
        if dtype is None or (name not in PRODUCTS and name not in UNKNOWN_PRODUCTS):
            return func(*args, **kwargs)
        out = " with out=" if kwargs.get("out") is not None else ""
        if name in UNKNOWN_PRODUCTS or out:
            raise NotImplementedError(
                f"emulated {policy.compute_dtype()} does not know the matrix product torch.{name}{out}: "
                "use linear, matmul or scaled_dot_product_attention"
            )
        rule = policy.TABLE[PRODUCTS[name]]
        if name == "linear" and rule == policy.PRODUCT:
            operands = _arguments_of_linear(*args, **kwargs)
            if all(operand is None or _is_rounded_under_autocast(operand) for operand in operands):
                return _Linear.apply(*operands, dtype)
        if rule.operands == policy.LOW:  # _Round also rounds the gradients on their way back
            args = [_round_operand(arg, dtype) for arg in args]
            kwargs = {key: _round_operand(value, dtype) for key, value in kwargs.items()}
        result = func(*args, **kwargs)  # the operands are fp32 tensors, so it multiplies and sums in fp32
        return _round_operand(result, dtype) if rule.result == policy.LOW else result


@contextmanager
def autocast(device_type: str, dtype: str, emulated: bool = False, enabled: bool = True) -> Iterator[None]:
    """Runs the forward pass in the block by the table. Call backward() outside: it keeps the forward's precisions.

    device_type: "cpu", "cuda" or "mps". dtype: "fp32", "bf16" or "fp16"; ValueError for another. Blocks nest,
    and enabled=False inside one is plain fp32. Afterwards the state before the block is active, also on an
    exception.
    """
    if dtype not in FORMATS:
        raise ValueError(f"unknown compute dtype {dtype!r}: use one of {', '.join(FORMATS)}")
    low = enabled and dtype != "fp32"
    with policy.computing(dtype if low else "fp32"):
        if low and emulated:
            with torch.autocast(device_type, enabled=False), _Emulation():
                yield
        else:
            with torch.autocast(device_type, dtype=LOW_DTYPES[dtype] if low else None, enabled=low):
                yield


def native_units(device: torch.device, dtype: str) -> tuple[bool, str]:
    """Returns whether the device multiplies this dtype in hardware, and why, as text for the header.

    It asks for capability flags and measures nothing.
    """
    if dtype == "fp32":
        return True, "full precision"
    if device.type == "cuda":
        with torch.cuda.device(device):  # is_bf16_supported asks the current card
            native = dtype == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return native, f"{torch.cuda.get_device_name(device)} has {'' if native else 'no '}{dtype} units"
    if device.type == "mps":
        return True, "left to Metal, not tested"
    machine = platform.machine().lower()
    arm = machine in ("arm64", "aarch64")
    x86 = machine in ("x86_64", "amd64")
    onednn = torch.backends.mkldnn.is_available()
    if dtype == "bf16":
        # oneDNN says that any AVX-512 CPU supports bf16, with units or without. On x86 only these flags tell.
        units = {
            "AVX512_BF16": x86 and torch.cpu._is_avx512_bf16_supported(),
            "AMX": x86 and torch.cpu._is_amx_tile_supported(),
            "Arm BF16": arm and onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        }
    else:
        units = {"AVX512_FP16": x86 and onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported()}
    present_units = [name for name, present in units.items() if present]
    if present_units:
        return True, f"this CPU has {present_units[0]} units"
    return False, f"this CPU has no {dtype} units"
