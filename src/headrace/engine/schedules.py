"""Step-size schedules: pure functions from the update's number to a factor on the step size.

``plateau`` alone has memory; it is a small record that the loop feeds with one loss per epoch.
Warm-up is linear and belongs to every schedule: ``warmup=100`` updates, or ``warmup=0.05`` of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import OptionError, unknown
from headrace.types import State

SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "step": {"gamma": 0.1, "every": None, "milestones": None},
    "cosine": {"floor": 0.0},
    "onecycle": {"rise": 0.3, "start_div": 25.0, "end_div": 1e4},
    "plateau": {"gamma": 0.1, "patience": 3, "threshold": 1e-4, "floor": 0.0},
}


@dataclass
class Schedule:
    """A factor per update, plus the state of ``plateau``."""

    name: str
    factor: Callable[[int], float]
    plateau: Plateau | None = None

    def __call__(self, step: int) -> float:
        return self.factor(step) * (self.plateau.factor if self.plateau else 1.0)

    def observe(self, loss: float) -> None:
        """One epoch's loss; only ``plateau`` listens."""
        if self.plateau:
            self.plateau.observe(loss)

    def state_dict(self) -> State:
        return self.plateau.state_dict() if self.plateau else {}

    def load_state_dict(self, state: State) -> None:
        if self.plateau:
            self.plateau.load_state_dict(state)

    @property
    def constant(self) -> bool:
        """True when every update has the same factor until further notice."""
        return self.name in ("constant", "plateau")


@dataclass
class Plateau:
    """Multiply the step size by ``gamma`` after ``patience`` epochs without a better loss."""

    gamma: float
    patience: int
    threshold: float
    floor: float
    factor: float = 1.0
    best: float = math.inf
    stale_epochs: int = 0

    def observe(self, loss: float) -> None:
        if loss < self.best * (1 - self.threshold) if self.best > 0 else loss < self.best - self.threshold:
            self.best, self.stale_epochs = loss, 0
            return
        self.stale_epochs += 1
        if self.stale_epochs > self.patience:
            self.factor, self.stale_epochs = max(self.factor * self.gamma, self.floor), 0

    def state_dict(self) -> State:
        return {"factor": self.factor, "best": self.best, "stale_epochs": self.stale_epochs}

    def load_state_dict(self, state: State) -> None:
        self.factor, self.best = float(state["factor"]), float(state["best"])
        self.stale_epochs = int(state["stale_epochs"])


def make_schedule(
    schedule: str | Callable[[int], float],
    options: Mapping[str, Any],
    *,
    total_steps: int | None,
    steps_per_epoch: int,
) -> Schedule:
    """The schedule for a run of ``total_steps`` updates, None when the end is not known in advance."""
    if callable(schedule):
        return Schedule("callable", schedule)
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    known = {**SCHEDULES[schedule], "warmup": 0}
    for name in options:
        if name not in known:
            raise unknown(f"option of the {schedule} schedule", name, known)
    values = {**known, **options}
    if schedule in ("cosine", "onecycle") and total_steps is None:
        raise OptionError(f"the {schedule} schedule needs to know the end of the run: give epochs= or steps=")
    warmup = _in_steps(values.pop("warmup"), total_steps)
    plateau = Plateau(**values) if schedule == "plateau" else None
    shape = _shape(schedule, values, total_steps or 0, steps_per_epoch)

    def factor(step: int) -> float:
        return shape(step) * (min(1.0, (step + 1) / warmup) if warmup else 1.0)

    name = "warmup" if warmup and schedule in ("constant", "plateau") else schedule
    return Schedule(name, factor, plateau)


def _in_steps(warmup: float, total_steps: int | None) -> int:
    if isinstance(warmup, float) and 0 < warmup < 1:
        if total_steps is None:
            raise OptionError("warmup as a share of the run needs epochs= or steps=")
        return max(1, round(warmup * total_steps))
    if warmup < 0:
        raise OptionError(f"warmup={warmup}: updates, or a share between 0 and 1, are needed")
    return int(warmup)


def _shape(name: str, values: Mapping[str, Any], total: int, per_epoch: int) -> Callable[[int], float]:
    if name == "step":
        milestones = values["milestones"]
        if milestones is not None:
            marks = sorted(int(m) * per_epoch for m in milestones)
            return lambda step: values["gamma"] ** sum(step >= mark for mark in marks)
        every = int(values["every"] or 10) * per_epoch
        return lambda step: float(values["gamma"] ** (step // every))
    if name == "cosine":
        floor = values["floor"]
        return lambda step: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    if name == "onecycle":
        return lambda step: _onecycle(step, total, values)
    return lambda step: 1.0


def _onecycle(step: int, total: int, values: Mapping[str, Any]) -> float:
    """Up by a cosine from 1/start_div to 1 over the first ``rise`` of the run, then down to 1/end_div of the start."""
    low, end = 1 / values["start_div"], 1 / values["start_div"] / values["end_div"]
    top = max(1.0, values["rise"] * total - 1)
    if step <= top:
        share, a, b = step / top, low, 1.0
    else:
        share, a, b = min(1.0, (step - top) / max(1.0, total - 1 - top)), 1.0, end
    return float(b + (a - b) * 0.5 * (1 + math.cos(math.pi * share)))
