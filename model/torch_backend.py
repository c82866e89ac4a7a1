"""The `torch` backend: PyTorch's autograd and AdamW around model/minigpt.py."""

import math
import os
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from amp import policy
from amp.autocast import autocast, native_units, who_rounds
from base.errors import BadInput
from csrc.build import Unavailable
from model.backends import Backend, Hardware, cpu_name, trained
from model.bf16_linear import choose_op
from model.config import GPTConfig, initial_weights, parameters
from model.decode import decoder
from model.minigpt import MiniGPT


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
        return Hardware(device, _device_name(torch_device), dtype, False, why)
    emulated = not native if emulation == "auto" else emulation == "on"
    forced = "" if emulation == "auto" else f" (--emulation {emulation})"
    how = "emulated: operands rounded, products in fp32" if emulated else "torch.autocast"
    return Hardware(device, _device_name(torch_device), dtype, emulated, f"{how}; {why}{forced}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def build(settings, hardware: Hardware, config: GPTConfig) -> Backend:
    """The backend for train.py's settings: initial weights drawn in NumPy, AdamW fused where PyTorch has it."""
    device = torch.device(hardware.device)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    gpt = MiniGPT(config)
    gpt.load_weights(initial_weights(config, settings.seed))
    gpt.to(device)
    try:
        shape = (settings.batch_size * config.block_size, config.n_embd, 4 * config.n_embd)
        op, kernel = choose_op(settings.kernel, device, hardware.dtype, shape)
    except Unavailable as error:
        raise BadInput(f"--kernel {settings.kernel}: {error}") from None
    for block in gpt.h:
        block.mlp.c_proj.op = op
    if hardware.emulated:
        kernel = kernel._replace(how=f"{kernel.how}; rounding by {who_rounds(device)}")
    optimizer = _adamw(gpt, settings, device)
    forward = torch.compile(gpt) if settings.compile else gpt
    enter_autocast = partial(autocast, device.type, hardware.dtype, hardware.emulated)
    gpt.recomputed = int(settings.recompute)
    if hardware.emulated:  # torch enters its own autocast again in backward, of our emulation it does not know
        gpt.recompute = partial(gpt.recompute, context_fn=partial(_emulation_again, device.type))

    def tensors(*arrays):
        return [torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in arrays]  # no host wait

    def loss(x, y, key):
        # One seed a forward, outside anything compiled: the same key drops the same units, on a resume or a second run.
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        return forward(*tensors(x, y)).mean()

    def clip_grad_norm_(max_norm):
        parameters = trained(optimizer)
        if max_norm == math.inf:  # no clipping: measure only, or a norm beyond fp32 would turn gradients into inf / inf
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    @torch.no_grad()
    def evaluating(*arrays):
        if policy.compute_dtype() != "fp32":
            # torch.autocast keeps 16-bit weights for its block; made without gradients they would cut training's off.
            raise RuntimeError("evaluation inside a training autocast block: leave the block first")
        gpt.eval()
        try:
            with enter_autocast():
                return gpt(*tensors(*arrays))
        finally:
            gpt.train()

    def evaluate(x, y):
        return evaluating(x, y).double().cpu().numpy()

    def logits(tokens):
        return evaluating(tokens)[:, -1].cpu().numpy()

    decode = partial(decoder, gpt, hardware.dtype)
    state, load_state = partial(_state, gpt, optimizer), partial(_load_state, gpt, optimizer)
    return Backend(
        loss, optimizer, enter_autocast, clip_grad_norm_, evaluate, logits, decode, state, load_state, kernel
    )


def _emulation_again(device_type: str):
    """For the two runs of a recomputed block: where it stands, and the precision that is active now once more."""
    return nullcontext(), autocast(device_type, policy.compute_dtype(), emulated=True)


def _adamw(gpt: MiniGPT, settings, device: torch.device) -> torch.optim.AdamW:
    named, table = dict(gpt.named_parameters()), parameters(gpt.config)
    groups = [
        {"params": [(p.name, named[p.name]) for p in table if p.decay == decay], "weight_decay": weight_decay}
        for decay, weight_decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=device.type in ("cpu", "cuda"))


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


def _load_state(gpt: MiniGPT, optimizer, arrays: dict[str, dict[str, np.ndarray]]) -> None:
    gpt.load_weights(arrays["model"])
    moments = arrays.get("optimizer")
    if moments is None:  # a model alone, to sample from
        return
    for name, parameter in _named_parameters(optimizer):
        kept = {m: torch.from_numpy(moments[f"{m}.{name}"].copy()) for m in ("exp_avg", "exp_avg_sq")}
        step = torch.tensor(float(moments["step"]), dtype=torch.float32)
        if optimizer.defaults["fused"]:
            step = step.to(parameter.device)
        optimizer.state[parameter] = {"step": step} | {m: t.to(parameter.device) for m, t in kept.items()}
