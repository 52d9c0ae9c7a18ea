"""When a run ends, and how far it is. Pure: given numbers, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import OptionError

_FEWEST_EPISODES = 20  # a mean of fewer may reach a target by luck


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A run ends at whichever comes first."""

    steps: int | None = None
    """Environment steps, all environments and workers together."""
    seconds: float | None = None
    target_return: float | None = None
    """Mean return of the last 100 episodes (at least 20 of them)."""

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None and self.target_return is None:
            raise OptionError("learn() needs an end: give steps=, seconds= or target_return=")
        if self.steps is not None and self.steps < 1:
            raise OptionError(f"steps={self.steps!r} must be at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise OptionError(f"seconds={self.seconds!r} must be above 0")

    def progress(self, steps: int, seconds: float) -> float:
        """The share of the run that is done, 0 to 1; 0 while nothing but a target bounds it.

        Only steps count when they are given, so that a run that is bounded by steps does not depend on a clock.
        """
        if self.steps is not None:
            return min(1.0, steps / self.steps)
        return min(1.0, seconds / self.seconds) if self.seconds is not None else 0.0

    def reached(self, steps: int, seconds: float, episodes: int, mean_return: float) -> str | None:
        """Why the run is over, or None."""
        if (
            self.target_return is not None
            and episodes >= _FEWEST_EPISODES
            and mean_return >= self.target_return
        ):
            return f"the mean return reached {mean_return:g}"
        if self.steps is not None and steps >= self.steps:
            return f"{steps} steps were made"
        if self.seconds is not None and seconds >= self.seconds:
            return f"{seconds:.0f} seconds have passed"
        return None


def row(
    *,
    step: int,
    seconds: float,
    episodes: int,
    mean: float,
    best: float,
    length: float,
    lr: float,
    rate: float,
) -> dict[str, float]:
    """One row of metrics; what is not known yet is left out."""
    values = {
        "step": step,
        "seconds": round(seconds, 4),
        "examples": step,
        "episodes": episodes,
        "return": mean,
        "best_return": best,
        "episode_length": length,
        "lr": lr,
        "steps_per_s": rate,
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}
