"""Rows as a function of (seed, split, step, row), and the mean loss over all windows."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from base.errors import BadInput
from data.batches import Batches, mean_loss, smallest_text

TOKENS = np.arange(1000, dtype=np.int32)  # each token is its own position


def batches(batch_size=8, block_size=16, seed=1337, tokens=TOKENS) -> Batches:
    return Batches(tokens, block_size, batch_size, seed)


def starts(split="train", step=0, micro=0, **sizes) -> list[int]:
    """Where the rows of a micro-batch start in the text."""
    return batches(**sizes).get(split, step, micro)[0][:, 0].tolist()


# ---- training rows


def test_the_first_90_percent_train_and_the_rest_validates():
    split = batches().tokens
    assert split["train"].tolist() == list(range(900))
    assert split["val"].tolist() == list(range(900, 1000))


def test_targets_are_inputs_shifted_by_one():
    x, y = batches(batch_size=5).get("train", 0, 0)
    assert x.dtype == y.dtype == np.int64
    assert x.shape == y.shape == (5, 16)
    assert np.array_equal(x, x[:, :1] + np.arange(16))
    assert np.array_equal(y, x + 1)


def test_pinned_rows():
    # If these change, a resumed run no longer sees the rows that it would have seen.
    assert starts(step=0, batch_size=4, block_size=8) == [205, 527, 394, 337]
    assert starts(step=1, batch_size=4, block_size=8) == [371, 219, 739, 636]
    assert starts("val", batch_size=4, block_size=8) == [934, 901, 962, 964]


@settings(deadline=None)
@given(step=st.integers(0, 2**40), seed=st.integers(0, 2**63 - 1), split=st.sampled_from(["train", "val"]))
def test_four_micro_batches_of_8_are_one_batch_of_32(step, seed, split):
    four = [batches(batch_size=8, seed=seed).get(split, step, micro) for micro in range(4)]
    one = batches(batch_size=32, seed=seed).get(split, step, 0)
    for i in range(2):  # x, y
        assert np.array_equal(np.concatenate([part[i] for part in four]), one[i])


def test_rows_do_not_depend_on_what_was_asked_before():
    one = batches()
    keys = [(split, step, micro) for split in ("train", "val") for step in range(5) for micro in range(3)]
    in_order = {key: one.get(*key)[0] for key in keys}
    for key in reversed(keys):
        assert np.array_equal(one.get(*key)[0], in_order[key])
        assert np.array_equal(batches().get(*key)[0], in_order[key])


def test_seed_split_step_and_micro_batch_each_change_the_rows():
    def rows(seed, split, step, micro):
        one = batches(seed=seed)
        one.tokens = {"train": TOKENS, "val": TOKENS}  # so that only the random numbers can differ
        return tuple(one.get(split, step, micro)[0][:, 0])

    keys = [(s, "train", t, m) for s in (0, 1, 2**63 - 1) for t in (0, 1, 2**40) for m in (0, 1)]
    keys += [(s, "val", t, m) for s, _, t, m in keys]
    assert len({rows(*key) for key in keys}) == len(keys) == 36


def test_starts_are_uniform_from_the_first_to_the_last_legal_one():
    block_size, legal = 16, 900 - 16
    drawn = np.concatenate([starts(step=step, batch_size=500, block_size=block_size) for step in range(100)])
    counts = np.bincount(drawn, minlength=legal)
    assert len(counts) == legal
    assert counts[0] > 0
    assert counts[-1] > 0
    expected = len(drawn) / legal
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Of 883 degrees of freedom: mean 883, standard deviation 42.
    assert abs(chi_square - 883) < 4 * 42


# ---- validation windows


@settings(deadline=None)
@given(
    n=st.integers(30, 300),
    block_size=st.integers(1, 25),
    rows=st.integers(1, 6),
    split=st.sampled_from(["train", "val"]),
)
@example(n=30, block_size=2, rows=1, split="val")  # 3 tokens: one whole window and nothing ragged
@example(n=30, block_size=25, rows=1, split="val")  # only the ragged one
def test_windows_cover_each_target_once_and_in_order(n, block_size, rows, split):
    one = batches(block_size=block_size, tokens=np.arange(n))
    windows = list(one.windows(split, rows))
    tokens = one.tokens[split].tolist()
    assert [token for x, _ in windows for token in x.ravel().tolist()] == tokens[:-1]
    assert [token for _, y in windows for token in y.ravel().tolist()] == tokens[1:]
    assert all(x.shape == y.shape and len(x) <= rows for x, y in windows)
    assert all(x.dtype == y.dtype == np.int64 for x, y in windows)
    assert all(x.shape[1] == block_size for x, _ in windows[:-1])


# ---- mean loss


def token_losses(n: int) -> np.ndarray:
    """A loss for each token, by its id."""
    return np.random.default_rng(5).exponential(size=n)


def window_losses(n: int):
    """`evaluate` for mean_loss: the mean loss of each window."""
    return lambda x, y: token_losses(n)[y].mean(axis=1)


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("block_size", [1, 11, 16, 50])
def test_the_mean_loss_is_the_mean_over_tokens(block_size, rows):
    one = batches(block_size=block_size)
    mean, _ = mean_loss(window_losses(1000), one.windows("val", rows))
    assert mean == pytest.approx(token_losses(1000)[901:].mean(), rel=1e-12)


def test_asked_twice_the_mean_loss_is_the_same():
    one = batches()
    first, second = (mean_loss(window_losses(1000), one.windows("val", 4)) for _ in range(2))
    assert first == second


def test_the_standard_error_of_equal_windows_is_the_textbook_one():
    one = batches(block_size=11)  # 99 targets: 9 windows
    per_window = token_losses(1000)[901:].reshape(9, 11).mean(axis=1)
    _, error = mean_loss(window_losses(1000), one.windows("val", 4))
    assert error == pytest.approx(per_window.std(ddof=1) / math.sqrt(9), rel=1e-12)


def test_the_standard_error_weighs_a_ragged_window_by_its_tokens():
    one = batches(block_size=40)  # windows of 40, 40 and 19 targets
    parts = np.split(token_losses(1000)[901:], [40, 80])
    mean = token_losses(1000)[901:].mean()
    squares = sum((len(part) / 99) ** 2 * (part.mean() - mean) ** 2 for part in parts)
    _, error = mean_loss(window_losses(1000), one.windows("val", 4))
    assert error == pytest.approx(math.sqrt(squares * 3 / 2), rel=1e-12)


def test_one_window_has_no_standard_error():
    mean, error = mean_loss(window_losses(1000), batches(block_size=99).windows("val", 4))
    assert mean == pytest.approx(token_losses(1000)[901:].mean())
    assert math.isnan(error)


# ---- short texts


@settings(deadline=None)
@given(st.integers(1, 3000))
@example(1)
def test_the_smallest_text_works_and_one_token_less_does_not(block_size):
    n = smallest_text(block_size)
    one = batches(block_size=block_size, tokens=np.arange(n))
    x, y = one.get("train", 0, 0)
    assert x.shape == (8, block_size)
    assert y.max() < len(one.tokens["train"])
    assert sum(y.size for _, y in one.windows("val", 64)) == len(one.tokens["val"]) - 1 > 0
    with pytest.raises(BadInput):
        batches(block_size=block_size, tokens=np.arange(n - 1))


@pytest.mark.parametrize("n", [0, 1, 17])
def test_a_short_text_is_refused_with_what_it_has_and_needs(n):
    with pytest.raises(BadInput, match=rf"{n} tokens.* 64 needs {smallest_text(64)} "):
        batches(block_size=64, tokens=np.arange(n))


def test_the_smallest_text_of_a_known_size():
    assert smallest_text(64) == 73  # 65 of 73 train, 8 validate
    assert smallest_text(1) == 11  # 9 train, 2 validate
