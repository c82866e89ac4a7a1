"""Decoding, one text at a time, against PyTorch in fp32 and transformers' generate: `python benchmark.py decode`.

All read the same weights and keep keys and values. Each takes the likeliest token. The texts are compared
before they are timed: ours may leave theirs only where two logits are nearer to each other than bf16 weights
can tell.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from base.errors import BadInput
from base.flags import flag, out_of_bounds, read_flags
from benchmarks.gemv import read_bandwidth
from benchmarks.report import ReportSettings, find_table, finish, share_row, speed_rows, time_in_turns
from csrc import build
from model import backends
from model.bf16_linear import bf16_linear
from model.config import GPTConfig, initial_weights, parameter_count
from model.decode import decoder
from run.folder import save
from settings import PRESETS

VOCABULARY = 50257  # of presets whose tokenizer decides it
ROUNDING = 2**-7  # how far rounding the weights to bf16 may move a logit, as a part of the largest one

Logits = Callable[[np.ndarray], np.ndarray]  # int64 (B, T) -> fp32 (B, V), of the last position


@dataclass(frozen=True)
class DecodeSettings(ReportSettings):
    """Flags of `benchmark.py decode`."""

    preset: str = flag("gpt2", "sizes of the model", tuple(PRESETS))
    tokens: int = flag(32, "tokens to draw in a call", at_least=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    blocks: int = flag(5, "blocks of calls, in which the functions take turns", at_least=1)


def main(argv: list[str]) -> None:
    """Checks the texts, then times them. BadInput lists all faults of the command line."""
    values, faults = read_flags(DecodeSettings, argv, "benchmark.py decode", __doc__ or "")
    settings = DecodeSettings(**values)
    faults += out_of_bounds(settings)
    sizes = {name: PRESETS[settings.preset][name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    config = GPTConfig(vocab_size=VOCABULARY, **sizes)
    if settings.tokens >= config.block_size:
        faults.append(f"--tokens {settings.tokens}: must be below the context of {config.block_size}")
    if faults:
        raise BadInput("\n".join(faults))
    hardware = backends.module("torch").hardware(settings.device, "fp32", "auto")
    device = torch.device(hardware.device)
    if settings.readme:
        find_table("decode")
    gpt = model_of(config, device)
    try:
        build.load()
    except build.Unavailable as error:
        raise BadInput(f"the kernels cannot be built here: {error}") from None
    for block in gpt.h:
        block.mlp.c_proj.op = bf16_linear
    ours = {f"ours-{weights}": decoder(gpt, "bf16", weights) for weights in ("bf16", "fp32")}
    in_fp32 = decoder(gpt, "fp32", "fp32")
    functions: dict[str, Callable[[], list[int]]] = {}
    for name, logits in ours.items():
        functions[name] = partial(greedy, logits, settings.tokens)
    functions["fp32"] = partial(greedy, in_fp32, settings.tokens)
    peer = transformers_generate(gpt, config, device, settings.tokens)
    if peer is None:
        print("note    transformers is not installed: left out")
    else:
        functions["transformers"] = peer
    for name in ours:
        check(functions[name](), functions["fp32"](), in_fp32)
    if peer is not None and functions["transformers"]() != functions["fp32"]():
        raise RuntimeError("transformers and our fp32 decoder draw different texts from the same weights")

    print(f"device  {device}: {hardware.device_name}")
    print(f"model   {settings.preset}: {parameter_count(config):,} parameters, {settings.tokens} tokens a call")
    bandwidth = read_bandwidth(device, settings.blocks)
    times = time_in_turns({**functions}, settings.blocks)
    rows = []
    for weights, weight_bytes in (("bf16", 2), ("fp32", 4)):
        case = f"decode/{settings.preset}/{weights}"
        name = f"ours-{weights}"
        pairs = {side: blocks for side, blocks in times.items() if side == name or not side.startswith("ours")}
        rows += speed_rows(case, pairs, name, settings.tokens, "tok/s")
        gigabytes = parameter_count(config) * weight_bytes * settings.tokens / 1e9  # each weight once a token
        rows.append(share_row(case, [gigabytes / block for block in times[name]], bandwidth, "bandwidth", "GB/s"))
    finish("decode", rows, hardware.device_name, settings, more={"read_bandwidth_gb_s": bandwidth})


def model_of(config: GPTConfig, device: torch.device) -> Any:
    """Returns a GPT with initial weights, ready to decode."""
    from model.minigpt import MiniGPT

    gpt = MiniGPT(config)
    gpt.load_weights(initial_weights(config, seed=0))
    return gpt.to(device).eval()


def greedy(logits: Logits, count: int) -> list[int]:
    """Returns token 0 and the `count` likeliest tokens after it."""
    tokens = [0]
    for _ in range(count):
        tokens.append(int(logits(np.array([tokens], dtype=np.int64))[0].argmax()))
    return tokens


def check(ours: list[int], theirs: list[int], logits: Logits) -> None:
    """Compares two texts. RuntimeError where they part and the two tokens' logits differ by more than rounding.

    logits: of the side whose text is `theirs`.
    """
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    scores = logits(np.array([theirs[:at]], dtype=np.int64))[0]
    gap = float(scores[theirs[at]] - scores[ours[at]])
    if gap > ROUNDING * float(np.abs(scores).max()):
        raise RuntimeError(
            f"token {at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.4f} higher: not timed"
        )


def transformers_generate(gpt, config: GPTConfig, device: torch.device, count: int):
    """Returns generate() of transformers' GPT-2 with the same weights, or None where transformers is missing.

    The weights get there through a checkpoint of ours.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    weights = {name: parameter.detach().cpu().numpy() for name, parameter in gpt.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder), 0, {"model": weights, "optimizer": {}}, asdict(config), {}, {})
        model: Any = AutoModelForCausalLM.from_pretrained(saved)
    model.to(device).eval()
    model.generation_config.eos_token_id = None
    start = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = torch.ones_like(start)

    def generate():
        drawn = model.generate(start, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)
        return drawn[0].tolist()

    return generate
