"""The `torch` backend: PyTorch's autograd and AdamW around model/minigpt.py.

The two gradients of the tied embedding meet in autograd: wte.weight is a leaf of the lookup and of the head's product,
and both add into its one `.grad`. Autocast has rounded the head's by then, and not the lookup's.
"""

import math
import os
from contextlib import nullcontext
from functools import partial
from typing import cast

import numpy as np
import torch

from amp import policy
from amp.autocast import autocast, native_units, who_rounds
from base.dtypes import Dtype
from base.errors import BadInput
from csrc.build import Unavailable
from model.backends import Backend, Hardware, Kernel, Sampler, cpu_name, trained
from model.bf16_linear import BF16Linear, choose_op
from model.config import GPTConfig, optimizer_groups
from model.decode import decoder
from model.minigpt import MiniGPT
from settings import Settings


def hardware(device: str, dtype: str, emulation: str) -> Hardware:
    """Resolves "auto" and checks that the device is here. BadInput where it is not."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise BadInput(f"--device {device}: unknown device, use auto, cpu, cuda, cuda:N or mps") from None
    kind = torch_device.type
    if kind not in ("cpu", "cuda", "mps") or (kind != "cuda" and torch_device.index is not None):
        raise BadInput(f"--device {device}: unknown device, use auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no usable GPU"
        raise BadInput(f"--device {device}: {why}: use --device cpu or install a CUDA build of PyTorch")
    if kind == "cuda" and (torch_device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise BadInput(f"--device {device}: Metal is not available here: use --device cpu")
    if dtype == "auto":
        dtype = "bf16" if kind != "cuda" or native_units(torch_device, "bf16")[0] else "fp16"
    native, why = native_units(torch_device, dtype)
    if dtype == "fp32":
        return Hardware(device, _device_name(torch_device), "fp32", False, why)
    emulated = not native if emulation == "auto" else emulation == "on"
    forced = "" if emulation == "auto" else f" (--emulation {emulation})"
    how = "emulated: operands rounded, products in fp32" if emulated else "torch.autocast"
    return Hardware(device, _device_name(torch_device), cast(Dtype, dtype), emulated, f"{how}; {why}{forced}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def build(settings: Settings, hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray]) -> Backend:
    """The backend that trains, from copies of `weights`. ValueError names a tensor that does not fit."""
    device = torch.device(hardware.device)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    gpt = MiniGPT.from_weights(config, weights, device)
    kernel = _choose_kernel(gpt, settings.kernel, hardware, settings.batch_size * config.block_size)
    groups = optimizer_groups(config, dict(gpt.named_parameters()), settings.weight_decay)
    betas, fused = (settings.beta1, settings.beta2), device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=fused)
    forward = torch.compile(gpt) if settings.compile else gpt
    enter_autocast = partial(autocast, device.type, hardware.dtype, hardware.emulated)
    gpt.recomputed = int(settings.recompute)
    if hardware.emulated:  # in backward torch enters its own autocast again; it does not know of our emulation
        gpt.recompute = partial(gpt.recompute, context_fn=partial(_emulation_again, device.type))

    def tensors(*arrays):
        return [torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in arrays]  # no host wait

    def loss(x, y, key):
        # The key seeds each forward pass, so that the same key drops the same units; outside anything compiled.
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        return forward(*tensors(x, y)).mean()

    parameters = trained(optimizer)

    def clip_grad_norm_(max_norm):
        if max_norm == math.inf:  # only measured: with a norm beyond fp32's range, inf / inf would make gradients NaN
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    @torch.no_grad()
    def evaluate(x, y):
        if policy.compute_dtype() != "fp32":
            # torch.autocast keeps 16-bit copies of weights until its block ends. Copies made here, without gradients,
            # would be used by training's forward pass and cut its gradients off.
            raise RuntimeError("evaluation inside a training autocast block: leave the block first")
        gpt.eval()
        try:
            with enter_autocast():
                return gpt(*tensors(x, y)).double().cpu().numpy()
        finally:
            gpt.train()

    return Backend(
        model=loss,
        optimizer=optimizer,
        autocast=enter_autocast,
        clip_grad_norm_=clip_grad_norm_,
        evaluate=evaluate,
        decoder=partial(decoder, gpt, hardware.dtype),
        state=partial(_state, gpt, optimizer),
        load_optimizer=partial(_load_optimizer, optimizer),
        kernel=kernel,
    )


def sampler(hardware: Hardware, config: GPTConfig, weights: dict[str, np.ndarray], held: str) -> Sampler:
    """The model to draw text from: with a KV cache, and in bf16 with our kernel, which holds the weights as `held`."""
    gpt = MiniGPT.from_weights(config, weights, hardware.device).eval()
    kernel = _choose_kernel(gpt, "auto", hardware, tokens=config.block_size)  # a prompt that fills the context
    return Sampler(decoder(gpt, hardware.dtype, held), kernel)


def _choose_kernel(gpt: MiniGPT, kernel: str, hardware: Hardware, tokens: int) -> Kernel:
    """Sets the op of every mlp.c_proj, by --kernel and for products of so many tokens. Returns who computes it."""
    device, C = torch.device(hardware.device), gpt.config.n_embd
    try:
        op, chosen = choose_op(kernel, device, hardware.dtype, (tokens, C, 4 * C))
    except Unavailable as error:
        raise BadInput(f"--kernel {kernel}: {error}") from None
    for layer in gpt.modules():
        if isinstance(layer, BF16Linear):
            layer.op = op
    return chosen._replace(how=f"{chosen.how}; rounding by {who_rounds(device)}") if hardware.emulated else chosen


def _emulation_again(device_type: str):
    """Two contexts, for a block's forward pass and for its second run in backward: the precision that is active now.

    The forward pass stands in that context already. torch.utils.checkpoint asks for both when it begins.
    """
    return nullcontext(), autocast(device_type, policy.compute_dtype(), emulated=True)


def _named_parameters(optimizer):
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _state(gpt: MiniGPT, optimizer) -> dict[str, dict[str, np.ndarray]]:
    """Copies of weights and moments, as NumPy arrays. Before the first step the moments are zero."""

    def array(tensor):
        return tensor.detach().float().cpu().numpy().copy()

    moments, step = {}, 0
    for name, parameter in _named_parameters(optimizer):
        kept = optimizer.state.get(parameter, {})
        step = int(kept.get("step", 0))
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[f"{moment}.{name}"] = array(kept.get(moment, torch.zeros_like(parameter)))
    weights = {name: array(parameter) for name, parameter in gpt.named_parameters()}
    return {"model": weights, "optimizer": moments | {"step": np.array(step, dtype=np.int64)}}


def _load_optimizer(optimizer, moments: dict[str, np.ndarray]) -> None:
    """Copies the "optimizer" of a state into AdamW. Its fused version keeps the number of steps on the device."""
    for name, parameter in _named_parameters(optimizer):
        step_device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
        kept = {"step": torch.tensor(float(moments["step"]), dtype=torch.float32, device=step_device)}
        for moment in ("exp_avg", "exp_avg_sq"):
            kept[moment] = torch.from_numpy(moments[f"{moment}.{name}"].copy()).to(parameter.device)
        optimizer.state[parameter] = kept
