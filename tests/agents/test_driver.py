"""The three autoreset modes give the same transitions: those that the environments themselves logged.

Planted once, and each caught here: counting the reset step as a transition, taking the next episode's first
observation for the final one, and counting a reset step's reward into the episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_worlds import Ledger, Match, NeverStarts
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.agents.driver import Driver, Episodes, autoreset_mode
from headrace.agents.spaces import Observations
from headrace.errors import DataError

MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


def drive(mode: AutoresetMode, n: int, steps: int, seed: int, p_end: float) -> tuple[list[Any], list[Any]]:
    """What the driver says happened, and what the environments logged, row by row."""
    envs = SyncVectorEnv(
        [lambda i=i: Ledger(10_000 * i, seed + i, p_end) for i in range(n)], autoreset_mode=mode
    )
    driver = Driver(envs, Observations(envs.single_observation_space))
    driver.reset(0)
    said: list[list[Any]] = [[] for _ in range(n)]
    for _ in range(steps):
        before = np.array(driver.obs)[:, 0]
        driver.step(np.zeros(n, np.int64))
        after = np.array(driver.obs)[:, 0]
        final = (
            dict(zip(driver.final_rows, driver.final_obs[:, 0], strict=True))
            if driver.final_rows is not None
            else {}
        )
        for i in np.flatnonzero(driver.live):
            terminated, truncated = bool(driver.terminated[i]), bool(driver.truncated[i])
            told = final.get(i, after[i])
            # What follows a termination is never looked at, so the driver need not know it.
            said[i].append(
                (before[i], driver.rewards[i], None if terminated else told, terminated, truncated)
            )
    logged = [
        [
            (s, r, None if terminated else after, terminated, truncated)
            for s, r, after, terminated, truncated in env.log
        ]
        for env in envs.envs
    ]
    return said, logged


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 4), seed=st.integers(0, 10**6), p_end=st.sampled_from((0.0, 0.1, 0.5, 1.0)))
def test_live_rows_are_exactly_the_true_transitions(
    mode: AutoresetMode, n: int, seed: int, p_end: float
) -> None:
    said, logged = drive(mode, n, 25, seed, p_end)
    assert said == logged


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_add_up_the_environment_s_rewards(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([lambda i=i: Ledger(0, i, 0.2) for i in range(3)], autoreset_mode=mode)
    driver = Driver(envs, Observations(envs.single_observation_space), keep=10_000)
    driver.reset(0)
    for _ in range(200):
        driver.step(np.zeros(3, np.int64))
    expected = []
    for env in envs.envs:
        total, length = 0.0, 0
        for _, reward, _, terminated, truncated in env.log:
            total, length = total + reward, length + 1
            if terminated or truncated:
                expected.append((round(float(total), 3), length))
                total, length = 0.0, 0
    found = zip((round(r, 3) for r in driver.episodes.returns), driver.episodes.lengths, strict=True)
    assert sorted(found) == sorted(expected)
    assert driver.episodes.best == pytest.approx(max(total for total, _ in expected), abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_fresh_marks_first_observations(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([Match] * 2, autoreset_mode=mode)
    driver = Driver(envs, Observations(envs.single_observation_space))
    driver.reset(0)
    assert driver.fresh is not None and driver.fresh.all()
    for _ in range(35):
        driver.step(np.zeros(2, np.int64))
        firsts = [env.asked == 0 for env in envs.envs]
        assert (driver.fresh.tolist() if driver.fresh is not None else [False, False]) == firsts


def test_an_environment_that_never_gives_a_transition_is_an_error() -> None:
    driver = Driver(NeverStarts(), Observations(NeverStarts().single_observation_space))
    driver.reset(0)
    with pytest.raises(DataError, match="ends at its reset"):
        for _ in range(2000):
            driver.step(np.zeros(2, np.int64))
    # The first step of each row counts; every later one is an episode that was over before it began.
    assert driver.episodes.finished == 2 and driver.episodes.empty > 1000


def test_same_step_without_final_observations_is_an_error() -> None:
    envs = SyncVectorEnv([lambda: Ledger(0, 0, 1.0)], autoreset_mode=AutoresetMode.SAME_STEP)
    driver = Driver(envs, Observations(envs.single_observation_space))
    driver.reset(0)
    with pytest.raises(DataError, match="final_obs"):
        driver._final(np.array([0]), {})


def test_modes_are_read_from_metadata() -> None:
    class Row:
        metadata: Any = None

    assert autoreset_mode(Row()) == ("NextStep", False)
    Row.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    assert autoreset_mode(Row()) == ("SameStep", True)
    Row.metadata = {"autoreset_mode": "sideways"}
    with pytest.raises(DataError, match="sideways"):
        autoreset_mode(Row())


def test_the_mean_is_of_the_last_episodes() -> None:
    episodes = Episodes(1, keep=3)
    for value in range(30):
        episodes.add(np.array([float(value)]), np.array([True]), np.array([True]))
    assert episodes.mean == 28.0 and episodes.finished == 30 and episodes.best == 29.0
