"""The GPT in PyTorch: GPT-2's architecture and names. The backend around it: torch_backend.py.

B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from amp.autocast import LOW_DTYPES
from model import hugging_face
from model.bf16_linear import BF16Linear
from model.config import GPTConfig


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
        # Of so many blocks at a time backward recomputes the inside. 0: it is kept, and of the last ones it always is,
        # since backward begins with them.
        self.recomputed = 0
        self.recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def blocks(self, x, start: int, stop: int):  # (B, T, C)
        for layer in range(start, min(stop, len(self.h))):
            x = self.h[layer](x)
        return x

    def forward(self, tokens, targets=None):
        B, T = tokens.shape
        x = self.wte(tokens) + self.wpe.weight[:T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        L, size = len(self.h), self.recomputed or len(self.h)
        for start in range(0, L, size):
            again = self.training and start + size < L
            x = self.recompute(self.blocks, x, start, start + size) if again else self.blocks(x, start, start + size)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # (B, T, V), the head is tied to the embedding
        logits = logits.to(x.dtype)  # out of the low dtype: softmax and cross-entropy are fp32
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(B * T, -1), targets.reshape(B * T), reduction="none").view(B, T).mean(1)

    @classmethod
    def from_pretrained(cls, wanted: str | Path) -> "MiniGPT":
        """A GPT-2 folder of transformers' or ours, or a published one's name ("gpt2"). In evaluation mode, fp32."""
        folder = hugging_face.published(str(wanted)) or Path(wanted)
        weights, sizes = hugging_face.load(folder)
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
