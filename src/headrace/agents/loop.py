"""One learner's life: collect a rollout, learn from it, again. Synchronous, seeded, without a clock.

Invariant: the result depends on the configuration, the seed, the environment and the rates passed to `update`, on
nothing else. The synchronous mode and every worker of the other modes run this same loop.
"""

from __future__ import annotations

import numpy as np

from headrace.agents.config import Config
from headrace.agents.driver import Driver
from headrace.agents.moments import RewardScale
from headrace.agents.rollout import Learner, Rollout


class Loop:
    """A driver, a learner, and the rollout between them."""

    def __init__(self, config: Config, driver: Driver, learner: Learner) -> None:
        self.config, self.driver, self.learner = config, driver, learner
        self.rollout = Rollout(config.n_steps, driver.n)
        self.reward_scale = RewardScale(driver.n, config.gamma) if config.normalize_rewards else None
        self.steps_per_update = config.n_steps * driver.n
        self.updates = 0

    def collect(self) -> None:
        """Act for one rollout."""
        self.act_rollout(self.learner, self.rollout)

    def act_rollout(self, learner: Learner, rollout: Rollout) -> None:
        """Act for one rollout with ``learner``, into ``rollout``."""
        driver = self.driver
        rollout.finals.clear()
        learner.begin(driver)
        for t in range(self.config.n_steps):
            driver.step(learner.act(t))
            rollout.put(t, driver, learner)
            learner.see(t, driver)
        learner.finish()
        rollout.check(learner, driver.steps - self.config.n_steps)

    def finish(self) -> None:
        """Called when a run ends; there is nothing under way here."""

    def update(self, lr: float, report: bool = False) -> dict[str, float]:
        """Learn from the rollout that was collected last."""
        rollout, config = self.rollout, self.config
        rewards = rollout.rewards
        if config.clip_rewards:
            rewards = np.clip(rewards, -config.clip_rewards, config.clip_rewards)
        if self.reward_scale is not None:
            rewards = self._scaled(rewards)
        batch = rollout.batch(self.learner, config, rewards)
        self.updates += 1
        losses = self.learner.learn(batch, lr, report) if batch is not None else {}
        self.learner.count_moments(rollout.live)
        return losses

    def _scaled(self, rewards: np.ndarray) -> np.ndarray:
        assert self.reward_scale is not None
        ended = np.logical_or(self.rollout.terminated, self.rollout.truncated)
        self.reward_scale.add(rewards, ended, self.rollout.live)
        return self.reward_scale.apply(rewards)
