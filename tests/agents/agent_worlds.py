"""Tiny environments whose right answers are known in closed form."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Match(gymnasium.Env):
    """Say which of two lamps is lit; ten questions an episode. Best return 10, guessing 5."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)
    questions = 10

    def _ask(self) -> np.ndarray:
        self.lamp = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.lamp]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.asked = 0
        return self._ask(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.lamp)
        self.asked += 1
        return self._ask(), reward, self.asked >= self.questions, False, {}


class Clock(gymnasium.Env):
    """Reward 1 at every step and one observation for ever; an episode ends after ``length`` steps.

    With a discount of g the value is 1/(1-g) when the end is a time limit, however short the limit is. When the end is
    a termination and ``length`` is 1, the value is 1.
    """

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3, terminates: bool = False) -> None:
        self.length, self.terminates = length, terminates

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= self.length
        return np.ones(1, np.float32), 1.0, over and self.terminates, over and not self.terminates, {}


class Ledger(gymnasium.Env):
    """Every observation is a new number, and ``log`` holds every true transition (s, r, s', terminated, truncated)."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, offset: int, seed: int, p_end: float) -> None:
        self.count, self.p_end = offset, p_end
        self.rng = np.random.default_rng(seed)
        self.log: list[tuple[float, float, float, bool, bool]] = []

    def _number(self) -> np.ndarray:
        self.count += 1
        self.now = np.array([self.count], np.float32)
        return self.now

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._number(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = float(self.now[0])
        terminated, truncated = (bool(x) for x in self.rng.random(2) < self.p_end)
        reward = float(self.rng.normal())
        after = self._number()
        self.log.append((before, np.float32(reward), float(after[0]), terminated, truncated))
        return after, reward, terminated, truncated, {}


class Recall(gymnasium.Env):
    """A lamp is shown once; two dark steps later it must be named. Only a memory does better than 0.5."""

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.lamp = 0, int(self.np_random.integers(2))
        shown = np.zeros(3, np.float32)
        shown[self.lamp] = 1.0
        return shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        dark = np.array([0.0, 0.0, float(self.t == 2)], np.float32)
        over = self.t == 3
        return dark, float(over and action == self.lamp), over, False, {}


class Spaces(gymnasium.Env):
    """Any observation and action space; reward 1 at every step, five steps an episode; checks its actions."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), 1.0, False, self.t >= 5, {}


class Spoiled(Match):
    """`Match` whose ``what`` ("reward" or "observation") is NaN at step ``at`` of every episode."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at = what, at

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.asked == self.at:
            if self.what == "reward":
                reward = float("nan")
            else:
                obs = obs * np.nan
        return obs, reward, terminated, truncated, info


class Breaks(Match):
    """`Match` that raises or hangs at its 300th step, as often as the file ``allowance`` has bytes left."""

    def __init__(self, allowance: str, how: str) -> None:
        self.allowance, self.how, self.total = Path(allowance), how, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.total += 1
        if self.total == 300 and self._spend():
            if self.how == "hang":
                time.sleep(3600)
            if self.how == "die":
                os._exit(9)
            raise RuntimeError("the simulator fell over")
        return super().step(action)

    def _spend(self) -> bool:
        left = self.allowance.stat().st_size
        if left:
            os.truncate(self.allowance, left - 1)
        return bool(left)


def hold_the_lock(store: Any) -> None:
    """Die while holding a store's lock."""
    with store._locked():
        os._exit(7)


class Waits(Match):
    """`Match` that goes on after ``before`` steps only once the file ``gate`` is there."""

    def __init__(self, gate: str, before: int) -> None:
        self.gate, self.left = Path(gate), before

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while not self.left and not self.gate.exists():
            time.sleep(0.01)
        self.left = max(self.left - 1, 0)
        return super().step(action)


class NeverStarts(gymnasium.vector.VectorEnv):
    """A NEXT_STEP vector environment whose every reset step ends again."""

    def __init__(self, n: int = 2) -> None:
        self.num_envs = n
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ones = np.ones(self.num_envs, bool)
        return np.zeros((self.num_envs, 2), np.float32), ones * 1.0, ones, ~ones, {}
