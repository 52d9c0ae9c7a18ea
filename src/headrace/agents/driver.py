"""Steps any Gymnasium vector environment and says, for every row, what happened, whatever its autoreset mode.

The three modes differ in what the observation after an ended episode is:

==========  ==============================================  ===============================================
mode        observation returned with the ending step       the step after it
==========  ==============================================  ===============================================
NEXT_STEP   the final one                                   resets; its action is ignored: not a transition
SAME_STEP   the next episode's first; the final is in info  an ordinary transition
DISABLED    the final one; `Driver` then resets the row     an ordinary transition
==========  ==============================================  ===============================================

After `Driver.step`: ``obs`` is what to act on next; ``live`` marks the rows that were transitions; ``fresh`` marks
the rows whose ``obs`` is the first of an episode (None when there are none);
``final_obs`` is None where ``obs`` is itself what the action led to (NEXT_STEP), and otherwise holds the final
observations of the rows ``final_rows``, which are the truncated ones: only they are bootstrapped from.
The environment owns the arrays it returns; they are valid until its next step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.agents.spaces import Observations
from headrace.errors import DataError, WorkerError

Array = NDArray[Any]
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"
_MOST_IDLE_STEPS = 1000  # vector steps in a row without one transition before we say that nothing happens


def autoreset_mode(env: Any) -> tuple[str, bool]:
    """The environment's autoreset mode, and whether it said so itself."""
    metadata = getattr(env, "metadata", None) or {}
    mode = metadata.get("autoreset_mode") or getattr(env, "autoreset_mode", None)
    if mode is None:
        return NEXT_STEP, False
    name = str(getattr(mode, "value", mode)).replace("_", "").lower()
    for known in (NEXT_STEP, SAME_STEP, DISABLED):
        if name == known.lower():
            return known, True
    raise DataError(
        f"the environment's autoreset mode is {mode!r}; NextStep, SameStep and Disabled are known"
    )


class Episodes:
    """Returns and lengths of finished episodes, from the environment's own rewards.

    Never normalised, never clipped: what a reader would add up by hand.
    """

    def __init__(self, n_envs: int, keep: int = 100) -> None:
        self.keep = keep
        self.running_n = np.zeros(n_envs)
        self.length_n = np.zeros(n_envs, np.int64)
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.best = -np.inf
        self.finished = 0
        self.empty = 0
        """Episodes that ended before their first transition."""

    def add(self, rewards: Array, live: Array, ended: Array) -> None:
        """Count one vector step; ``ended`` may include rows that are not ``live``."""
        self.running_n += rewards * live
        self.length_n += live
        if ended.any():
            self._finish(np.flatnonzero(ended))

    def _finish(self, rows: Array) -> None:
        for row in rows:
            if self.length_n[row]:
                self.returns.append(float(self.running_n[row]))
                self.lengths.append(int(self.length_n[row]))
                self.finished += 1
                self.best = max(self.best, self.returns[-1])
            else:
                self.empty += 1
        self.running_n[rows] = 0.0
        self.length_n[rows] = 0
        if len(self.returns) > 4 * self.keep:
            del self.returns[: -self.keep], self.lengths[: -self.keep]

    @property
    def mean(self) -> float:
        """Mean return of the last ``keep`` episodes; NaN before the first has finished."""
        return float(np.mean(self.returns[-self.keep :])) if self.returns else float("nan")

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths[-self.keep :])) if self.lengths else float("nan")


class Driver:
    """One vector environment, stepped."""

    def __init__(self, env: Any, observations: Observations, keep: int = 100) -> None:
        self.env = env
        self.n = int(env.num_envs)
        self.mode, self.mode_is_declared = autoreset_mode(env)
        self.observations = observations
        self.episodes = Episodes(self.n, keep)
        self.steps = 0
        """Vector steps taken."""
        self.obs: Any = None
        self.rewards = np.zeros(self.n, np.float32)
        self.terminated = np.zeros(self.n, bool)
        self.truncated = np.zeros(self.n, bool)
        self._all = np.ones(self.n, bool)
        self.live = self._all
        self.fresh: Array | None = None
        self.final_rows: Array | None = None
        self.final_obs: Any = None
        self._resetting = np.zeros(self.n, bool)
        self._idle = 0

    def reset(self, seed: int | None) -> None:
        """Start every episode anew."""
        try:
            self.obs, _ = self.env.reset(seed=seed)
        except Exception as error:
            raise self._failure("its reset", error) from error
        self._resetting = np.zeros(self.n, bool)
        self.fresh = self._all
        self.episodes.running_n[:] = 0.0
        self.episodes.length_n[:] = 0

    def step(self, actions: Array) -> None:
        """Take one vector step."""
        try:
            self.obs, rewards, self.terminated, self.truncated, info = self.env.step(actions)
        except Exception as error:
            raise self._failure(f"vector step {self.steps}", error) from error
        self.steps += 1
        self.rewards = np.asarray(rewards, np.float32)
        ended = np.logical_or(self.terminated, self.truncated)
        self.final_rows = self.fresh = None
        if self.mode == NEXT_STEP:
            self._skip_resets(ended)
        elif ended.any():
            self.fresh = ended
            self._end_rows(ended, info)
        self.episodes.add(self.rewards, self.live, ended)

    def _skip_resets(self, ended: Array) -> None:
        self.live = self._all
        if self._resetting.any():
            self.fresh = self._resetting
            self.live = np.logical_not(self._resetting)
        self._resetting = ended
        # A row whose reset step ends again never has a transition; without this count we would spin for ever.
        self._idle = 0 if self.live.any() else self._idle + 1
        if self._idle > _MOST_IDLE_STEPS:
            raise DataError(
                f"every episode of {self.env} ends at its reset: {_MOST_IDLE_STEPS} vector steps gave no transition; "
                "check that reset() returns a state from which a step can be taken"
            )

    def _end_rows(self, ended: Array, info: dict[str, Any]) -> None:
        rows = np.flatnonzero(np.logical_and(self.truncated, np.logical_not(self.terminated)))
        if rows.size:
            self.final_rows = rows
            self.final_obs = self._final(rows, info)
        if self.mode == DISABLED:
            self.obs, _ = self.env.reset(options={"reset_mask": ended})

    def _final(self, rows: Array, info: dict[str, Any]) -> Any:
        if self.mode == DISABLED:
            return _take(self.obs, rows)
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            raise DataError(
                f"{self.env} resets in the same step but gave no final_obs in info, so that a truncated episode "
                "cannot be bootstrapped; use AutoresetMode.NEXT_STEP or return the final observations"
            )
        if isinstance(final, dict) or final.dtype != object:
            return _take(final, rows)
        return self.observations.stack(list(final[rows]))

    def _failure(self, where: str, error: Exception) -> WorkerError:
        return WorkerError(
            f"the environment {self.env} raised {type(error).__name__} in {where}: {error}; "
            "with workers=2 or more a failing worker is restarted"
        )

    def close(self) -> None:
        self.env.close()


def _take(obs: Any, rows: Array) -> Any:
    if isinstance(obs, dict):
        return {key: _take(part, rows) for key, part in obs.items()}
    return np.array(obs[rows])
