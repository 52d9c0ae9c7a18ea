"""Who gets how much next, when an epoch ends and whose batch grows: one state machine, no threads, no clock.

Events are method calls that name what happened; each returns the instructions that follow from it. The caller
(`run`) carries them out and reports back. Invariants, each a property test:

- Within an epoch every row is granted until it was finished exactly once: a range whose worker died or hung
  is handed out again from the first row that the worker had not finished.
- A worker's batch stays between its limits.
- `Done` comes once an epoch, when no row is pending or in flight.

A grant is a range of positions in the epoch's order, many batches long: about `Rules.grant_s` seconds of
work, so that messages are rare, and never more than half of the worker's share of what is left, so that all workers
finish together. Ranges are cut at multiples of the batch, so one worker's batches are those of a sequential loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.hogbatch.adaptive import adapt, step_scale


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What the coordinator knows of a worker from the start."""

    name: str
    batch: int
    low: int
    high: int
    powers_of_two: bool = False
    """True for a worker whose steps are captured once per batch size."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How the coordinator decides."""

    adaptive: bool = False
    alpha: float = 2.0
    scaling: str = "off"
    reference_batch: int = 64
    grant_s: float = 0.05
    """Long against a message (50 µs), short against an epoch and the wait after Ctrl-C."""
    restarts: int = 3
    """How often one worker may be replaced within a run."""


@dataclass(frozen=True)
class Grant:
    """Work: rows ``start`` to ``stop`` of the epoch's order, cut into batches."""

    number: int
    worker: str
    start: int
    stop: int
    batch: int
    scale: float
    """Factor of the step size."""

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def updates(self) -> int:
        return -(-self.rows // self.batch)


@dataclass(frozen=True)
class Replace:
    """Start the worker anew."""

    worker: str


@dataclass(frozen=True)
class Lost:
    """The worker was replaced too often and stays away; ``last`` when no other is left."""

    worker: str
    last: bool


@dataclass(frozen=True)
class Done:
    """The epoch is over and nobody is working."""


Instruction = Grant | Replace | Lost | Done


@dataclass
class _Worker:
    plan: WorkerPlan
    batch: int
    present: bool = True
    rate: float | None = None
    """Updates per second, smoothed; kept when the batch changes, scaled to the new batch."""
    measured: bool = False
    """Whether a grant at the present batch size was finished since the last change."""
    updates: int = 0
    rows: int = 0
    restarts: int = 0
    last_seconds: float = 0.0
    in_flight: dict[int, Grant] = field(default_factory=dict)


class Coordinator:
    """The state machine of one run."""

    def __init__(self, rows: int, workers: Sequence[WorkerPlan], rules: Rules) -> None:
        self.rows = rows
        self.rules = rules
        self.epoch = 0
        self._workers = {plan.name: _Worker(plan, plan.batch) for plan in workers}
        self._pending: deque[tuple[int, int]] = deque()
        self._number = 0
        self._running = False
        self._halted = False

    # What happened.

    def begin(self, remaining: Sequence[tuple[int, int]] | None = None) -> list[Instruction]:
        """Begin an epoch; ``remaining`` ranges when one is resumed in the middle."""
        assert not self._running
        self._pending = deque([(0, self.rows)] if remaining is None else list(remaining))
        self._running = True
        return self._hand_out()

    def finished(self, worker: str, number: int, rows_done: int, seconds: float) -> list[Instruction]:
        """A worker finished a grant, or as many of its rows as it could before it was told to stop."""
        state = self._workers[worker]
        grant = state.in_flight.pop(number, None)
        if grant is None:  # the answer of a worker that was given up in the meantime
            return []
        self._count(state, grant, rows_done)
        if rows_done == grant.rows:
            self._measure(state, grant, seconds)
        return self._hand_out()

    def died(self, worker: str, number: int | None, rows_done: int) -> list[Instruction]:
        """A worker is gone, or hung and was ended; it had finished ``rows_done`` rows of grant ``number``."""
        state = self._workers[worker]
        for grant in sorted(state.in_flight.values(), key=lambda g: -g.start):
            self._count(state, grant, rows_done if grant.number == number else 0)
        state.in_flight.clear()
        state.restarts += 1
        if state.restarts <= self.rules.restarts and not self._halted:
            return [Replace(worker), *self._hand_out()]
        state.present = False
        last = not any(other.present for other in self._workers.values())
        return [Lost(worker, last), *self._hand_out()]

    def left(self, worker: str) -> list[Instruction]:
        """A worker that has nothing in flight goes away for good."""
        self._workers[worker].present = False
        return self._hand_out()

    def joined(self, plan: WorkerPlan) -> list[Instruction]:
        """A worker comes, or comes back."""
        state = self._workers.setdefault(plan.name, _Worker(plan, plan.batch))
        state.present = True
        return self._hand_out() if self._running else []

    def resized(self, worker: str, batch: int) -> None:
        """Someone asks for another batch size; it is kept within the worker's limits."""
        state = self._workers[worker]
        self._set_batch(state, min(state.plan.high, max(state.plan.low, batch)))

    def halt(self) -> None:
        """Hand out nothing more in this run; `remaining` names what is left once all grants came back."""
        self._halted = True

    # What is known.

    @property
    def running(self) -> bool:
        return self._running

    @property
    def idle(self) -> bool:
        return not any(state.in_flight for state in self._workers.values())

    def remaining(self) -> list[tuple[int, int]]:
        """Ranges of this epoch that nobody finished or holds, in order."""
        return sorted(self._pending)

    def in_flight(self, worker: str) -> list[Grant]:
        return list(self._workers[worker].in_flight.values())

    def batches(self) -> dict[str, int]:
        return {name: state.batch for name, state in self._workers.items() if state.present}

    def updates(self) -> dict[str, int]:
        return {name: state.updates for name, state in self._workers.items()}

    def rows_done(self) -> dict[str, int]:
        return {name: state.rows for name, state in self._workers.items()}

    def restarts(self) -> dict[str, int]:
        return {name: state.restarts for name, state in self._workers.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; to be taken when `idle`."""
        return {
            "epoch": self.epoch,
            "remaining": [list(piece) for piece in self.remaining()] if self._running else None,
            "workers": {
                name: {"batch": s.batch, "updates": s.updates, "rows": s.rows, "rate": s.rate}
                for name, s in self._workers.items()
            },
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up a state; workers that are not in it begin as planned."""
        self.epoch = int(saved["epoch"])
        for name, values in saved["workers"].items():
            state = self._workers.get(name)
            if state is not None:
                self.resized(name, int(values["batch"]))
                state.updates, state.rows = int(values["updates"]), int(values["rows"])

    # Decisions.

    def _count(self, state: _Worker, grant: Grant, rows_done: int) -> None:
        """Count the finished rows of a grant and put the others back in front."""
        state.rows += rows_done
        state.updates += -(-rows_done // grant.batch)
        if rows_done < grant.rows:
            self._pending.appendleft((grant.start + rows_done, grant.stop))

    def _measure(self, state: _Worker, grant: Grant, seconds: float) -> None:
        rate = grant.rows / grant.batch / max(seconds, 1e-9)
        state.last_seconds = seconds
        if grant.batch != state.batch:  # granted before the last change
            return
        state.rate = rate if state.rate is None or not state.measured else 0.5 * (state.rate + rate)
        state.measured = True
        if self.rules.adaptive:
            self._adapt()

    def _adapt(self) -> None:
        present = {name: state for name, state in self._workers.items() if state.present}
        rates = {name: s.rate for name, s in present.items() if s.measured and s.rate is not None}
        if len(rates) < max(2, len(present)):
            return
        chosen = adapt(
            {name: state.batch for name, state in present.items()},
            rates,
            {name: (state.plan.low, state.plan.high) for name, state in present.items()},
            [name for name, state in present.items() if state.plan.powers_of_two],
            self.rules.alpha,
        )
        for name, batch in chosen.items():
            self._set_batch(present[name], batch)

    def _set_batch(self, state: _Worker, batch: int) -> None:
        if batch != state.batch:
            if state.rate is not None:
                state.rate *= state.batch / batch
            state.batch = batch
            state.measured = False

    def _hand_out(self) -> list[Instruction]:
        given: list[Instruction] = []
        if self._running and not self._halted:
            wanting = True
            while wanting and self._pending:  # round by round, so that nobody takes a short rest alone
                wanting = False
                for state in self._workers.values():
                    if self._pending and self._wants(state):
                        given.append(self._cut(state))
                        wanting = True
        if self._running and not self._pending and self.idle:
            self._running = False
            self.epoch += 1
            given.append(Done())
        return given

    def _wants(self, state: _Worker) -> bool:
        # A second grant waits at the worker while it works on the first. A slow worker holds one only: at the
        # end of an epoch all others would wait for its second.
        depth = 2 if state.last_seconds < 2 * self.rules.grant_s else 1
        return state.present and len(state.in_flight) < depth

    def _cut(self, state: _Worker) -> Grant:
        rows = self._rows_for(state)
        start, stop = self._pending.popleft()
        rows = min(stop - start, rows)
        if start + rows < stop:
            self._pending.appendleft((start + rows, stop))
        self._number += 1
        scale = step_scale(state.batch, self.rules.reference_batch, self.rules.scaling)
        grant = Grant(self._number, state.plan.name, start, start + rows, state.batch, scale)
        state.in_flight[grant.number] = grant
        return grant

    def _rows_for(self, state: _Worker) -> int:
        """How many rows make a grant: a multiple of the batch."""
        if state.rate is None:
            return state.batch
        left = sum(stop - start for start, stop in self._pending)
        fair = int(left * self._share(state))
        wanted = state.rate * self.rules.grant_s
        return state.batch * max(1, min(int(wanted), fair // state.batch))

    def _share(self, state: _Worker) -> float:
        """Half of a worker's part in what is left, by the rows a second of all: then all end at the same time."""
        present = [other for other in self._workers.values() if other.present]
        if len(present) < 2:
            return 1.0
        rates = [other.rate * other.batch for other in present if other.rate is not None]
        if state.rate is None or len(rates) < len(present):
            return 0.5 / len(present)
        return 0.5 * state.rate * state.batch / max(sum(rates), 1e-9)
