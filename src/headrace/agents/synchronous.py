"""The synchronous mode: one learner in this process, until the goal is reached.

A run that is bounded by steps looks at no clock but to report, so equal seeds give equal parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.agents.build import is_handwritten
from headrace.agents.config import Config, scheduled
from headrace.agents.goal import Goal, row
from headrace.agents.loop import Loop

Report = Callable[[dict[str, Any]], None]
_ROWS = 200
"""Rows of metrics in a run that is bounded by steps: one per pixel or two of a plot."""
_ROW_EVERY_S = 0.5


def run(config: Config, loop: Loop, goal: Goal, report: Report) -> str:
    """Learn until the goal is reached; returns why it ended."""
    try:
        with _one_thread() if is_handwritten(config) else contextlib.nullcontext():
            return _Run(config, loop, goal, report).go()
    finally:
        loop.finish()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Small networks gain nothing from several threads, and threads that wait for one another burn processor time.

    Seen on two cores that others used too: 5,200 steps per CPU-second with torch's default, 62,000 with one thread.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    before = torch.get_num_threads()
    with threadpool_limits(1, user_api="blas"):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Run:
    def __init__(self, config: Config, loop: Loop, goal: Goal, report: Report) -> None:
        self.config, self.loop, self.goal, self.report = config, loop, goal, report
        self.started, self.started_cpu = time.perf_counter(), time.process_time()
        self.steps = 0
        # The clock decides about rows only where steps do not bound the run.
        self.row_every = max(1, goal.steps // (loop.steps_per_update * _ROWS)) if goal.steps else None
        self.next_row_s = _ROW_EVERY_S
        self.reported = (0, 0.0)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def go(self) -> str:
        episodes, updates = self.loop.driver.episodes, 0
        finished_before = episodes.finished
        lr = self.config.lr
        while True:
            self.loop.collect()
            # Progress before this rollout, as a worker knows it: the first update runs at the full rate.
            seconds = self.seconds if self.goal.steps is None or self.goal.seconds is not None else 0.0
            lr = scheduled(self.config.schedule, self.config.lr, self.goal.progress(self.steps, seconds))
            self.steps += self.loop.steps_per_update
            updates += 1
            due = self._due(updates)
            losses = self.loop.update(lr, report=due)
            mean = episodes.mean if self.goal.target_return is not None else 0.0
            ended = self.goal.reached(self.steps, seconds, episodes.finished - finished_before, mean)
            if due or ended:
                self._row(lr, losses)
            if ended:
                return ended

    def _due(self, updates: int) -> bool:
        if self.row_every is not None:
            return updates % self.row_every == 0
        if self.seconds < self.next_row_s:
            return False
        self.next_row_s = self.seconds + _ROW_EVERY_S
        return True

    def _row(self, lr: float, losses: dict[str, float]) -> None:
        episodes, seconds = self.loop.driver.episodes, self.seconds
        then_steps, then_s = self.reported
        self.reported = (self.steps, seconds)
        values = row(
            step=self.steps, seconds=seconds, episodes=episodes.finished, mean=episodes.mean, best=episodes.best,
            length=episodes.mean_length, lr=lr, rate=(self.steps - then_steps) / max(seconds - then_s, 1e-9),
        )  # fmt: skip
        cpu_s = time.process_time() - self.started_cpu
        self.report({**values, **losses, "cpu_s": round(cpu_s, 4)})
