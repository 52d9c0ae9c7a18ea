"""Agents on a cluster: what it is told to learn, one machine's part of it, and the rows that the driver writes.

A machine pulls one float64 vector, makes a few updates of the synchronous loop in its own environments, and pushes the
difference; the cluster sees to lost machines, repeated messages and checkpoints. The vector holds the parameters, the
sums behind the normalisation, and counters of what was done (`COUNTERS`): all of it adds up. What does not add up, the
best return, travels in the place of a loss.

Hangs. A watchdog thread of Python's own `faulthandler` ends a worker that has not come back from its updates after
``hang_s``; to the cluster that is a lost machine, which is started anew. An environment that raises is made anew in
place, at most ``max_restarts`` times on each machine, and counted.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
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
from headrace.errors import DivergenceError, OptionError, WorkerError
from headrace.types import Learned

if TYPE_CHECKING:
    from headrace.agents.agent import ActorCritic

Array = NDArray[Any]
Report = Callable[[dict[str, Any]], None]
COUNTERS = ("updates", "episodes", "returns", "lengths", "restarts")
LOCAL_STEPS = 4
"""Updates between a pull and a push unless ``push_every`` or the cluster's ``local_steps`` says otherwise. An exchange
takes milliseconds; more updates of several machines summed up are one bold step."""
_ROW_EVERY_S = 0.5
_WINDOW = 100  # episodes of a mean return


@dataclass(frozen=True, kw_only=True)
class AgentWork:
    """An agent as a cluster sees it."""

    spec: Spec
    start: Array
    """The vector that learning starts from, and ends in."""
    total_steps: int | None
    compress: Any = None
    world_size: int = 1
    passes: int | None = None

    @property
    def seed(self) -> int:
        return self.spec.config.seed

    def values(self) -> Tensor:
        return torch.from_numpy(self.start)

    def statistics_from(self) -> int | None:
        return None

    def take(self, vector: Tensor) -> None:
        self.start[:] = vector.numpy()

    def local(self, rank: int) -> AgentSteps:
        return AgentSteps(self, rank)


class AgentSteps:
    """One machine's updates; the `LocalSteps` of headrace.cluster."""

    def __init__(self, work: AgentWork, rank: int) -> None:
        self.work, self.rank = work, rank
        self.spec, self.config = work.spec, work.spec.config
        self.best = -math.inf
        self.done, self.life, self.restarts = 0, 0, 0
        self.counts = np.zeros(len(COUNTERS))
        self._loop: Loop | None = None
        # V-trace: a rollout is acted before the newest parameters are taken over, and learned from after.
        self.late = self.config.correction == "vtrace"

    def resume(self, place: Any) -> None:
        """A later life acts with other noise than the one before."""
        if place is not None:
            self.done = self.life = int(place)

    @property
    def loop(self) -> Loop:
        if self._loop is None:
            self._loop = make_loop(self.spec, self.rank, self.life)
            self._told = 0
        return self._loop

    def advance(self, vector: Tensor, steps: int) -> Learned:
        """Up to ``steps`` updates from ``vector``."""
        loop = self.loop  # making environments and importing what they need is not hanging
        faulthandler.dump_traceback_later(self.config.hang_s, exit=True, file=sys.__stderr__ or 2)
        try:
            acted = self.late and self._act()
            self.counts = unpack(loop, vector.numpy())
            for i in range(steps):
                if not (acted and i == 0):
                    self._act()
                lr = scheduled(self.config.schedule, self.config.lr, self._progress())
                self.loop.update(lr)
                self.counts[COUNTERS.index("updates")] += 1
            self._count_episodes()
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.done += steps
        rows = steps * self.loop.steps_per_update
        best = self.best if math.isfinite(self.best) else 0.0
        result = torch.from_numpy(pack(self.loop, self.counts))
        return Learned(vector=result, steps=steps, rows=rows, loss=best, place=self.done)

    def _progress(self) -> float:
        total = self.work.total_steps
        return float(self.counts[COUNTERS.index("updates")]) / total if total else 0.0

    def _act(self) -> bool:
        """One rollout; an environment that raises is made anew, with the parameters that the loop had."""
        while True:
            try:
                self.loop.collect()
                return True
            except DivergenceError:
                raise  # numbers that are not finite come again
            except WorkerError:
                if self.restarts >= self.config.max_restarts:
                    raise
                self._make_anew()

    def _make_anew(self) -> None:
        before = self.loop
        self._count_episodes()
        self.restarts += 1
        self.life += 1 << 32  # far from the lives that `resume` counts in updates
        self.counts[COUNTERS.index("restarts")] += 1
        vector = pack(before, self.counts)
        self._loop = None
        before.driver.close()
        unpack(self.loop, vector)

    def _count_episodes(self) -> None:
        episodes = self.loop.driver.episodes
        new = episodes.finished - self._told
        self._told = episodes.finished
        if new:
            found = (new, sum(episodes.returns[-new:]), sum(episodes.lengths[-new:]))
            for name, value in zip(("episodes", "returns", "lengths"), found, strict=True):
                self.counts[COUNTERS.index(name)] += value
            self.best = max(self.best, episodes.best)


def pack(loop: Loop, counts: Array) -> Array:
    """Parameters, sums and counters as one float64 vector."""
    sums = [moments.sums for moments in moments_of(loop)]
    return np.concatenate([loop.learner.theta.astype(np.float64), *sums, counts])


def unpack(loop: Loop, vector: Array) -> Array:
    """Take over what `pack` gave; returns the counters."""
    start = loop.learner.theta.size
    loop.learner.set_theta(vector[:start].astype(np.float32))
    for moments in moments_of(loop):
        stop = start + moments.sums.size
        moments.sums[:] = vector[start:stop]
        round_to_32_bits(moments.sums)
        moments.refresh()
        start = stop
    return vector[start:].copy()


class _Rows:
    """Turns what the master tells into rows of metrics, and into the end of the run."""

    def __init__(self, goal: Goal, report: Report, clock: Callable[[], float]) -> None:
        self.goal, self.report, self.clock = goal, report, clock
        self.began_s: float | None = None
        self.next_s = 0.0
        self.before: list[Array] = [np.zeros(len(COUNTERS))]
        self.reported = (0, 0.0)
        self.best = -math.inf
        self.ended: str | None = None

    @property
    def seconds(self) -> float:
        """Since the first updates were merged: starting processes is not learning."""
        return self.clock() - self.began_s if self.began_s is not None else 0.0

    def progress(self, status: dict[str, Any], vector: Callable[[], Any]) -> bool:
        """A few times a second; True ends the run."""
        if self.began_s is None and status["steps"]:
            self.began_s = self.clock()
        for _, best, _ in status["losses"]:
            self.best = max(self.best, best)
        seconds = self.seconds
        if self.ended or seconds < self.next_s or not status["steps"]:
            return self.ended is not None
        self.next_s = seconds + _ROW_EVERY_S
        self.ended = self.row(status["rows"], seconds, vector().numpy()[-len(COUNTERS) :])
        return self.ended is not None

    def last(self, result: Any, counts: Array) -> str:
        """The last row, with how stale merged pushes were; returns why the run ended."""
        pushes = sum(result.staleness.values())
        ended = self.row(
            result.rows, self.seconds, counts, pushes=pushes, staleness_max=max(result.staleness, default=0),
            staleness=sum(age * count for age, count in result.staleness.items()) / max(1, pushes),
            cpu_s=result.cpu_s,
        )  # fmt: skip
        return self.ended or ended or "all workers ended"

    def row(self, steps: int, seconds: float, counts: Array, **more: float) -> str | None:
        """Report; returns why the run is over, or None."""
        self.before.append(np.array(counts))
        done = dict(zip(COUNTERS, counts, strict=True))
        recent = dict(zip(COUNTERS, counts - self._window(done["episodes"]), strict=True))
        episodes = recent["episodes"]
        mean = float(recent["returns"] / episodes) if episodes else math.nan
        length = float(recent["lengths"] / episodes) if episodes else math.nan
        then_steps, then_s = self.reported
        self.reported = (steps, seconds)
        values = row(
            step=steps, seconds=seconds, episodes=round(done["episodes"]), mean=mean, length=length,
            best=self.best if episodes else math.nan, lr=math.nan,
            rate=(steps - then_steps) / max(seconds - then_s, 1e-9),
        )  # fmt: skip
        self.report({**values, **more, "restarts": round(done["restarts"])})
        return self.goal.reached(steps, seconds, round(episodes), mean)

    def _window(self, episodes: float) -> Array:
        """The newest counters that lie at least a window of episodes back: means are of 100 episodes or a few more."""
        place = COUNTERS.index("episodes")
        while len(self.before) > 1 and self.before[1][place] <= episodes - _WINDOW:
            del self.before[0]
        return self.before[0]


def run(agent: ActorCritic, spec: Spec, goal: Goal, report: Report) -> str:
    """Learn on ``agent.cluster`` until the goal is reached; returns why it ended."""
    from headrace.training import run_on_cluster

    loop = Loop(agent.config, agent._driver, agent._learner)
    per_update = spec.config.n_steps * spec.config.n_envs
    total = None if goal.steps is None else max(1, -(-goal.steps // per_update))
    work = AgentWork(spec=spec, start=pack(loop, np.zeros(len(COUNTERS))), total_steps=total)
    rows = _Rows(goal, report, time.monotonic)
    result = run_on_cluster(work, options_of(agent.cluster, spec), rows.progress, steps=total)
    ended = rows.last(result, unpack(loop, work.start))
    plan = agent.plan.with_("local_steps", result.local_steps, "updates of a machine between two exchanges")
    for number, note in enumerate(result.notes):
        plan = plan.with_(f"cluster_note_{number}", True, note)
    agent.plan = plan
    return ended


def options_of(cluster: Any, spec: Spec) -> Any:
    """``cluster=`` as a mapping, with as many updates between two exchanges as agents bear unless it says how many."""
    from headrace.training import asked_of_cluster

    config = spec.config
    steps = (
        1 if config.mode == "asynchronous" else config.push_every if config.push_every > 1 else LOCAL_STEPS
    )
    ours: dict[str, Any] = {"local_steps": steps}
    if config.max_staleness:
        ours["staleness"] = config.max_staleness
    if is_dataclass(cluster):
        return cluster
    try:
        return asked_of_cluster(cluster, ours)
    except OptionError as error:
        raise OptionError(
            f"{error}, or an object whose open_store(values) gives a store with pull() and push(difference)"
        ) from None
