"""How many workers pay, by simulation with measured times: throughput on the fake clock, without training.

The real machine and the real conversation run; only the local steps are empty and take made-up time. So the curve
holds what waiting, delays and a busy master cost, and nothing of what stale steps lose in quality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.transport import Conversation, Service, converse
from headrace.types import Learned


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured seconds."""

    step_s: float
    """One local step."""
    message_s: float
    """A pull or a push, one way, over the link."""
    merge_s: float
    """The master's own time for one push."""
    spread: float = 0.2
    """Steps take up to this share longer at random."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of a simulated cluster."""

    workers: int
    speed_up: float
    """Steps per second beside one worker that never communicates."""
    staleness: float
    """Mean age of a merged push in versions; about workers − 1 when nothing else slows it."""


class EmptySteps:
    """`LocalSteps` that change nothing, for so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def resume(self, place: Any) -> None:
        """Nothing to go back to."""

    def advance(self, vector: Tensor, steps: int) -> Learned:
        taken = min(steps, self.left)
        self.left -= taken
        return Learned(vector=vector, steps=taken, rows=taken, loss=0.0, finished=self.left == 0)


def speed_up(
    costs: Costs, workers: int, *, local_steps: int, accept: int = 1, pushes: int = 40, seed: int = 0
) -> Point:
    """The throughput of a cluster of this size, over ``pushes`` pushes of each worker."""
    steps = local_steps * pushes
    options = MasterOptions(accept=accept, local_steps=local_steps, checkpoint_every=10**9)
    service = Service(Master(options), Holder(torch.zeros(1)))
    conditions = Conditions(
        step_s=costs.step_s,
        spread=costs.spread,
        delay_s=(costs.message_s, costs.message_s),
        merge_s=costs.merge_s,
        retry_s=1e8,
    )

    def start(name: str, life: int) -> Conversation:
        return converse(name, life, EmptySteps(steps), Compressor())

    taken_s = Simulation(
        service, start, [f"w{i}" for i in range(workers)], conditions, seed, max_s=float("inf")
    ).run()
    alone_s = workers * steps * costs.step_s * (1 + costs.spread / 2)
    ages = service.master.staleness
    mean = sum(age * count for age, count in ages.items()) / max(1, ages.total())
    return Point(workers=workers, speed_up=alone_s / taken_s, staleness=mean)
