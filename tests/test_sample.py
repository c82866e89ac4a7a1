"""Sampling, from stand-ins for a model whose distribution is known."""

import numpy as np
import pytest

from run.errors import BadInput
from sample import generate

V = 6
LOGITS = np.array([0.5, -1.0, 2.0, 0.0, 1.0, -3.0], dtype=np.float32)


def constant(tokens: np.ndarray) -> np.ndarray:
    """The same distribution after every context."""
    return LOGITS[None]


def after_last(tokens: np.ndarray) -> np.ndarray:
    """A distribution that depends on the last token; the likeliest is the next number."""
    return np.roll(LOGITS, tokens[0, -1] + 1 - 2)[None]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_temperature_zero_takes_the_likeliest():
    for seed in (0, 1):
        assert list(generate(after_last, [3], 8, 7, temperature=0, seed=seed)) == [4, 5, 0, 1, 2, 3, 4]


def test_the_same_seed_gives_the_same_tokens_and_another_one_others():
    first, again, other = (list(generate(after_last, [0], 8, 50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_count_of_tokens_is_what_was_asked():
    assert len(list(generate(constant, [0], 8, 13))) == 13
    assert list(generate(constant, [0], 8, 0)) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution(temperature):
    n, expected = 20_000, softmax(LOGITS.astype(np.float64) / temperature)
    drawn = np.bincount(list(generate(constant, [0], 8, n, temperature, seed=3)), minlength=V)
    assert chi_square(drawn, n * expected) < 20.5  # 99.9 % quantile of 5 degrees of freedom


def test_each_token_is_drawn_given_the_one_before():
    n, expected = 5000, softmax(LOGITS.astype(np.float64))
    tokens = [0, *generate(after_last, [0], 8, n, temperature=1.0, seed=3)]
    distances = np.bincount((np.diff(tokens) + 1) % V, minlength=V)  # after_last shifts LOGITS by the token before
    assert chi_square(distances, n * expected) < 20.5


def test_large_logits_do_not_overflow():
    tokens = generate(lambda tokens: 1e4 * LOGITS[None], [0], 8, 5, temperature=1.0)
    assert list(tokens) == [2] * 5


def test_the_context_is_cut_to_the_newest_tokens_of_a_block():
    seen = []

    def remember(tokens):
        assert tokens.dtype == np.int64
        seen.append(tokens.tolist())
        return after_last(tokens)

    list(generate(remember, [1, 2, 3], 4, 4, temperature=0))
    assert seen == [[[1, 2, 3]], [[1, 2, 3, 4]], [[2, 3, 4, 5]], [[3, 4, 5, 0]]]


def test_a_long_start_is_cut_too_and_left_as_it_was():
    start, seen = [0, 1, 2, 3, 4, 5], []
    list(generate(lambda tokens: seen.append(tokens.tolist()) or after_last(tokens), start, 2, 1, temperature=0))
    assert seen == [[[4, 5]]]
    assert start == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    def broken(tokens):
        logits = LOGITS[None].copy()
        logits[0, 1] = bad
        return logits

    with pytest.raises(BadInput):
        list(generate(broken, [0], 8, 1, temperature))
