"""Plays whole episodes with the present parameters and adds up their rewards.

Each row of the vector environment plays the same number of episodes: taking the first episodes that end, whichever rows
they come from, would favour short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.agents.driver import Driver
from headrace.agents.rollout import Learner
from headrace.agents.spaces import Observations
from headrace.errors import OptionError


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes that were played, from the environment's own rewards."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Between episodes; the mean's standard error is this over the root of their number."""
        return float(np.std(self.returns))

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        return f"return {self.mean:.2f} ± {self.std:.2f} over {len(self.returns)} episodes"


def play_episodes(
    env: object, learner: Learner, observations: Observations, episodes: int, deterministic: bool, seed: int
) -> Evaluation:
    """Play ``episodes`` episodes, spread evenly over the rows of ``env``."""
    if episodes < 1:
        raise OptionError(f"episodes={episodes!r} must be at least 1")
    driver = Driver(env, observations, keep=episodes)
    quota = np.full(driver.n, episodes // driver.n)
    quota[: episodes % driver.n] += 1
    player = learner.player(driver.n, seed)
    returns: list[float] = []
    lengths: list[int] = []
    driver.reset(seed)
    running, length = np.zeros(driver.n), np.zeros(driver.n, np.int64)
    while quota.any():
        driver.step(player.act(driver.obs, driver.fresh, deterministic))
        running += driver.rewards * driver.live
        length += driver.live
        ended = np.logical_or(driver.terminated, driver.truncated)
        for row in np.flatnonzero(ended):
            if quota[row] and length[row]:
                quota[row] -= 1
                returns.append(float(running[row]))
                lengths.append(int(length[row]))
        running[ended] = 0.0
        length[ended] = 0
    return Evaluation(tuple(returns), tuple(lengths))
