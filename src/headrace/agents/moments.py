"""Running means and variances of observations, and the running scale of rewards.

Both are kept as *sums* (count, sum, sum of squares) in float64: sums of several workers add up, so they travel
between workers like parameters do. They are changed between rollouts only, so that one rollout sees one scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_EPSILON = 1e-8
_LIMIT = np.float32(
    10.0
)  # normalised values are clipped to ±this, as every implementation since Baselines does


def round_to_32_bits(sums: Array) -> None:
    """Keep 32 bits of each float64's 53, in place (Veltkamp's splitting).

    Workers add differences of sums to a store: v + (u - v). With 32-bit numbers that is u again after rounding, as long
    as u is not a million times smaller than v, so that one worker alone computes what the synchronous mode
    computes, to the last bit. Means keep nine digits.
    """
    scaled = sums * (2.0**21 + 1.0)
    np.subtract(scaled, scaled - sums, out=sums)


class RunningMoments:
    """Mean and standard deviation of ``width`` columns; ``sums`` is [count, sums…, sums of squares…]."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.sums = np.zeros(1 + 2 * width)
        self.mean = np.zeros(width, np.float32)
        self.inverse_std = np.ones(width, np.float32)

    def add(self, rows: Array) -> None:
        """Count in (rows, width) values; the scale changes only with `refresh`."""
        rows = rows.astype(np.float64, copy=False)
        self.sums[0] += len(rows)
        self.sums[1 : 1 + self.width] += rows.sum(0)
        self.sums[1 + self.width :] += (rows * rows).sum(0)
        round_to_32_bits(self.sums)

    def take(self, other: RunningMoments) -> None:
        """Count and scale as ``other`` does."""
        self.sums[:], self.mean[:], self.inverse_std[:] = other.sums, other.mean, other.inverse_std

    def refresh(self) -> None:
        """Use what was counted from now on."""
        count = self.sums[0]
        if count < 2:
            return
        mean = self.sums[1 : 1 + self.width] / count
        variance = np.maximum(self.sums[1 + self.width :] / count - mean * mean, 0.0)
        self.mean[:] = mean
        self.inverse_std[:] = 1.0 / np.sqrt(variance + _EPSILON)

    def apply(self, rows: Array) -> None:
        """Normalise (…, width) values in place."""
        rows -= self.mean
        rows *= self.inverse_std
        np.clip(rows, -_LIMIT, _LIMIT, out=rows)


class RewardScale:
    """Divides rewards by the running standard deviation of the discounted return.

    Rewards are not shifted: a shift would change which policy is best in tasks whose episodes can end.
    """

    def __init__(self, n_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self._running_n = np.zeros(n_envs)

    def add(self, rewards_tn: Array, ended_tn: Array, live_tn: Array) -> None:
        """Count in one rollout."""
        seen = np.zeros(rewards_tn.shape)
        for t in range(len(rewards_tn)):
            self._running_n = self._running_n * self.gamma + rewards_tn[t]
            seen[t] = self._running_n
            self._running_n[ended_tn[t]] = 0.0
        self.moments.add(seen[live_tn][:, None])
        self.moments.refresh()

    def apply(self, rewards_tn: Array) -> Array:
        scaled: Array = rewards_tn * self.moments.inverse_std[0]
        np.clip(scaled, -_LIMIT, _LIMIT, out=scaled)
        return scaled
