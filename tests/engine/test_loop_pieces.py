"""The small pure pieces of the loop: the loss log, the thread trial, the stop rules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.losslog import LossLog
from headrace.engine.stopping import Best, StopRules
from headrace.engine.threads import LOOK_AGAIN_S, ThreadTrial, candidates


def test_a_row_is_the_mean_over_examples_and_finds_the_first_bad_update() -> None:
    log = LossLog(4, torch.device("cpu"))
    log.take(2).copy_(torch.tensor([1.0, 2.0]))
    log.advance([10, 10])
    log.take(1).fill_(6.0)
    log.advance([5])
    assert log.room == 1
    log.close_row({"step": 3})
    log.take(2).copy_(torch.tensor([0.0, math.nan]))
    log.advance([1, 1])
    assert not log.partial_is_finite()
    log.close_row({"step": 5})
    first, second = log.arrived(wait=True)
    assert first.mean == pytest.approx((10 + 20 + 30) / 25)
    assert first.first_bad is None
    assert second.first_bad == 1


def test_a_row_keeps_its_losses_when_the_window_is_used_again() -> None:
    log = LossLog(2, torch.device("cpu"))
    log.take(1).fill_(3.0)
    log.advance([1])
    log.close_row({})
    log.take(1).fill_(9.0)
    assert next(log.arrived(wait=True)).mean == 3.0


def test_an_open_row_survives_a_resume() -> None:
    log, again = LossLog(3, torch.device("cpu")), LossLog(3, torch.device("cpu"))
    log.take(2).copy_(torch.tensor([4.0, 5.0]))
    log.advance([2, 2])
    again.load_state_dict(log.state_dict())
    again.take(1).fill_(6.0)
    again.advance([2])
    again.close_row({})
    assert next(again.arrived(wait=True)).mean == 5.0


@given(st.floats(0.05, 20), st.lists(st.floats(1.0, 3.0), min_size=6, max_size=6))
def test_the_faster_count_is_kept_whatever_the_noise_below_its_lead(ratio: float, noise: list[float]) -> None:
    """Noise only slows; the best of three turns decides, so a lead beyond the least noise is always seen."""
    trial = ThreadTrial((1, 2))
    speed = {1: 1000.0, 2: 1000.0 * ratio}
    best = {1: 0.0, 2: 0.0}
    for slower in noise:
        rate = speed[trial.current] / slower
        best[trial.current] = max(best[trial.current], rate)
        trial.observe(100, 100 / rate, 0.0)
    assert trial.decided == max(best, key=lambda count: best[count]) or best[1] == pytest.approx(best[2])


def test_the_trial_is_repeated_after_a_while() -> None:
    trial = ThreadTrial((1, 2))
    for _ in range(6):
        trial.observe(10, 1.0 if trial.current == 2 else 2.0, 1.0)
    assert trial.decided == 2
    assert trial.gain == pytest.approx(2.0)
    trial.observe(10, 1.0, 1.0 + LOOK_AGAIN_S / 2)
    assert trial.decided == 2
    trial.observe(10, 1.0, 1.0 + LOOK_AGAIN_S)
    assert trial.trying


def test_deterministic_runs_and_single_cores_do_not_try() -> None:
    assert candidates(8, deterministic=True)[0] == (1,)
    assert candidates(1, deterministic=False)[0] == (1,)
    assert candidates(8, deterministic=False)[0] == (1, 8)


def test_each_stop_rule_speaks_for_itself() -> None:
    rules = StopRules(passes=3, steps=10, seconds=5.0, target_loss=0.5, patience=2)
    assert rules.after_update(9, 4.9) is None
    assert rules.after_update(10, 0.0) == "10 updates done"
    assert rules.after_update(1, 5.0) == "5 s are over"
    assert rules.after_loss(0.51) is None
    assert rules.after_loss(0.5) is not None
    best = Best()
    assert rules.after_pass(2, best) is None
    assert rules.after_pass(3, best) == "3 epochs done"
    for loss in (1.0, 1.0, 2.0):
        best.observe(loss)
    assert rules.after_pass(1, best) == "no better loss than 1 in 2 epochs"


def test_no_rules_never_stop() -> None:
    rules = StopRules()
    assert rules.after_update(10**9, 1e9) is None
    assert rules.after_pass(10**6, Best()) is None
