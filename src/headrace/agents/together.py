"""Learning on a cluster: every machine runs the synchronous loop, and pushes what became of the parameters.

What travels is one flat float64 vector: the parameters, the sums behind the normalisation, and counts of finished
episodes. All of it is additive, so that differences of several machines may be summed; one machine that pushes after
every update computes what the synchronous mode computes, to the last bit. A machine that was lost begins new episodes.

A cluster's step is one update: ``n_steps`` × ``n_envs`` steps of the environments, which count as its rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.agents.config import scheduled
from headrace.agents.exchange import moments_of
from headrace.agents.goal import Goal, row
from headrace.agents.loop import Loop
from headrace.agents.moments import round_to_32_bits
from headrace.agents.worker import Spec, make_loop
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.agents.agent import ActorCritic

COUNTS = 3
"""At the vector's end: finished episodes, the sum of their returns, the sum of their lengths."""
RECENT = 100
"""Episodes behind a mean return, as everywhere."""
_ROW_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a machine did with the updates it was granted; what `headrace.cluster` calls a Done."""

    vector: Tensor
    steps: int
    rows: int
    loss: float
    place: Any
    decay: float = 1.0
    finished: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentWork:
    """An agent as a cluster sees it."""

    spec: Spec
    vector: NDArray[np.float64]
    total_steps: int | None
    passes: int | None = None
    compress: Any = None
    seed: int = 0
    world_size: int = 1

    def values(self) -> Tensor:
        return torch.from_numpy(self.vector)

    def statistics_from(self) -> int | None:
        return None

    def take(self, vector: Tensor) -> None:
        self.vector[:] = vector.numpy()

    def local(self, rank: int) -> AgentSteps:
        return AgentSteps(self, rank)


class AgentSteps:
    """One machine's learning; the `LocalSteps` of headrace.cluster."""

    def __init__(self, work: AgentWork, rank: int) -> None:
        self.work, self.rank, self.life, self.rows = work, rank, 0, 0
        self.loop: Loop | None = None
        self.began_s = time.monotonic()

    def resume(self, place: Any) -> None:
        if place is not None:
            self.life, self.rows = int(place["life"]) + 1, int(place["rows"])
        self.loop = make_loop(self.work.spec, self.rank, self.life)

    def advance(self, vector: Tensor, steps: int) -> Played:
        """So many updates from ``vector``."""
        assert self.loop is not None
        loop, config = self.loop, self.work.spec.config
        values = vector.numpy()
        adopt(loop, values)
        episodes, losses = loop.driver.episodes, {}
        before = episodes.finished
        for update in range(steps):
            loop.collect()
            done = self.work.spec.goal.progress(
                self.rows * self.work.world_size, time.monotonic() - self.began_s
            )
            rate = scheduled(config.schedule, config.lr, done)
            losses = loop.update(rate, report=update + 1 == steps)
            self.rows += loop.steps_per_update
        new = episodes.finished - before
        counts = values[-COUNTS:].copy()
        if new:  # more than the episodes that are kept cannot end between two pushes of a sensible B
            counts += (new, np.mean(episodes.returns[-new:]) * new, np.mean(episodes.lengths[-new:]) * new)
        return Played(
            vector=torch.from_numpy(np.concatenate([parts_of(loop), counts])),
            steps=steps,
            rows=steps * loop.steps_per_update,
            loss=float(sum(losses.values())),
            place={"life": self.life, "rows": self.rows},
        )


def parts_of(loop: Loop) -> NDArray[np.float64]:
    """A loop's parameters and sums, one after the other."""
    sums = [moments.sums for moments in moments_of(loop)]
    return np.concatenate([loop.learner.theta.astype(np.float64), *sums])


def adopt(loop: Loop, values: NDArray[Any]) -> None:
    """The inverse of `parts_of`; what follows is left alone."""
    start = loop.learner.theta.size
    loop.learner.set_theta(values[:start].astype(np.float32))
    for moments in moments_of(loop):
        moments.sums[:] = values[start : start + moments.sums.size]
        round_to_32_bits(moments.sums)
        moments.refresh()
        start += moments.sums.size


def run(agent: ActorCritic, goal: Goal, report: Callable[[dict[str, Any]], None]) -> str:
    """Learn on ``agent.cluster`` until the goal is reached; returns why it ended."""
    from headrace.training import run_on_cluster

    config = dataclasses.replace(agent.config, workers=1, mode="synchronous")
    if config.correction != "none":
        raise OptionError(
            f"correction={config.correction!r} and cluster= do not go together; leave out one of them"
        )
    spec = Spec(
        config=config, goal=goal, env=agent.env, env_options=agent.env_options, vectorization=agent.vectorization,
        optimizer=agent.optimizer, module=agent.module,
    )  # fmt: skip
    loop = Loop(config, agent._driver, agent._learner)
    a_step = loop.steps_per_update
    total = None if goal.steps is None else math.ceil(goal.steps / a_step)
    vector = np.concatenate([parts_of(loop), np.zeros(COUNTS)])
    work = AgentWork(spec=spec, vector=vector, total_steps=total, seed=config.seed)
    watch = _Watch(goal, report)
    try:
        agent.cluster_ = run_on_cluster(work, agent.cluster, watch.progress, steps=total, additive=True)
    finally:
        adopt(loop, vector)
    watch.look(agent.cluster_.rows, agent.cluster_.workers, agent.cluster_.staleness, vector, last=True)
    return watch.ended or f"{agent.cluster_.rows} steps were made"


class _Watch:
    """Follows a run: rows of metrics, and when the goal is reached."""

    def __init__(self, goal: Goal, report: Callable[[dict[str, Any]], None]) -> None:
        self.goal, self.report = goal, report
        self.began_s: float | None = None
        self.ended: str | None = None
        self.counted = np.zeros(COUNTS)
        self.recent: deque[tuple[float, float, float]] = deque()
        self.best = math.nan
        self.reported = (0, 0.0)

    def progress(self, status: dict[str, Any], vector: Callable[[], Tensor]) -> bool:
        if self.began_s is None:
            # Processes that start are not learning.
            self.began_s = time.monotonic() if status["rows"] else None
        elif time.monotonic() - self.began_s > self.reported[1] + _ROW_EVERY_S:
            self.look(status["rows"], status["members"], status["staleness"], vector().numpy())
        return self.ended is not None

    def look(
        self, rows: int, members: Any, ages: dict[int, int], values: NDArray[Any], *, last: bool = False
    ) -> None:
        seconds = 0.0 if self.began_s is None else time.monotonic() - self.began_s
        counts = values[-COUNTS:]
        new, self.counted = counts - self.counted, counts.copy()
        if new[0] > 0.5:
            self.recent.append((float(new[0]), float(new[1]), float(new[2])))
            while sum(n for n, _, _ in self.recent) - self.recent[0][0] >= RECENT:
                self.recent.popleft()
        episodes = sum(n for n, _, _ in self.recent)
        mean = sum(r for _, r, _ in self.recent) / episodes if episodes else math.nan
        length = sum(n for _, _, n in self.recent) / episodes if episodes else math.nan
        self.ended = self.ended or self.goal.reached(rows, seconds, round(episodes), mean)
        then_rows, then_s = self.reported
        self.reported = (rows, seconds)
        told: dict[str, Any] = row(
            step=rows, seconds=seconds, episodes=round(float(counts[0])), mean=mean, best=math.nan, length=length,
            lr=math.nan, rate=(rows - then_rows) / max(seconds - then_s, 1e-9),
        )  # fmt: skip
        pushes = sum(ages.values())
        if pushes:
            told["staleness"] = sum(age * count for age, count in ages.items()) / pushes
            told["staleness_max"], told["pushes"] = max(ages), pushes
        told["restarts"] = sum(life - 1 for *_, life in members.values())
        if last and pushes:
            told["staleness_counts"] = [ages.get(age, 0) for age in range(max(ages) + 1)]
        self.report(told)
