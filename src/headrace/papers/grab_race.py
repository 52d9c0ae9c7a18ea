"""Train one task with several orders, alternating, inside a time budget; keep curves by epoch and by time.

All contestants of a seed begin with the same weights. The budget is cut evenly over tasks and seeds, of which fewer are
run when it is short; a run that meets its end stops after the epoch it is in, and the page shows how far each came.
Time is the CPU time of training alone: measuring the objective is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headrace.order import BalancedSampler
from headrace.papers.grab_tasks import Task

FEWEST_EPOCHS = 6  # an order learned in the first epoch shows from the second on; six make a curve


@dataclass
class Curve:
    """One run: after each epoch."""

    seed: int
    objective: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drift_ratio: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    """What learning the order held, beside one byte per row."""


def race(
    task: Task, contestants: Mapping[str, dict[str, Any]], seeds: int, seconds: float
) -> dict[str, list[Curve]]:
    """Curves of every contestant, all with the same number of epochs within a seed."""
    runs: dict[str, list[Curve]] = {name: [] for name in contestants}
    end = time.monotonic() + seconds
    planned = seeds
    for seed in range(seeds):
        if seed >= planned:
            break
        racers = {name: Racer(task, seed, options) for name, options in contestants.items()}
        stop = time.monotonic() + (end - time.monotonic()) / (planned - seed)
        for epoch in range(task.epochs):
            started = time.monotonic()
            for racer in racers.values():
                racer.epoch(epoch)
            spent = time.monotonic() - started
            if seed == epoch == 0:
                # Fewer seeds rather than curves of one epoch.
                planned = max(1, min(seeds, int(seconds / (spent * min(task.epochs, FEWEST_EPOCHS)))))
                stop = time.monotonic() + (end - time.monotonic()) / planned
            if time.monotonic() + spent > stop:
                break
        for name, racer in racers.items():
            runs[name].append(racer.finish())
        if seed + 1 < seeds and time.monotonic() >= end:
            break
    return runs


class Racer:
    """One contestant's run of one seed."""

    def __init__(self, task: Task, seed: int, options: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        self.task = task
        self.model: nn.Module = task.model()
        self.sampler = BalancedSampler(len(task.train[0]), seed=seed, **options)
        self.sampler.watch(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay
        )
        self.curve = Curve(seed)

    def epoch(self, number: int) -> None:
        task, (x, y) = self.task, self.task.train
        factor, every = task.decay
        for group in self.optimizer.param_groups:
            group["lr"] = task.lr * factor ** (number // every)
        start = time.process_time()
        for rows in torch.tensor(list(self.sampler)).split(task.batch):
            self.optimizer.zero_grad()
            task.loss(self.model(x[rows]), y[rows]).backward()
            if task.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.clip)
            self.optimizer.step()
        before = self.curve.seconds[-1] if self.curve.seconds else 0.0
        self.curve.seconds.append(before + time.process_time() - start)
        with torch.no_grad():
            self.curve.objective.append(self._objective())
            xv, yv = task.valid
            self.curve.score.append(task.score(torch.cat([self.model(part) for part in xv.split(512)]), yv))

    def _objective(self) -> float:
        x, y = self.task.train
        total = 0.0
        for rows in torch.arange(len(x)).split(512):
            total += float(self.task.loss(self.model(x[rows]), y[rows])) * len(rows)
        return total / len(x)

    def finish(self) -> Curve:
        self.sampler.end_epoch()
        learner = self.sampler.order.learner
        self.curve.memory_bytes = learner.bytes() if learner is not None else 0
        self.curve.drift_ratio = self.sampler.drift_ratio
        self.sampler.unwatch()
        return self.curve


def mean_curve(curves: list[Curve], name: str) -> tuple[list[float], list[float], list[float]]:
    """(mean, lowest, highest) over seeds, as far as all seeds came."""
    values = [getattr(curve, name) for curve in curves]
    columns = list(zip(*(v[: min(map(len, values))] for v in values), strict=True))
    return (
        [statistics.mean(c) for c in columns],
        [min(c) for c in columns],
        [max(c) for c in columns],
    )
