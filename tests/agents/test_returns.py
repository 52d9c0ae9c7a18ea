"""Advantages and targets against naive float64 loops, over random terminations and truncations.

Planted once, and each caught here: bootstrapping through a termination, not bootstrapping a truncation, carrying
advantages over the end of an episode, and reading the next row one step too early.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_oracles import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.agents.returns import gae, vtrace


@st.composite
def rollouts(draw: Any) -> dict[str, Any]:
    steps, n = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    terminated = rng.random((steps, n)) < draw(st.sampled_from((0.0, 0.2, 0.5)))
    truncated = rng.random((steps, n)) < draw(st.sampled_from((0.0, 0.2, 0.5)))
    values = rng.normal(size=(steps + 1, n)).astype(np.float32)
    next_values = values[1:].copy()
    # As in SAME_STEP mode: the value after an ended row is not the next row's.
    ended = terminated | truncated
    next_values[ended] = rng.normal(size=int(ended.sum())).astype(np.float32) * 3
    return {
        "rewards": rng.normal(size=(steps, n)).astype(np.float32),
        "values": values[:-1],
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
        "log_ratios": rng.normal(size=(steps, n)).astype(np.float32),
        "gamma": draw(st.sampled_from((0.0, 0.9, 0.99, 1.0))),
        "lambda_": draw(st.sampled_from((0.0, 0.5, 0.95, 1.0))),
    }


def naive(function: Any, r: dict[str, Any], *names: str, **more: float) -> np.ndarray:
    given = {**r, "ended": r["terminated"] | r["truncated"], "lam": r["lambda_"], **more}
    steps, n = r["rewards"].shape
    return np.array([[function(t, i, *(given[k] for k in names)) for i in range(n)] for t in range(steps)])


PLAIN = ("rewards", "values", "next_values", "terminated", "truncated")


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_gae_is_the_sum_over_the_episode(r: dict[str, Any]) -> None:
    advantages, targets = gae(*(r[k] for k in PLAIN), r["gamma"], r["lambda_"])
    expected = naive(
        oracle.gae_advantage, r, "rewards", "values", "next_values", "ended", "terminated", "gamma", "lam"
    )
    np.testing.assert_allclose(advantages, expected, atol=2e-5)
    np.testing.assert_allclose(targets, expected + r["values"], atol=2e-5)
    assert advantages.dtype == targets.dtype == np.float32


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_lambda_one_gives_n_step_returns(r: dict[str, Any]) -> None:
    _, targets = gae(*(r[k] for k in PLAIN), r["gamma"], 1.0)
    expected = naive(oracle.n_step_return, r, "rewards", "next_values", "ended", "terminated", "gamma")
    np.testing.assert_allclose(targets, expected, atol=3e-5)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.7)])
@settings(max_examples=100, deadline=None)
@given(r=rollouts())
def test_vtrace_is_the_paper_s_sum(r: dict[str, Any], rho_bar: float, c_bar: float) -> None:
    advantages, targets = vtrace(
        *(r[k] for k in PLAIN), r["log_ratios"], r["gamma"], r["lambda_"], rho_bar, c_bar
    )
    names = (
        "rewards",
        "values",
        "next_values",
        "ended",
        "terminated",
        "log_ratios",
        "gamma",
        "lam",
        "rho_bar",
        "c_bar",
    )
    for found, function in ((targets, oracle.vtrace_target), (advantages, oracle.vtrace_advantage)):
        expected = naive(function, r, *names, rho_bar=rho_bar, c_bar=c_bar)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert found.dtype == np.float32


@settings(max_examples=50, deadline=None)
@given(rollouts())
def test_vtrace_on_policy_targets_are_gae_targets(r: dict[str, Any]) -> None:
    _, targets = vtrace(*(r[k] for k in PLAIN), np.zeros_like(r["rewards"]), r["gamma"], r["lambda_"])
    _, expected = gae(*(r[k] for k in PLAIN), r["gamma"], r["lambda_"])
    np.testing.assert_allclose(targets, expected, atol=2e-5)
