"""Text to token ids and back.

A tokenizer has `kind`, `vocab_size`, `encode(text) -> int32 (n,)`, `decode(ids) -> text` and `describe() -> dict`, the
JSON that a checkpoint keeps as minigpt_tokenizer.json; `load` builds it again. `fingerprint` names a vocabulary, so
that a checkpoint is never read with another one.
"""

import hashlib
import json

import numpy as np

from run.errors import BadInput


class CharTokenizer:
    """One token per distinct character, in code point order."""

    kind = "char"

    def __init__(self, characters: str):
        self.characters = characters
        self._code_points = np.array([ord(c) for c in characters], dtype=np.uint32)
        if not len(characters) or np.any(np.diff(self._code_points.astype(np.int64)) <= 0):
            raise BadInput("char tokenizer: the vocabulary must be distinct characters in code point order")

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = np.searchsorted(self._code_points, code_points).clip(max=self.vocab_size - 1)
        unknown = np.flatnonzero(self._code_points[ids] != code_points)
        if unknown.size:
            at = int(unknown[0])
            raise BadInput(
                f"character {text[at]!r} at position {at} is not in the vocabulary of {self.vocab_size} characters"
            )
        return ids.astype(np.int32)

    def decode(self, ids) -> str:
        return "".join(self.characters[int(i)] for i in ids)

    def describe(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


def fingerprint(tokenizer) -> str:
    """sha256 of the canonical JSON of `describe()`, 64 hex digits."""
    return hashlib.sha256(json.dumps(tokenizer.describe(), sort_keys=True).encode()).hexdigest()


def train(kind: str, text: str) -> CharTokenizer:
    """Builds the tokenizer `kind` for a corpus."""
    return TOKENIZERS[kind].from_text(text)


def load(description: dict) -> CharTokenizer:
    """The inverse of `describe()`. BadInput where the kind is unknown or entries are missing."""
    kind = description.get("kind")
    if kind not in TOKENIZERS:
        raise BadInput(f"unknown tokenizer kind {kind!r}: this version knows {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind](**{key: value for key, value in description.items() if key != "kind"})
    except TypeError as error:
        raise BadInput(f"damaged {kind} tokenizer: {error}") from None


TOKENIZERS = {"char": CharTokenizer}
