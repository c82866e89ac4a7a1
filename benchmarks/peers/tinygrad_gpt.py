"""The GPT as a user of tinygrad would write it: Tensor, nn, AdamW, a training step under TinyJit, on the CPU.

tinygrad compiles its kernels with clang: where it has another name, CC=clang-15 says which.
"""

import os

os.environ.setdefault("DEV", "CPU")  # before tinygrad is imported

import numpy as np
from tinygrad import Context, Tensor, TinyJit, dtypes, nn


class Block:
    def __init__(self, channels: int, heads: int):
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def __call__(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln_1(x)).reshape(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).chunk(3)
        y = q[0].scaled_dot_product_attention(k[0], v[0], is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(self.up(self.ln_2(x)).gelu())


class GPT:
    def __init__(self, config):
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = [Block(config.n_embd, config.n_head) for _ in range(config.n_layer)]
        self.ln = nn.LayerNorm(config.n_embd)

    def __call__(self, x, y):
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        logits = self.ln(h.sequential(self.blocks)) @ self.tokens.weight.T
        return logits.sparse_categorical_crossentropy(y)


# Its names -> GPT-2's, to start from the same weights.
NAMES = {
    "qkv": "attn.c_attn", "proj": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj", "tokens": "wte",
    "positions": "wpe", "ln": "ln_f", "blocks": "h",
}  # fmt: skip


def build(config, weights, dtype: str, device: str, compiled: bool):
    """A training step: (x, y) int64 (B, T) -> the loss."""
    assert dtype == "fp32"
    assert device == "cpu"
    gpt = GPT(config)
    for name, parameter in nn.state.get_state_dict(gpt).items():
        theirs = weights[".".join(NAMES.get(part, part) for part in name.split("."))]
        parameter.assign(Tensor(theirs)).realize()
    parameters = nn.state.get_parameters(gpt)
    optimizer = nn.optim.AdamW(parameters, lr=1e-3)

    @TinyJit
    @Context(TRAINING=1)
    def step(x, y):
        optimizer.zero_grad()
        loss = gpt(x, y)
        loss.backward()
        norm = sum((p.grad.square().sum() for p in parameters), Tensor(0.0)).sqrt()
        for p in parameters:
            p.grad = p.grad * (1 / (norm + 1e-6)).minimum(1.0)
        return loss.realize(*optimizer.schedule_step())

    return lambda x, y: step(*(Tensor(a.astype(np.int32), dtype=dtypes.int32).realize() for a in (x, y))).item()
