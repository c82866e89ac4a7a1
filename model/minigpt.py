"""The GPT in PyTorch: GPT-2's architecture and names, and the `torch` backend around it.

B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp import policy
from amp.autocast import LOW_DTYPES, autocast, native_units, who_rounds
from csrc.build import Unavailable
from model.backend import Backend, Hardware, cpu_name
from model.bf16_linear import BF16Linear, choose
from model.config import GPTConfig, initial_weights, parameters
from model.decode import decoder
from run import checkpoint, hugging_face
from run.errors import BadInput


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, NH, T, HS) each
        out = attention(q, k, v, self.dropout if self.training else 0.0)  # (B, NH, T, HS)
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


def attention(q, k, v, dropout):  # (B, NH, T, HS) each
    """Causal attention. On a CPU 16-bit operands are multiplied in fp32, as the table asks and emulation does it:

    PyTorch's own 16-bit backward takes five times as long there, a third of a whole step.
    """
    if q.device.type != "cpu" or q.dtype not in LOW_DTYPES.values():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    with torch.autocast("cpu", enabled=False):
        wide = (x.float() for x in (q, k, v))
        return F.scaled_dot_product_attention(*wide, is_causal=True, dropout_p=dropout).to(q.dtype)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = BF16Linear(4 * config.n_embd, config.n_embd)  # in bf16 our own kernel computes it

    def forward(self, x):  # (B, T, C)
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x):  # (B, T, C), the residual stream, fp32 throughout
        x = x + F.dropout(self.attn(self.ln_1(x)), self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)
        return x


class MiniGPT(nn.Module):
    """tokens (B, T) -> logits (B, T, V); with targets (B, T) -> mean loss of each row (B,), in nats."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, tokens, targets=None):
        B, T = tokens.shape
        x = self.wte(tokens) + self.wpe.weight[:T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # (B, T, V), the head is tied to the embedding
        logits = logits.to(x.dtype)  # out of the low dtype: softmax and cross-entropy are fp32
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(B * T, -1), targets.reshape(B * T), reduction="none").view(B, T).mean(1)

    @classmethod
    def from_pretrained(cls, wanted: str | Path) -> "MiniGPT":
        """A GPT-2 folder of transformers' or ours, or a published one's name ("gpt2"). In evaluation mode, fp32."""
        folder = hugging_face.published(str(wanted)) or Path(wanted)
        weights, sizes, _ = checkpoint.load_model(folder)
        gpt = cls(GPTConfig(**sizes)).eval()
        gpt.load_weights({name: w.astype(np.float32, copy=False) for name, w in weights.items()})
        return gpt

    @torch.no_grad()
    def load_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Copies arrays into the parameters of the same names. ValueError where names or shapes differ."""
        own = dict(self.named_parameters())
        if missing := sorted(own.keys() ^ weights.keys()):
            raise ValueError(f"the weights do not fit this model: {missing[0]} is missing on one side")
        for name, parameter in own.items():
            if parameter.shape != weights[name].shape:
                raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {weights[name].shape}")
            parameter.copy_(torch.from_numpy(weights[name]))


# ---- the `torch` backend


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
        op, kernel = choose(settings.kernel, device, hardware.dtype, shape)
    except Unavailable as error:
        raise BadInput(f"--kernel {settings.kernel}: {error}") from None
    for block in gpt.h:
        block.mlp.c_proj.op = op
    if hardware.emulated:
        kernel = kernel._replace(how=f"{kernel.how}; rounding by {who_rounds(device)}")
    optimizer = _adamw(gpt, settings, device)
    forward = torch.compile(gpt) if settings.compile else gpt
    enter_autocast = partial(autocast, device.type, hardware.dtype, hardware.emulated)

    def tensors(*arrays):
        return [torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in arrays]  # no host wait

    def loss(x, y, key):
        # One seed a forward, outside anything compiled: the same key drops the same units, on a resume or a second run.
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        return forward(*tensors(x, y)).mean()

    def clip_grad_norm_(parameters, max_norm):
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
