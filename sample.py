"""Text from a trained model: `python sample.py --checkpoint runs/NAME --prompt "ROMEO:"`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base.errors import BadInput, run_script
from base.flags import flag, name_of, out_of_bounds, read_flags
from data import tokenizers
from data.corpus import read_text
from model import backends, hugging_face
from model.backends import Sampler
from model.config import GPTConfig
from model.generate import generate, start_of_text
from run import checkpoint
from run.folder import find


@dataclass(frozen=True)
class SampleSettings:
    """The flags of sample.py: each field is one, as in settings.py."""

    checkpoint: str = flag(
        "auto", "run folder (its best, then its last), step folder, Hugging Face GPT-2 folder, or gpt2, gpt2-medium, …"
    )
    prompt: str | None = flag(None, "text to go on from; without one a terminal asks for it")
    prompt_file: str | None = flag(None, "UTF-8 file to read the prompt from")
    tokens: int = flag(300, "tokens to draw", at_least=1)
    temperature: float = flag(0.8, "divides the logits; 0 takes the likeliest token each time", at_least=0)
    top_k: int | None = flag(None, "draw from the K likeliest tokens only", at_least=1)
    top_p: float = flag(
        1.0, "draw from the fewest likeliest tokens that together have this probability", above=0, at_most=1
    )
    seed: int = flag(0, "same seed, same text", at_least=0)
    num_samples: int = flag(1, "texts to draw", at_least=1)
    unknown: str = flag("error", "characters of the prompt that the vocabulary lacks", ("error", "skip"))
    backend: str = flag("torch", "what computes the logits", tuple(backends.MODULES))
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag("auto", "compute precision", ("auto", "fp32", "bf16", "fp16"))
    weights: str | None = flag(
        None,
        "how our bf16 kernel holds weights: bf16, rounded once, or fp32, rounded as they are read; default: bf16",
        ("bf16", "fp32"),
    )


def encode_prompt(tokenizer, prompt: str, unknown: str) -> np.ndarray:
    """The tokens of a prompt (n,), n >= 1. A character without a token is BadInput, or is dropped: unknown = "skip"."""
    if unknown == "skip" and tokenizer.kind == "char":
        prompt = "".join(character for character in prompt if character in tokenizer.characters)
    return tokenizer.encode(prompt) if prompt else start_of_text(tokenizer)


def read(argv: list[str] | None) -> SampleSettings:
    """A checked command line. BadInput lists all faults, one a line."""
    values, faults = read_flags(SampleSettings, argv, "sample.py", __doc__ or "")
    s = SampleSettings(**values)
    faults += out_of_bounds(s)
    if s.prompt is not None and s.prompt_file is not None:
        faults.append("--prompt-file: cannot be combined with --prompt")
    if s.temperature == 0:  # nothing is drawn, so these would do nothing
        faults += [
            f"{name_of(name)}: does nothing at --temperature 0" for name in ("top_k", "top_p", "seed") if name in values
        ]
    if s.backend in backends.MODULES:
        faults += backends.refused(s.backend, values).values()
    if faults:
        raise BadInput("\n".join(faults))
    return s


def load(s: SampleSettings) -> tuple[Sampler, tokenizers.Tokenizer, GPTConfig]:
    """The model of --checkpoint, its tokenizer and its sizes. BadInput where one of them does not fit the others."""
    folder = hugging_face.published(s.checkpoint)
    folder = folder or find(s.checkpoint, pointers=("best.json", "latest.json"))
    weights, sizes, description = checkpoint.load_model(folder)
    config = GPTConfig(**sizes)
    tokenizer = tokenizers.load_tokenizer(description or {"kind": "gpt2"})
    ours = (folder / "manifest.json").is_file()
    if ours and checkpoint.read_manifest(folder)["tokenizer_fingerprint"] != tokenizers.fingerprint(tokenizer):
        raise BadInput(f"{folder}: its minigpt_tokenizer.json is not the one that the model was trained with")
    if tokenizer.vocab_size != config.vocab_size:
        raise BadInput(
            f"{folder}: the model has {config.vocab_size} tokens, its {tokenizer.kind} tokenizer {tokenizer.vocab_size}"
        )
    backend = backends.module(s.backend)
    hardware = backend.hardware(s.device, s.dtype, "auto")
    try:
        sampler = backend.sampler(hardware, config, weights, s.weights or "bf16")
    except ValueError as error:
        raise BadInput(f"{folder}: {error}") from None
    if s.weights and sampler.kernel.code.startswith("library"):
        raise BadInput(f"--weights {s.weights}: for our bf16 kernel, which is not in use: {sampler.kernel.how}")
    return sampler, tokenizer, config


def sample(s: SampleSettings) -> None:
    """Prints the prompt and the model's continuation, token by token. Without a prompt, it asks a terminal for some."""
    sampler, tokenizer, config = load(s)
    prompt = read_text(Path(s.prompt_file)) if s.prompt_file is not None else s.prompt
    ask = prompt is None and sys.stdin.isatty()
    while True:
        try:
            text = input("prompt> ") if ask else prompt or ""
        except EOFError:
            return
        tokens = encode_prompt(tokenizer, text, s.unknown)
        if len(tokens) > config.block_size:
            seen = f"the model sees the last {config.block_size} of {len(tokens)} prompt tokens"
            print(f"note: {seen}", file=sys.stderr)
        for number in range(s.num_samples):
            choices = (s.tokens, s.temperature, s.top_k, s.top_p, [s.seed, number])
            drawn = generate(sampler.logits, tokens, config.block_size, *choices)
            print(tokenizers.decode(tokenizer, tokens) if text else "", end="", flush=True)
            for piece in tokenizers.stream(tokenizer, drawn):
                print(piece, end="", flush=True)
            print("\n" if number + 1 < s.num_samples else "")
        if not ask:
            return


def main(argv: list[str] | None = None) -> int:
    return run_script("sample.py", lambda: sample(read(argv)))


if __name__ == "__main__":
    sys.exit(main())
