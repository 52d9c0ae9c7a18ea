"""What one rollout leaves for learning, in memory that is allocated once.

Shapes: t steps, n environments. `Rollout.put` is called after every vector step and copies four rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.agents.config import Config
from headrace.agents.driver import Driver
from headrace.agents.moments import RunningMoments
from headrace.agents.returns import gae, vtrace
from headrace.errors import DivergenceError

Array = NDArray[Any]


class Player(Protocol):
    """Acts outside of learning: for evaluation, recording and `predict`."""

    def act(self, obs: Any, fresh: Array | None, deterministic: bool) -> Array:
        """Actions for a batch; ``fresh`` marks the first observations of episodes."""
        ...


class Learner(Protocol):
    """A network with its memory of one rollout: acts from it, and learns from it.

    `theta` is what workers share: all parameters, flat.
    """

    values: Array
    """Values of the observations of steps 0..t, (t+1, n); complete after `finish`."""
    moment_list: list[RunningMoments]

    @property
    def theta(self) -> Array:
        """All parameters, flat."""
        ...

    def set_theta(self, theta: Array) -> None:
        """Take over parameters."""
        ...

    def begin(self, driver: Driver) -> None:
        """Start a rollout at the driver's present observation."""
        ...

    def act(self, t: int) -> Array:
        """Choose step ``t``'s actions, as the environment wants them."""
        ...

    def see(self, t: int, driver: Driver) -> None:
        """Take in the observation that follows step ``t``."""
        ...

    def finish(self) -> None:
        """Value the last observation."""
        ...

    def values_of(self, obs: Any, rows: Array) -> Array:
        """Values of final observations of the environments ``rows``."""
        ...

    def refresh(self) -> Array:
        """Values and log probabilities under the present parameters; returns log ratios to the acting ones."""
        ...

    def player(self, count: int, seed: int) -> Player:
        """Something that acts with the present parameters in ``count`` environments."""
        ...

    def to_named(self) -> dict[str, Array]:
        """Copies of the parameters by name."""
        ...

    def from_named(self, named: dict[str, Array]) -> None:
        """Take over parameters that `to_named` gave."""
        ...

    def start(self, seed: list[int]) -> None:
        """Seed the sampling and draw the first parameters."""
        ...

    def learn(self, batch: Batch, lr: float, report: bool) -> dict[str, float]:
        """One update; with ``report`` its losses are returned."""
        ...

    def count_moments(self, live_tn: Array) -> None:
        """Count the rollout's observations into the normalisation."""
        ...

    def bad_step(self, live_tn: Array) -> tuple[int, int] | None:
        """The first step and environment whose observation is not finite."""
        ...


@dataclass(frozen=True)
class Batch:
    """What the loss needs besides the learner's own memory, all (t, n) float32."""

    advantages: Array
    targets: Array
    weights: Array
    """1/(number of transitions) for a transition, 0 for a row that is none."""


class Rollout:
    """Rewards and endings of ``t`` steps of ``n`` environments."""

    def __init__(self, steps: int, n: int) -> None:
        self.rewards = np.zeros((steps, n), np.float32)
        self.terminated = np.zeros((steps, n), bool)
        self.truncated = np.zeros((steps, n), bool)
        self.live = np.ones((steps, n), bool)
        self.finals: list[tuple[int, Array, Array]] = []
        """(step, environments, values of their final observations)."""

    def put(self, t: int, driver: Driver, learner: Learner) -> None:
        """Record what step ``t`` gave."""
        self.rewards[t] = driver.rewards
        self.terminated[t] = driver.terminated
        self.truncated[t] = driver.truncated
        self.live[t] = driver.live
        if driver.final_rows is not None:
            values = learner.values_of(driver.final_obs, driver.final_rows)
            self.finals.append((t, driver.final_rows, values))

    def next_values(self, values: Array) -> Array:
        """Values of what each action led to, given the values of steps 0..t."""
        following: Array = values[1:].copy()
        for t, rows, final in self.finals:
            following[t, rows] = final
        return following

    def batch(self, learner: Learner, config: Config, rewards: Array) -> Batch | None:
        """Advantages, targets and weights; None when no row was a transition."""
        count = int(np.count_nonzero(self.live))
        if not count:
            return None
        weights = self.live * np.float32(1.0 / count)
        if config.correction == "vtrace":
            ratios = learner.refresh()
            advantages, targets = vtrace(
                rewards, learner.values[:-1], self.next_values(learner.values), self.terminated, self.truncated,
                ratios, config.gamma, config.gae_lambda, config.rho_bar, config.c_bar,
            )  # fmt: skip
        else:
            advantages, targets = gae(
                rewards, learner.values[:-1], self.next_values(learner.values), self.terminated, self.truncated,
                config.gamma, config.gae_lambda,
            )  # fmt: skip
        return Batch(advantages, targets, weights)

    def check(self, learner: Learner, first_step: int) -> None:
        """Refuse rewards and observations that are not finite, naming where they came from.

        Looked at once per rollout: a sum is finite only if everything in it is.
        """
        if not np.isfinite(self.rewards.sum()):
            t, n = (int(i) for i in np.argwhere(~np.isfinite(self.rewards))[0])
            raise DivergenceError(
                f"environment {n} gave the reward {self.rewards[t, n]} at vector step {first_step + t}; "
                "rewards must be finite numbers"
            )
        bad = learner.bad_step(self.live)
        if bad is not None:
            raise DivergenceError(
                f"environment {bad[1]} gave an observation that is not finite at vector step {first_step + bad[0]}; "
                "observations must be finite numbers"
            )
