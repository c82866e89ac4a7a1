"""Text to token ids and back.

A tokenizer has `kind`, `vocab_size`, `encode(text) -> int32 (n,)`, `token_bytes(id) -> bytes` (of UTF-8, not always a
whole character) and `describe() -> dict`, the JSON that a checkpoint keeps as minigpt_tokenizer.json; `load` builds it
again. `fingerprint` names a vocabulary, so that a checkpoint is never read with another one.
"""

import codecs
import hashlib
import json
import os
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex
import tiktoken

from base.errors import BadInput

# GPT-2's split into words (Radford et al. 2019): contractions; letters, digits or signs with the space before them.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = ("vocab.bpe", "encoder.json")
NETWORK_SECONDS = 5


class CharTokenizer:
    """One token per distinct character, in code point order."""

    kind = "char"

    def __init__(self, characters: str):
        self.characters, self.vocab_size = characters, len(characters)
        self.code_points = np.array([ord(c) for c in characters], dtype=np.uint32)
        if not characters or np.any(np.diff(self.code_points.astype(np.int64)) <= 0):
            raise BadInput("char tokenizer: the vocabulary must be distinct characters in code point order")

    def encode(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self.code_points, code_points).clip(max=self.vocab_size - 1)
        unknown = np.flatnonzero(self.code_points[ids] != code_points)
        if unknown.size:
            at = int(unknown[0])
            raise BadInput(
                f"character {text[at]!r} at position {at} is not in the vocabulary of {self.vocab_size} characters"
            )
        return ids.astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8", "surrogatepass")

    def describe(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class ByteTokenizer:
    """One token per byte of UTF-8: knows every text, at one to four tokens a character."""

    kind, vocab_size = "byte", 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def describe(self) -> dict:
        return {"kind": self.kind}


class BPETokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) on bytes, with GPT-2's split into words; encoded by tiktoken.

    tokens: the byte strings in the order of their ranks; a rank is a token id. The 256 single bytes come first.
    """

    kind = "bpe"

    def __init__(self, tokens: list[str], pattern: str = WORDS):
        ranks = {bytes.fromhex(token): rank for rank, token in enumerate(tokens)}
        # tiktoken panics, past any except clause, on a byte that it has no rank for.
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing or len(ranks) != len(tokens):
            what = f"byte 0x{missing[0]:02x} has no token" if missing else "a token stands twice"
            raise BadInput(f"bpe tokenizer: {what}: the vocabulary is damaged")
        self.tokens, self.pattern, self.vocab_size = tokens, pattern, len(tokens)
        self.encoding = tiktoken.Encoding("minigpt", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes.fromhex(self.tokens[token])

    def describe(self) -> dict:
        return {"kind": self.kind, "tokens": self.tokens, "pattern": self.pattern}

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPETokenizer":
        """Merges the most frequent pair of neighbouring tokens, over and over; of equally frequent ones the first seen.

        Each distinct word is kept once, with its count, and a merge touches only the words that hold the pair. A text
        that runs out of pairs gives a smaller vocabulary.
        """
        counts = Counter(regex.findall(WORDS, text))  # in order of first appearance, as every dict
        words = [[bytes([byte]) for byte in _utf8(word)] for word in counts]
        times = list(counts.values())
        pair_counts: Counter = Counter()
        holders: dict[tuple[bytes, bytes], set[int]] = defaultdict(set)  # pair -> words that hold it

        def add(at: int, sign: int) -> None:
            for pair in pairwise(words[at]):
                pair_counts[pair] += sign * times[at]
                holders[pair].add(at) if sign > 0 else holders[pair].discard(at)
                if not pair_counts[pair]:
                    del pair_counts[pair]

        def first_seen(pair: tuple[bytes, bytes]) -> tuple[int, int]:
            at = min(holders[pair])
            return at, list(pairwise(words[at])).index(pair)

        for at in range(len(words)):
            add(at, +1)
        tokens = {bytes([byte]): None for byte in range(256)}  # a dict for its order
        while len(tokens) < vocab_size and pair_counts:
            most = max(pair_counts.values())
            ties = [pair for pair, count in pair_counts.items() if count == most]
            left, right = min(ties, key=first_seen) if len(ties) > 1 else ties[0]
            tokens[left + right] = None
            for at in list(holders[left, right]):
                add(at, -1)
                words[at] = _merged(words[at], left, right)
                add(at, +1)
        return cls([token.hex() for token in tokens])


def _merged(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    """The word with each pair (left, right), from the left, made one token."""
    merged, at = [], 0
    while at < len(word):
        if word[at] == left and word[at + 1 : at + 2] == [right]:
            merged.append(left + right)
            at += 2
        else:
            merged.append(word[at])
            at += 1
    return merged


class GPT2Tokenizer:
    """GPT-2's published vocabulary of 50,257 tokens, from tiktoken, which downloads two files once and keeps them."""

    kind, vocab_size = "gpt2", 50257

    def __init__(self):
        self.encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)

    def describe(self) -> dict:
        return {"kind": self.kind}


def _gpt2_encoding() -> tiktoken.Encoding:
    """BadInput within seconds where the files are neither in tiktoken's cache nor to be had from the network."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(cache or Path(tempfile.gettempdir()) / "data-gym-cache")
    names = {name: hashlib.sha1((GPT2_URL + name).encode()).hexdigest() for name in GPT2_FILES}
    if not all((folder / key).is_file() for key in names.values()):
        try:  # tiktoken's own download has no time-out
            urllib.request.urlopen(GPT2_URL + GPT2_FILES[0], timeout=NETWORK_SECONDS).close()
        except OSError as error:
            files = ", ".join(f"{name} as {key}" for name, key in names.items())
            raise BadInput(
                f"--tokenizer gpt2: no network ({getattr(error, 'reason', error)}) and no files in tiktoken's cache: "
                f"put GPT-2's {files} into {folder}, or set TIKTOKEN_CACHE_DIR to a folder that has them"
            ) from None
    return tiktoken.get_encoding("gpt2")


def decode(tokenizer, ids: Iterable[int]) -> str:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
    return "".join(stream(tokenizer, ids))


def stream(tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yields text as tokens come; the bytes of an unfinished character wait for the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        if text := decoder.decode(tokenizer.token_bytes(int(token))):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def fingerprint(tokenizer) -> str:
    """sha256 of the canonical JSON of `describe()`, 64 hex digits."""
    return hashlib.sha256(json.dumps(tokenizer.describe(), sort_keys=True).encode()).hexdigest()


def train(kind: str, text: str, vocab_size: int | None = None):
    """The tokenizer `kind` for a corpus; `vocab_size` only for bpe."""
    if kind == "char":
        return CharTokenizer("".join(sorted(set(text))))
    if kind == "bpe":
        return BPETokenizer.train(text, vocab_size)
    return TOKENIZERS[kind]()


def load(description: dict):
    """The inverse of `describe()`. BadInput where the kind is unknown or entries are missing or damaged."""
    kind = description.get("kind") if isinstance(description, dict) else None
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise BadInput(f"unknown tokenizer kind {kind!r}: this version knows {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind](**{key: value for key, value in description.items() if key != "kind"})
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, BadInput) else BadInput(f"{kind} tokenizer: damaged ({error})") from None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(f"character {text[error.start]!r} at position {error.start} is half a character") from None


TOKENIZERS = {t.kind: t for t in (CharTokenizer, ByteTokenizer, BPETokenizer, GPT2Tokenizer)}
