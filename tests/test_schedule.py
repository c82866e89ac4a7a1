"""The learning rate: where it starts, peaks and ends, and its shape between."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optim.schedule import learning_rate

LR, MIN_LR = 1e-3, 1e-4


def rates(steps: int, warmup: int, lr: float = LR, min_lr: float = MIN_LR) -> list[float]:
    return [learning_rate(step, steps, lr, min_lr, warmup) for step in range(steps)]


def test_warm_up_climbs_in_equal_parts():
    assert rates(steps=100, warmup=10)[:10] == pytest.approx([LR * k / 10 for k in range(1, 11)])


def test_decline_is_half_a_cosine():
    steps, warmup = 101, 20
    for step in range(warmup, steps):
        expected = MIN_LR + (LR - MIN_LR) * math.cos(math.pi / 2 * (step - warmup) / 80) ** 2
        assert learning_rate(step, steps, LR, MIN_LR, warmup) == pytest.approx(expected), step


def test_without_warm_up_the_first_is_the_highest():
    assert rates(steps=5, warmup=0)[0] == LR


def test_one_step_takes_lr():
    for warmup in (0, 1, 100):
        assert rates(steps=1, warmup=warmup) == [LR], warmup


def test_two_steps_take_lr_and_min_lr():
    for warmup in (0, 1, 2, 100):
        assert rates(steps=2, warmup=warmup) == [LR, MIN_LR], warmup


@pytest.mark.parametrize("warmup", [9, 10, 1000])
def test_a_warm_up_as_long_as_the_run_ends_one_step_before_it(warmup):
    expected = [LR * k / 9 for k in range(1, 10)] + [MIN_LR]
    assert rates(steps=10, warmup=warmup) == pytest.approx(expected)


def test_min_lr_equal_to_lr_is_constant_after_warm_up():
    assert rates(steps=20, warmup=5, min_lr=LR)[4:] == pytest.approx([LR] * 16)


@given(
    steps=st.integers(2, 300),
    warmup=st.integers(0, 400),
    lr=st.floats(1e-8, 10.0),
    share=st.floats(0.0, 1.0),
)
@example(steps=2, warmup=1, lr=1e-3, share=0.0)
def test_every_schedule_starts_above_0_peaks_at_lr_and_ends_at_min_lr(steps, warmup, lr, share):
    min_lr = lr * share
    curve = rates(steps, warmup, lr, min_lr)
    peak = min(warmup, steps - 1)
    assert curve[0] > 0
    assert curve[-1] == min_lr
    assert max(curve) == pytest.approx(lr, rel=1e-12)
    climb, decline = curve[:peak], curve[peak:]
    assert climb == pytest.approx([lr * (k + 1) / peak for k in range(peak)], rel=1e-12)
    assert all(later <= earlier for earlier, later in pairwise(decline)), curve
    assert min(decline) >= min_lr


def test_the_last_rate_is_a_tenth_of_the_highest_unless_it_is_given():
    assert [learning_rate(step, 10, 1.0, None, 2) for step in range(10)] == [
        learning_rate(step, 10, 1.0, 0.1, 2) for step in range(10)
    ]
