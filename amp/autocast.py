"""The table of amp/policy.py applied to PyTorch: torch.autocast where the hardware has the units, else emulated.

On a CPU without 16-bit units torch's own bf16 and fp16 matrix products are about a hundred times slower than fp32.
Emulation computes what a tensor core computes, at nearly fp32 speed: it rounds the operands to the low dtype,
multiplies and accumulates in fp32, and rounds the result; gradients likewise. All values live in fp32 tensors.
"""

import platform
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

# torch's functions by name -> their row of policy.TABLE. x @ y arrives as "matmul".
PRODUCTS = {"linear": "linear", "scaled_dot_product_attention": "attention"} | dict.fromkeys(
    ("matmul", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm"), "matmul"
)
# Products whose inner roundings the emulation does not know. Running them in fp32 would silently break the table, so
# they raise. It is a list of names: a function of a later PyTorch, or torch.ops.aten called by hand, is not on it.
UNKNOWN_PRODUCTS = frozenset("""
    einsum tensordot inner vdot vecdot bilinear chain_matmul multi_dot cdist matrix_power matrix_exp cov corrcoef
    kron outer conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution grouped_mm
    _grouped_mm multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell addmm_ addmv_ addbmm_ baddbmm_ addr addr_ ger _addmm_activation _scaled_mm linear_cross_entropy
    _sparse_mm _sparse_addmm smm hspmm sspaddmm sspaddmm_ _scaled_dot_product_attention_math
""".split())  # fmt: skip  # noqa: SIM905


class _Round(torch.autograd.Function):
    """Rounds to a low dtype, nearest even, and rounds the gradient on its way back; the fp32 storage stays."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad, ctx.dtype), None


class _Linear(torch.autograd.Function):
    """The table's row "linear" as it stands: y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, db = Σ dy, each rounded once.

    The same as _Round around each operand and the result, but what is new is rounded where it lies.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.dtype, ctx.has_bias = dtype, bias is not None
        x, weight = rounded(x.float(), dtype), rounded(weight.float(), dtype)
        bias = rounded(bias.float(), dtype) if ctx.has_bias else None
        ctx.save_for_backward(x, weight)
        return round_(F.linear(x, weight, bias), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), dtype = ctx.saved_tensors, ctx.dtype
        dx = dw = db = None
        dy = rounded(dy, dtype)
        rows = dy.reshape(-1, dy.shape[-1])  # (N, out)
        if ctx.needs_input_grad[0]:
            dx = round_(dy @ weight, dtype)
        if ctx.needs_input_grad[1]:
            dw = round_(rows.T @ x.reshape(-1, x.shape[-1]), dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = round_(rows.sum(0), dtype)
        return dx, dw, db, None


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 tensor -> the nearest values of the low dtype, in fp32 storage; one pass where csrc/ is built."""
    kernels = _kernels() if x.device.type == "cpu" else None
    return kernels.rounded(x, dtype == torch.float16) if kernels else x.to(dtype).float()


def round_(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in the memory of x, which must be new: seen by nobody else."""
    kernels = _kernels() if x.device.type == "cpu" else None
    return kernels.round_(x, dtype == torch.float16) if kernels else x.copy_(x.to(dtype))


@cache
def _kernels():
    try:
        return build.load()
    except build.Unavailable:
        return None


def who_rounds(device: torch.device) -> str:
    """For the header, and before the first step: loads the loops that round on a CPU, which may build them."""
    return "csrc/bf16_linear_cpu.cpp" if device.type == "cpu" and _kernels() else "PyTorch's casts"


def _operand(value, dtype: torch.dtype):
    """Rounds a floating-point tensor. fp64 and what is no such tensor pass, as under torch.autocast."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return _Round.apply(value.float(), dtype)
    return value


def _operands_below_fp64(input, weight, bias=None):
    """Those of F.linear, where none is fp64 (which passes unrounded, as under torch.autocast)."""
    operands = (input, weight, bias)
    return (
        operands if all(x is None or (x.is_floating_point() and x.dtype != torch.float64) for x in operands) else None
    )


class _Emulation(TorchFunctionMode):
    """Intercepts matrix products; every other function runs as it is, on fp32 tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        dtype = LOW_DTYPES.get(policy.compute_dtype())  # None in a nested block with enabled=False
        if dtype is None or (name not in PRODUCTS and name not in UNKNOWN_PRODUCTS):
            return func(*args, **kwargs)
        out = " with out=" if kwargs.get("out") is not None else ""
        if name in UNKNOWN_PRODUCTS or out:
            raise NotImplementedError(
                f"emulated {policy.compute_dtype()} does not know the matrix product torch.{name}{out}: "
                "use linear, matmul or scaled_dot_product_attention"
            )
        rule = policy.TABLE[PRODUCTS[name]]
        if name == "linear" and rule == policy.PRODUCT and (operands := _operands_below_fp64(*args, **kwargs)):
            return _Linear.apply(*operands, dtype)
        if rule.operands == policy.LOW:  # _Round also rounds the gradients on their way back
            args = [_operand(arg, dtype) for arg in args]
            kwargs = {key: _operand(value, dtype) for key, value in kwargs.items()}
        result = func(*args, **kwargs)  # fp32 operands: products and sums in fp32
        return _operand(result, dtype) if rule.result == policy.LOW else result


@contextmanager
def autocast(device_type: str, dtype: str, emulated: bool = False, enabled: bool = True):
    """Runs the block's forward pass by the table. Leave it before backward(), which repeats the forward's precisions.

    device_type: "cpu", "cuda", "mps". dtype: "fp32", "bf16", "fp16". Blocks nest; enabled=False inside one is
    plain fp32. Whatever was active before is restored, also after an exception.
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
    """(whether the device multiplies in this dtype in hardware, why), by capability flags, not timing."""
    if dtype == "fp32":
        return True, "full precision"
    if device.type == "cuda":
        with torch.cuda.device(device):  # is_bf16_supported looks at the current card
            native = dtype == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return native, f"{torch.cuda.get_device_name(device)} has {'' if native else 'no '}{dtype} units"
    if device.type == "mps":
        return True, "left to Metal, not tested"
    machine, onednn = platform.machine().lower(), torch.backends.mkldnn.is_available()
    arm, x86 = machine in ("arm64", "aarch64"), machine in ("x86_64", "amd64")
    if dtype == "bf16":
        # oneDNN calls bf16 supported on any AVX-512 CPU, units or not; on x86 only these flags tell.
        units = {
            "AVX512_BF16": x86 and torch.cpu._is_avx512_bf16_supported(),
            "AMX": x86 and torch.cpu._is_amx_tile_supported(),
            "Arm BF16": arm and onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        }
    else:
        units = {"AVX512_FP16": x86 and onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported()}
    found = [name for name, present in units.items() if present]
    return bool(found), f"this CPU has {found[0]} units" if found else f"this CPU has no {dtype} units"
