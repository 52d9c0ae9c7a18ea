"""What a worker pulls and pushes, and what it does with it.

A worker keeps ``base``, what the store held for it after its last exchange, and learns locally. At an exchange it
pulls, pushes ``own - base``, and goes on from pulled + difference. The store counts pushes, so the count pulled
now less the count after the last exchange is the *staleness*: how many updates by others the difference has missed.
Low is good; it is about the number of other workers when all are equally fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.agents.loop import Loop
from headrace.agents.moments import RunningMoments, round_to_32_bits
from headrace.types import ParameterStore

Array = NDArray[Any]
THETA, PUSHES = "theta", "pushes"


def moments_of(loop: Loop) -> list[RunningMoments]:
    """All running sums of a loop, in a fixed order."""
    scale = [loop.reward_scale.moments] if loop.reward_scale is not None else []
    return [*loop.learner.moment_list, *scale]


def shared_values(loop: Loop) -> dict[str, Array]:
    """What the store starts with."""
    sums = {f"sums.{i}": moments.sums for i, moments in enumerate(moments_of(loop))}
    return {THETA: loop.learner.theta, PUSHES: np.zeros(1), **sums}


class Exchange:
    """One worker's side of the store."""

    def __init__(self, loop: Loop, store: ParameterStore, push_scale: float, max_staleness: int) -> None:
        self.loop, self.store = loop, store
        self.push_scale, self.max_staleness = push_scale, max_staleness
        self.moments = moments_of(loop)
        self.pushes = 0
        self.base = self._pull()
        self._seen = float(self.base[PUSHES][0])
        self._adopt(self.base)

    def _pull(self) -> dict[str, Array]:
        return {name: tensor.numpy() for name, tensor in self.store.pull().items()}

    def _adopt(self, values: dict[str, Array]) -> None:
        """Take over ``values``, rounded as the worker's own numbers are, and remember them as the base."""
        theta = values[THETA].astype(np.float32)
        self.loop.learner.set_theta(theta)
        self.base[THETA] = theta.astype(np.float64)
        for i, moments in enumerate(self.moments):
            moments.sums[:] = values[f"sums.{i}"]
            round_to_32_bits(moments.sums)
            moments.refresh()
            self.base[f"sums.{i}"] = moments.sums.copy()

    def exchange(self) -> int:
        """Pull, push the difference, go on from the sum; returns the staleness."""
        difference = self._difference()
        pulled = self._pull()
        staleness = int(pulled[PUSHES][0] - self._seen)
        scale = self.push_scale * staleness_scale(staleness, self.max_staleness)
        if scale != 1.0:
            difference[THETA] *= scale
        difference[PUSHES] = np.ones(1)
        self.store.push({name: torch.from_numpy(change) for name, change in difference.items()})
        for name, change in difference.items():
            pulled[name] += change
        self._seen = float(pulled[PUSHES][0])
        self.pushes += 1
        self._adopt(pulled)
        return staleness

    def _difference(self) -> dict[str, Array]:
        found: dict[str, Array] = {THETA: self.loop.learner.theta.astype(np.float64) - self.base[THETA]}
        for i, moments in enumerate(self.moments):
            found[f"sums.{i}"] = moments.sums - self.base[f"sums.{i}"]
        return found

    def refresh_before_learning(self) -> None:
        """Take in the others' updates between acting and learning (for V-trace, which corrects for it).

        The local difference so far must have been pushed, or it would be lost.
        """
        pulled = self._pull()
        self._seen = float(pulled[PUSHES][0])
        self._adopt(pulled)


def staleness_scale(staleness: int, most: int) -> float:
    """What a difference is multiplied with: 1 up to ``most``, then inversely to its staleness; ``most=0`` is off."""
    return 1.0 if most == 0 or staleness <= most else most / staleness
