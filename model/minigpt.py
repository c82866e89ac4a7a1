"""The GPT in PyTorch: GPT-2's architecture and names. torch_backend.py trains it and decode.py draws text from it.

B batch · T time · C channels · V vocabulary · L layers · NH heads · HS head size (C / NH)
"""

from collections.abc import Mapping
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
from model.config import GPTConfig, checked_weights


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
    """Causal attention, (B, NH, T, HS). On a CPU, 16-bit operands are multiplied in fp32 and the result is rounded.

    That is what the table asks for and what emulation does. PyTorch's own 16-bit backward pass takes five times as long
    there, a third of a whole step.
    """
    if q.device.type != "cpu" or q.dtype not in LOW_DTYPES.values():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    with torch.autocast("cpu", enabled=False):
        wide = (x.float() for x in (q, k, v))
        return F.scaled_dot_product_attention(*wide, is_causal=True, dropout_p=dropout).to(q.dtype)


class MLP(nn.Module):
    """Two linear layers with GELU between them, for each token alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = BF16Linear(4 * config.n_embd, config.n_embd)  # in bf16 our own kernel computes it

    def forward(self, x):  # (B, T, C)
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """x + attention(LayerNorm(x)), then the same with the MLP."""

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
        # Backward recomputes the inside of so many blocks at a time; 0: all is kept. The last blocks are always kept,
        # since backward begins with them.
        self.recomputed = 0
        self.recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def run_blocks(self, x, start: int, stop: int):  # (B, T, C)
        for layer in range(start, min(stop, len(self.h))):
            x = self.h[layer](x)
        return x

    def forward(self, tokens, targets=None):
        B, T = tokens.shape
        x = self.wte(tokens) + self.wpe.weight[:T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        L = len(self.h)
        size = self.recomputed or L
        for start in range(0, L, size):
            stop = start + size
            again = self.training and stop < L
            x = self.recompute(self.run_blocks, x, start, stop) if again else self.run_blocks(x, start, stop)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # (B, T, V), the head is tied to the embedding
        logits = logits.to(x.dtype)  # out of the low dtype: softmax and cross-entropy are fp32
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(B * T, -1), targets.reshape(B * T), reduction="none").view(B, T).mean(1)

    @classmethod
    def from_weights(
        cls, config: GPTConfig, weights: Mapping[str, np.ndarray], device: str | torch.device = "cpu"
    ) -> "MiniGPT":
        """A model with copies of the weights, in fp32. ValueError names a tensor that does not fit."""
        with torch.device("meta"):  # shapes without memory: PyTorch then draws no weights, which would be overwritten
            gpt = cls(config)
        gpt.to_empty(device=device)
        gpt.load_weights(weights)
        return gpt

    @classmethod
    def from_pretrained(cls, wanted: str | Path) -> "MiniGPT":
        """A GPT-2 from a folder of transformers' or ours, or by a published name ("gpt2"). In evaluation mode, fp32."""
        folder = hugging_face.published(str(wanted)) or Path(wanted)
        weights, sizes = hugging_face.load(folder)
        return cls.from_weights(GPTConfig(**sizes), weights).eval()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Copies arrays into the parameters of the same names. ValueError names a tensor that does not fit."""
        arrays = checked_weights(self.config, weights)
        for name, parameter in self.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
