"""Rounds that adapt, and labels that warn: pure decisions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.labels import label_shares, warning
from headrace.buffer.rounds import Timing, choose_rounds

positive = st.floats(1e-6, 1e4)


@given(positive, positive, st.floats(0, 1), st.integers(1, 20))
def test_rounds_are_free_and_bounded(load: float, round_: float, fraction: float, most: int) -> None:
    rounds, why = choose_rounds(Timing(load, round_), fraction, most)
    assert 1 <= rounds <= most
    assert rounds == 1 or rounds * round_ <= load * (1 + 1e-9)
    assert why


def test_rounds_follow_the_step_size_down_to_one() -> None:
    timing = Timing(load_s=1.0, round_s=0.1)
    found = [choose_rounds(timing, fraction)[0] for fraction in (1.0, 0.5, 0.1, 0.0)]
    assert found == [10, 5, 1, 1]


def test_nothing_measured_is_one_round() -> None:
    assert choose_rounds(Timing())[0] == 1
    assert choose_rounds(Timing().with_load(5.0))[0] == 1
    assert choose_rounds(Timing().with_load(5.0).with_round(1.0))[0] == 5


def test_means_forget() -> None:
    timing = Timing()
    for _ in range(20):
        timing = timing.with_load(8.0)
    for _ in range(5):
        timing = timing.with_load(1.0)
    assert timing.load_s is not None
    assert 1.0 < timing.load_s < 1.5


def test_sorted_labels_are_told_and_fair_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        fair = [label_shares(rng.integers(0, 10, 500), 10) for _ in range(3)]
        assert warning(fair, 500) is None
    sorted_ = [label_shares(np.full(500, k), 10) for k in range(3)]
    told = warning(sorted_, 500)
    assert told is not None
    assert "1.00" in told
