"""Text to token ids and back: characters, bytes, byte pairs trained here, and GPT-2's published vocabulary."""

import codecs
import hashlib
import json
import os
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import regex
import tiktoken

from base.errors import BadInput

# GPT-2's split into words (Radford et al. 2019): contractions; letters, digits or signs with the space before them.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = ("vocab.bpe", "encoder.json")
NETWORK_SECONDS = 5


class Tokenizer(Protocol):
    """A tokenizer can do this. A checkpoint keeps its description, and `load_tokenizer` builds it again from that."""

    kind: str
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 (n,). BadInput where a character has none."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of one token, which are not always a whole character."""
        ...

    def describe(self) -> dict:
        """Returns the tokenizer as JSON, for minigpt_tokenizer.json in a checkpoint."""
        ...


class CharTokenizer:
    """One token per distinct character, in code point order."""

    kind = "char"

    def __init__(self, characters: str):
        self.characters = characters
        self.vocab_size = len(characters)
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
    """One token per byte of UTF-8. It knows every text, and takes one to four tokens for a character."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def describe(self) -> dict:
        return {"kind": self.kind}


class BPETokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) on bytes, with GPT-2's split into words. tiktoken does the encoding.

    tokens: the tokens' bytes as hex digits. A token's place is its rank and its id; the 256 single bytes come first.
    """

    kind = "bpe"

    def __init__(self, tokens: list[str], pattern: str = WORDS):
        ranks = {bytes.fromhex(token): rank for rank, token in enumerate(tokens)}
        # tiktoken panics, past any except clause, on a byte that it has no rank for.
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing or len(ranks) != len(tokens):
            fault = f"byte 0x{missing[0]:02x} has no token" if missing else "a token stands twice"
            raise BadInput(f"bpe tokenizer: {fault}: the vocabulary is damaged")
        self.tokens = tokens
        self.pattern = pattern
        self.vocab_size = len(tokens)
        self.encoding = tiktoken.Encoding("minigpt", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> np.ndarray:
        return _encode(self.encoding, text)

    def token_bytes(self, token: int) -> bytes:
        return bytes.fromhex(self.tokens[token])

    def describe(self) -> dict:
        return {"kind": self.kind, "tokens": self.tokens, "pattern": self.pattern}

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPETokenizer":
        """Returns a tokenizer whose tokens are merges of the text's most frequent pairs of neighbouring tokens.

        Of equally frequent pairs, the one that the text has first is merged. Each distinct word is kept once, with its
        count, and a merge touches only the words that hold the pair. A text without enough pairs gives a smaller
        vocabulary.
        """
        word_counts = Counter(regex.findall(WORDS, text))  # in order of first appearance, as every dict
        words = [[bytes([byte]) for byte in _utf8(word)] for word in word_counts]
        counts = list(word_counts.values())
        pair_counts: Counter[tuple[bytes, bytes]] = Counter()
        holders: dict[tuple[bytes, bytes], set[int]] = defaultdict(set)  # pair -> the words that hold it

        def count_pairs(word: int, sign: int) -> None:
            """Adds the pairs of a word to the counts, or takes them away."""
            for pair in pairwise(words[word]):
                pair_counts[pair] += sign * counts[word]
                holders[pair].add(word) if sign > 0 else holders[pair].discard(word)
                if not pair_counts[pair]:
                    del pair_counts[pair]

        def first_seen(pair: tuple[bytes, bytes]) -> tuple[int, int]:
            word = min(holders[pair])
            return word, list(pairwise(words[word])).index(pair)

        for word in range(len(words)):
            count_pairs(word, +1)
        tokens = {bytes([byte]): None for byte in range(256)}  # keys keep their order and hold no token twice
        while len(tokens) < vocab_size and pair_counts:
            highest = max(pair_counts.values())
            most_frequent = [pair for pair, count in pair_counts.items() if count == highest]
            left, right = min(most_frequent, key=first_seen) if len(most_frequent) > 1 else most_frequent[0]
            tokens[left + right] = None
            for word in list(holders[left, right]):
                count_pairs(word, -1)
                words[word] = _merged(words[word], left, right)
                count_pairs(word, +1)
        return cls([token.hex() for token in tokens])


def _merged(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    """Returns the word with each pair (left, right), counted from the left, as one token."""
    merged = []
    place = 0
    while place < len(word):
        if word[place : place + 2] == [left, right]:
            merged.append(left + right)
            place += 2
        else:
            merged.append(word[place])
            place += 1
    return merged


class GPT2Tokenizer:
    """GPT-2's published vocabulary of 50,257 tokens. tiktoken downloads its two files once and keeps them."""

    kind = "gpt2"
    vocab_size = 50257

    def __init__(self):
        self.encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        return _encode(self.encoding, text)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)

    def describe(self) -> dict:
        return {"kind": self.kind}


def _gpt2_encoding() -> tiktoken.Encoding:
    """Returns tiktoken's encoding. BadInput, within seconds, where neither its cache nor the network has the files."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(cache or Path(tempfile.gettempdir()) / "data-gym-cache")
    cache_names = {name: hashlib.sha1((GPT2_URL + name).encode()).hexdigest() for name in GPT2_FILES}
    if not all((folder / cache_name).is_file() for cache_name in cache_names.values()):
        try:  # asks first, since tiktoken's own download has no time-out
            urllib.request.urlopen(GPT2_URL + GPT2_FILES[0], timeout=NETWORK_SECONDS).close()
        except OSError as error:
            files = ", ".join(f"{name} as {cache_name}" for name, cache_name in cache_names.items())
            raise BadInput(
                f"--tokenizer gpt2: no network ({getattr(error, 'reason', error)}) and no files in tiktoken's cache: "
                f"put GPT-2's {files} into {folder}, or set TIKTOKEN_CACHE_DIR to a folder that has them"
            ) from None
    return tiktoken.get_encoding("gpt2")


def _encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    _utf8(text)  # refuses half a character, for which tiktoken would put U+FFFD
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(f"character {text[error.start]!r} at position {error.start} is half a character") from None


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Returns the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
    return "".join(stream(tokenizer, ids))


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yields text as tokens come. The bytes of an unfinished character wait for the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        if text := decoder.decode(tokenizer.token_bytes(int(token))):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def fingerprint(tokenizer: Tokenizer) -> str:
    """Returns the vocabulary's name, 64 hex digits, so that no checkpoint is read with another vocabulary.

    It is the sha256 of the canonical JSON of `describe()`.
    """
    return hashlib.sha256(json.dumps(tokenizer.describe(), sort_keys=True).encode()).hexdigest()


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "bpe": BPETokenizer,
    "gpt2": GPT2Tokenizer,
}


def train_tokenizer(kind: str, text: str, vocab_size: int | None = None) -> Tokenizer:
    """Returns the tokenizer `kind` for a corpus. Only the kind "bpe" reads `vocab_size`, and needs it."""
    if kind == "char":
        return CharTokenizer("".join(sorted(set(text))))
    if kind == "bpe":
        if vocab_size is None:
            raise BadInput("bpe tokenizer: the size of the vocabulary is missing")
        return BPETokenizer.train(text, vocab_size)
    return TOKENIZERS[kind]()


def load_tokenizer(description: dict) -> Tokenizer:
    """Returns the tokenizer of a description, as `describe()` gave it.

    BadInput where the kind is unknown, or where entries are missing or damaged.
    """
    kind = description.get("kind") if isinstance(description, dict) else None
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise BadInput(f"unknown tokenizer kind {kind!r}: this version knows {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind](**{key: value for key, value in description.items() if key != "kind"})
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, BadInput) else BadInput(f"{kind} tokenizer: damaged ({error})") from None
