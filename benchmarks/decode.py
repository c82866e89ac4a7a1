"""Decoding, one text at a time: `python benchmark.py decode`. Ours against PyTorch in fp32 and transformers' generate.

All read the same weights and keep keys and values. The likeliest token is taken each time, and before anything is timed
the texts are compared: ours may leave theirs only where two logits are nearer than bf16 weights can tell.
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from base.errors import BadInput
from base.flags import flag, read_flags
from benchmarks.gemv import read_bandwidth
from benchmarks.report import around, finish, seconds, share, speeds
from csrc import build
from model import backends
from model.bf16_linear import bf16_linear
from model.config import GPTConfig, initial_weights, parameter_count
from model.decode import decoder
from run.folder import save
from settings import PRESETS

VOCABULARY = 50257  # of presets whose tokenizer decides it
ROUNDING = 2**-7  # of the largest logit: what rounding the weights to bf16 may move one


@dataclass(frozen=True)
class DecodeSettings:
    """Flags of `benchmark.py decode`."""

    preset: str = flag("gpt2", "sizes of the model", tuple(PRESETS))
    tokens: int = flag(32, "tokens to draw in a call")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    blocks: int = flag(5, "blocks of calls, in which the functions take turns")
    readme: bool = flag(False, "write the table into README.md")


def main(argv: list[str]) -> None:
    values, faults = read_flags(DecodeSettings, argv, "benchmark.py decode", __doc__)
    s = DecodeSettings(**values)
    faults += [f"--{n} {getattr(s, n)}: must be at least 1" for n in ("tokens", "blocks") if getattr(s, n) < 1]
    if faults:
        raise BadInput("\n".join(faults))
    hardware = backends.module("torch").hardware(s.device, "fp32", "auto")
    device = torch.device(hardware.device)
    sizes = {name: PRESETS[s.preset][name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    config = GPTConfig(vocab_size=VOCABULARY, **sizes)
    if s.tokens >= config.block_size:
        raise BadInput(f"--tokens {s.tokens}: must be below the context of {config.block_size}")
    if s.readme:
        around("decode")
    gpt = model_of(config, device)
    try:
        build.load()
    except build.Unavailable as error:
        raise BadInput(f"the kernels cannot be built here: {error}") from None
    for block in gpt.h:
        block.mlp.c_proj.op = bf16_linear
    ours = {f"ours-{weights}": decoder(gpt, "bf16", weights) for weights in ("bf16", "fp32")}
    plain = decoder(gpt, "fp32", "fp32")
    functions = {name: lambda logits=logits: greedy(logits, s.tokens) for name, logits in ours.items()}
    functions["fp32"] = lambda: greedy(plain, s.tokens)
    peer = transformers_generate(gpt, config, device, s.tokens)
    if peer is None:
        print("note    transformers is not installed: left out")
    else:
        functions["transformers"] = peer
    for name in ours:
        check(functions[name](), functions["fp32"](), plain)
    if peer is not None and functions["transformers"]() != functions["fp32"]():
        raise RuntimeError("transformers and our fp32 decoder draw different texts from the same weights")

    print(f"device  {device}: {hardware.device_name}")
    print(f"model   {s.preset}: {parameter_count(config):,} parameters, {s.tokens} tokens a call")
    bandwidth = read_bandwidth(device, s.blocks)
    times = seconds(functions, s.blocks)
    rows = []
    for weights, size in (("bf16", 2), ("fp32", 4)):
        case, own = f"decode/{s.preset}/{weights}", f"ours-{weights}"
        against = {name: block for name, block in times.items() if name == own or not name.startswith("ours")}
        rows += speeds(case, against, own, s.tokens, "tok/s")
        read = parameter_count(config) * size * s.tokens / 1e9  # every weight once a token; wte is the head
        rows.append(share(case, [read / block for block in times[own]], bandwidth, "bandwidth", "GB/s"))
    finish("decode", rows, hardware.device_name, s.readme, {"read_bandwidth_gb_s": bandwidth})


def model_of(config: GPTConfig, device):
    from model.minigpt import MiniGPT

    gpt = MiniGPT(config)
    gpt.load_weights(initial_weights(config, seed=0))
    return gpt.to(device).eval()


def greedy(logits, count: int) -> list[int]:
    tokens = [0]
    for _ in range(count):
        tokens.append(int(logits(np.array([tokens], dtype=np.int64))[0].argmax()))
    return tokens


def check(ours: list[int], theirs: list[int], logits) -> None:
    """Where the texts part, the two tokens' logits must be nearer than the rounding of the weights."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    row = logits(np.array([theirs[:at]], dtype=np.int64))[0]
    gap = float(row[theirs[at]] - row[ours[at]])
    if gap > ROUNDING * float(np.abs(row).max()):
        raise RuntimeError(
            f"token {at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.4f} higher: not timed"
        )


def transformers_generate(gpt, config: GPTConfig, device, count: int):
    """The same weights in transformers' GPT-2, through a checkpoint of ours; None where transformers is missing."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    weights = {name: parameter.detach().cpu().numpy() for name, parameter in gpt.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder), 0, {"model": weights, "optimizer": {}}, asdict(config), {}, {})
        model = AutoModelForCausalLM.from_pretrained(saved).to(device).eval()
    model.generation_config.eos_token_id = None
    start = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = torch.ones_like(start)

    def generate():
        drawn = model.generate(start, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)
        return drawn[0].tolist()

    return generate
