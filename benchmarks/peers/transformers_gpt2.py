"""transformers' GPT-2 under the same step as the eager peer."""

from dataclasses import asdict

import torch
from torch.nn import functional as F

from benchmarks.peers.eager import stepping
from model.hugging_face import config_of


def build(config, weights, dtype: str, device: str, compiled: bool):
    """A training step: (x, y) int64 (B, T) -> the loss, a tensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt = GPT2LMHeadModel(GPT2Config(**config_of(asdict(config)))).train()
    with torch.no_grad():
        for name, parameter in gpt.transformer.named_parameters():
            weight = torch.from_numpy(weights[name])
            parameter.copy_(
                weight.T if ".c_" in name and name.endswith("weight") else weight
            )  # its Conv1D is (in, out)
    gpt.to(device)

    def loss(x, y):
        logits = gpt(input_ids=x, use_cache=False).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.reshape(-1))

    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    return stepping(torch.compile(loss) if compiled else loss, optimizer, dtype, device)
