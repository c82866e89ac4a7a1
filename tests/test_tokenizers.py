"""Text to token ids and back."""

import json

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from base.errors import BadInput
from data.batches import Batches
from data.tokenizers import (
    WORDS,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    decode,
    fingerprint,
    load_tokenizer,
    stream,
    train_tokenizer,
)

# st.text() leaves out lone surrogates: they cannot come from a file, which is UTF-8.
any_text = st.text(min_size=1)


@settings(deadline=None)
@given(any_text)
def test_any_text_survives_encode_and_decode(text):
    tokenizer = train_tokenizer("char", text)
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids) == text
    assert ids.dtype == np.int32
    assert ids.shape == (len(text),)
    assert tokenizer.vocab_size == len(set(text))


def test_ids_are_places_in_code_point_order():
    tokenizer = train_tokenizer("char", "b🎭aéb\n")
    assert tokenizer.characters == "\nabé🎭"
    assert tokenizer.encode("b🎭aéb\n").tolist() == [2, 4, 1, 3, 2, 0]


def test_no_text_is_no_tokens():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.encode("").tolist() == []
    assert decode(tokenizer, []) == ""


@settings(deadline=None)
@given(st.text(min_size=1), st.text())
def test_the_first_unknown_character_is_named_with_its_position(vocabulary, text):
    tokenizer = train_tokenizer("char", vocabulary)
    unknown = [at for at, character in enumerate(text) if character not in vocabulary]
    if not unknown:
        assert decode(tokenizer, tokenizer.encode(text)) == text
        return
    with pytest.raises(BadInput) as error:
        tokenizer.encode(text)
    assert f"{text[unknown[0]]!r} at position {unknown[0]} " in str(error.value)


@pytest.mark.parametrize("unknown", ["a", "c", "~", "\U0010ffff", "\udcff"])
def test_an_unknown_character_is_named_wherever_it_sorts(unknown):
    with pytest.raises(BadInput, match="at position 3 "):
        CharTokenizer("bd").encode("bdb" + unknown)


def test_the_fingerprint_stays_what_old_checkpoints_hold():
    expected = "53962805adff59ba24ec15a5294d2aa91255f76b43696214dcb78053e9a463a8"
    assert fingerprint(CharTokenizer("abc")) == expected


@settings(deadline=None)
@given(st.sets(st.characters(codec="utf-8"), min_size=1), st.sets(st.characters(codec="utf-8"), min_size=1))
def test_fingerprints_are_equal_exactly_where_vocabularies_are(one, other):
    fingerprints = [fingerprint(CharTokenizer("".join(sorted(characters)))) for characters in (one, other)]
    assert (fingerprints[0] == fingerprints[1]) == (one == other)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"kind": None, "characters": "ab"},
        {"kind": ["char"], "characters": "ab"},
        {"kind": "words", "characters": "ab"},
        {"kind": "char"},
        {"kind": "char", "characters": ""},
        {"kind": "char", "characters": "ba"},
        {"kind": "char", "characters": "aab"},
        {"kind": "char", "characters": ["ab", "c"]},
        {"kind": "char", "characters": 5},
        {"kind": "char", "characters": None},
        {"kind": "char", "characters": "ab", "merges": []},
    ],
    ids=str,
)
def test_a_bad_description_is_refused(description):
    with pytest.raises(BadInput):
        load_tokenizer(description)


# ---- bytes and byte pairs


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer("bpe", "the theme of these theses, they then thought, is that that thaws. " * 3, 300)


@settings(deadline=None)
@given(any_text)
def test_bytes_and_byte_pairs_know_every_text(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert decode(tokenizer, ids) == text, tokenizer.kind
        assert ids.dtype == np.int32
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_survive_as_tokens(bpe, raw):
    for tokenizer in (ByteTokenizer(), bpe):
        single = {tokenizer.token_bytes(token): token for token in range(256)}
        assert b"".join(tokenizer.token_bytes(single[raw[i : i + 1]]) for i in range(len(raw))) == raw, tokenizer.kind
        assert decode(tokenizer, [single[raw[i : i + 1]] for i in range(len(raw))]) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text", ["it's a test, it's the best test of tests 1 2 12 112", "aaaa aaab aab abab\n\n  aba  ", "é世é世 世é"]
)
def test_byte_pairs_are_those_of_tiktoken_s_educational_trainer(text):
    ours = train_tokenizer("bpe", text * 2, 1000)  # until no pair is left
    theirs = bpe_train(text * 2, ours.vocab_size, WORDS, visualise=None)
    assert [bytes.fromhex(token) for token in ours.tokens] == list(theirs)


def test_a_text_that_runs_out_of_pairs_gives_a_smaller_vocabulary():
    tokenizer = train_tokenizer("bpe", "ab ab", 1000)
    assert [tokenizer.token_bytes(token) for token in range(256, tokenizer.vocab_size)] == [b"ab", b" ab"]


def test_token_ids_beyond_16_bits():
    pairs = [bytes([a, b]).hex() for a in range(256) for b in range(256)]
    tokenizer = BPETokenizer([bytes([a]).hex() for a in range(256)] + pairs, pattern=r"(?s).+")
    assert tokenizer.vocab_size == 256 + 65536
    last = bytes([0xC3, 0xBF]).decode()  # "ÿ", two bytes, one token
    ids = tokenizer.encode(last + "zz")
    assert ids.tolist() == [256 + 0xC3 * 256 + 0xBF, 256 + ord("z") * 257]
    assert decode(tokenizer, ids) == last + "zz"
    x, _ = Batches(np.full(100, 65791, dtype=np.int32), block_size=4, batch_size=2, seed=0).get("train", 0, 0)
    assert x.max() == 65791


@pytest.mark.parametrize("tokens", [[], ["61"], [bytes([b]).hex() for b in range(256)] * 2, ["zz"], [None]])
def test_a_damaged_vocabulary_is_refused_before_tiktoken_can_panic(tokens):
    with pytest.raises(BadInput, match="bpe tokenizer"):
        load_tokenizer({"kind": "bpe", "tokens": tokens, "pattern": WORDS})


@settings(deadline=None)
@given(any_text)
def test_every_kind_comes_back_from_its_description(bpe, text):
    for tokenizer in (train_tokenizer("char", text), ByteTokenizer(), bpe):
        again = load_tokenizer(json.loads(json.dumps(tokenizer.describe())))
        assert again.describe() == tokenizer.describe()
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert fingerprint(again) == fingerprint(tokenizer)


def test_half_a_surrogate_pair_is_named(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(BadInput, match=r"at position 2 is half a character"):
            tokenizer.encode("ab\ud83c")


def test_the_stream_holds_back_an_unfinished_character():
    tokenizer = ByteTokenizer()
    assert list(stream(tokenizer, tokenizer.encode("a🎉b"))) == ["a", "🎉", "b"]
    assert list(stream(tokenizer, tokenizer.encode("🎉")[:2])) == ["\ufffd"]


# ---- GPT-2's vocabulary


def test_gpt2_without_network_and_files_says_what_to_put_where(monkeypatch, tmp_path):
    def no_network(url, timeout):
        assert timeout <= 10
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(BadInput) as error:
        train_tokenizer("gpt2", "")
    (line,) = str(error.value).splitlines()
    assert "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in line
    assert "encoder.json as 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" in line
    assert str(tmp_path) in line


def test_gpt2_from_the_cache_asks_no_network(monkeypatch, tmp_path):
    for key in ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"):
        (tmp_path / key).write_text("")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was asked"))
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: tiktoken_like(name))
    assert train_tokenizer("gpt2", "").encode("ab").tolist() == [97, 98]


def tiktoken_like(name: str) -> tiktoken.Encoding:
    ranks = {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
