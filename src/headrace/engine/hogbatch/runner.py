"""How a CPU worker works through a grant: the same for a thread and for a process.

The rows of a grant are gathered at once, then cut into batches. The worker says on the board how far the
shared parameters have taken in its work: when it is killed, the coordinator hands out again from there.
The order of these lines matters: rows are counted after the update or the merge that carries them, so
that a death between the two repeats a batch rather than skips one.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headrace.engine.hogbatch.compiled import CompiledGrants
from headrace.engine.hogbatch.coordinator import Grant
from headrace.engine.hogbatch.replica import Replica
from headrace.engine.hogbatch.rows import Rows
from headrace.engine.hogbatch.shared import (
    BEAT,
    BUSY_NS,
    CANCEL,
    GRANT,
    MERGES,
    ROWS,
    UPDATES,
)
from headrace.engine.hogbatch.steppers import SAMPLE_EVERY, ChainStepper, make_stepper
from headrace.engine.hogbatch.work import Report, Work

__all__ = ["Report", "Runner", "Work"]


class Runner:
    """A CPU worker's state between grants."""

    def __init__(self, work: Work, columns: dict[str, Tensor], order: Tensor) -> None:
        self._work = work
        self._x, self._y = Rows(columns, "x"), Rows(columns, "y")
        self._order = order
        self._cells = work.board.cells[work.number]
        shared = work.parameters.views()
        self._replica: Replica | None = None
        parameters = shared
        if work.merge_every > 1:
            self._replica = Replica(shared, work.canary.views()["merges"])
            parameters = self._replica.parameters
        self._stepper = make_stepper(
            work.module,
            work.loss,
            work.optimiser,
            parameters,
            work.buffers.views(),
            sparse_rows=work.fused,
        )
        self._compiled: CompiledGrants | None = None
        if work.fused and isinstance(self._stepper, ChainStepper):
            self._stepper.fuse()
            self._compiled = CompiledGrants.of(work, self._stepper, self._replica, columns, order)

    def run(self, grant: Grant, lr: float, token: int) -> Report:
        """Work through a grant until it is done or ``token`` is no longer what the board names."""
        started = time.perf_counter()
        self._cells[ROWS] = 0
        self._cells[GRANT] = grant.number
        if self._replica is not None:
            self._replica.pull()
        if self._compiled is not None:
            done, loss = self._compiled.run(grant, lr, token)
        else:
            done, loss = self._run(grant, lr, token)
        stopped = time.perf_counter()
        self._cells[BUSY_NS] += int((stopped - started) * 1e9)
        return Report(grant.worker, grant.number, done, loss, started, stopped)

    def _run(self, grant: Grant, lr: float, token: int) -> tuple[int, float]:
        cells, done, loss = self._cells, 0, torch.zeros(())
        seen, since = self._work.board.others_updates(self._work.number), 0
        rows = self._order[grant.start : grant.stop]
        pairs = zip(self._x.batches(rows, grant.batch), self._y.batches(rows, grant.batch), strict=True)
        for steps, (x, y) in enumerate(pairs, 1):
            if cells[CANCEL] != token:
                break
            loss += self._stepper.step(x, y, lr) * len(x)
            done += len(x)
            cells[UPDATES] += 1
            cells[BEAT] += 1
            if self._replica is None:
                cells[ROWS] = done
                since += 1
                if since == SAMPLE_EVERY or done == grant.rows:
                    seen, since = self._sample(seen, since), 0
            elif steps % self._work.merge_every == 0 or self._too_stale(seen):
                seen = self._merge(seen, done)
        if self._replica is not None and cells[ROWS] < done:
            self._merge(seen, done)
        return done, float(loss)

    def flush(self) -> None:
        """Every grant ends with its changes in the shared parameters."""

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _too_stale(self, seen: int) -> bool:
        bound = self._work.staleness_bound
        return bound is not None and self._work.board.others_updates(self._work.number) - seen >= bound

    def _sample(self, seen: int, made: int) -> int:
        now = self._work.board.others_updates(self._work.number)
        # While this worker made `made` updates the others made `now - seen`: so many fall on each.
        self._work.board.saw_staleness(self._work.number, round((now - seen) / made))
        return now

    def _merge(self, seen: int, done: int) -> int:
        assert self._replica is not None
        now = self._work.board.others_updates(self._work.number)
        self._work.board.saw_staleness(self._work.number, now - seen)
        self._replica.merge()
        self._cells[MERGES] += 1
        self._cells[ROWS] = done
        return now
