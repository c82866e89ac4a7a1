"""Text to token ids and back."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import CharTokenizer, fingerprint, load, train
from run.errors import BadInput

# Lone surrogates (st.text() leaves them out) cannot come from a file, which is UTF-8; as Python strings they work.
any_string = st.text(st.characters(exclude_categories=()), min_size=1)


@settings(deadline=None)
@given(any_string)
def test_any_text_survives_encode_and_decode(text):
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32
    assert ids.shape == (len(text),)
    assert tokenizer.vocab_size == len(set(text))


def test_ids_are_places_in_code_point_order():
    tokenizer = CharTokenizer.from_text("b🎭aéb\n")
    assert tokenizer.characters == "\nabé🎭"
    assert tokenizer.encode("b🎭aéb\n").tolist() == [2, 4, 1, 3, 2, 0]


def test_no_text_is_no_tokens():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([]) == ""


@settings(deadline=None)
@given(st.text(min_size=1), st.text())
def test_the_first_unknown_character_is_named_with_its_position(vocabulary, text):
    tokenizer = CharTokenizer.from_text(vocabulary)
    unknown = [at for at, character in enumerate(text) if character not in vocabulary]
    if not unknown:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    with pytest.raises(BadInput) as error:
        tokenizer.encode(text)
    assert f"{text[unknown[0]]!r} at position {unknown[0]} " in str(error.value)


@pytest.mark.parametrize("unknown", ["a", "c", "~", "\U0010ffff", "\udcff"])
def test_unknown_below_between_and_above_the_vocabulary(unknown):
    with pytest.raises(BadInput, match="at position 3 "):
        CharTokenizer("bd").encode("bdb" + unknown)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_a_description_survives_json(text):
    tokenizer = train("char", text)
    again = load(json.loads(json.dumps(tokenizer.describe())))
    assert again.describe() == tokenizer.describe()
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert fingerprint(again) == fingerprint(tokenizer)


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
        load(description)
