"""The GPT as a user of PyTorch would write it: nn.Linear, SDPA, torch.autocast, GradScaler, AdamW's defaults."""

import torch
from torch import nn
from torch.nn import functional as F

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gelu, self.drop = nn.GELU(approximate="tanh"), nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(C, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.drop(self.down(self.gelu(self.up(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config.n_embd, config.n_head, config.dropout) for _ in range(config.n_layer))
        self.ln = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y, reduction="mean"):
        h = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1), reduction=reduction)


# Its names -> GPT-2's, to start from the same weights.
NAMES = {
    "qkv": "attn.c_attn", "proj": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj", "tokens": "wte",
    "positions": "wpe", "ln": "ln_f", "blocks": "h",
}  # fmt: skip


def model_of(config, weights, device: str) -> GPT:
    gpt = GPT(config)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(torch.from_numpy(weights[".".join(NAMES.get(part, part) for part in name.split("."))]))
    return gpt.to(device)


def build(config, weights, dtype: str, device: str, compiled: bool):
    """A training step: (x, y) int64 (B, T) -> the loss, a tensor."""
    gpt = model_of(config, weights, device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    return stepping(torch.compile(gpt) if compiled else gpt, optimizer, dtype, device)


def stepping(model, optimizer, dtype: str, device: str):
    """What the documentation of torch.amp shows: model(x, y) -> loss, and all of a step."""
    kind = device.split(":")[0]
    scaler = torch.amp.GradScaler(kind, enabled=dtype == "fp16")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step(x, y):
        x, y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
        with torch.autocast(kind, dtype=LOW.get(dtype), enabled=dtype != "fp32"):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
