"""A grant through `grant_kernel`, for workers whose steps and columns it can take."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from headrace.engine.chain_steps import Steps
from headrace.engine.hogbatch.coordinator import Grant
from headrace.engine.hogbatch.replica import Replica
from headrace.engine.hogbatch.rows import Rows
from headrace.engine.hogbatch.steppers import SAMPLE_EVERY, ChainStepper
from headrace.engine.hogbatch.work import Work


class CompiledGrants:
    """Runs whole grants without the interpreter lock; belongs to one worker."""

    def __init__(
        self,
        work: Work,
        stepper: ChainStepper,
        steps: Steps,
        replica: Replica | None,
        columns: dict[str, Tensor],
    ) -> None:
        from headrace.engine.hogbatch import grant_kernel

        self._kernel: Any = grant_kernel
        self._work, self._stepper, self._steps = work, stepper, steps
        self._columns, self._y = columns, columns["y"]
        names = ("x.crow", "x.col", "x.values") if steps.sparse else ("x",)
        places = [columns[name].data_ptr() for name in names]
        self._x = places if steps.sparse else [0, 0, *places]
        self._pairs = replica.addresses() if replica is not None else np.zeros((0, 4), np.int64)
        self._canary = work.canary.views()["merges"].reshape(1).numpy()
        self._bound = -1 if work.staleness_bound is None else work.staleness_bound

    @classmethod
    def of(
        cls,
        work: Work,
        stepper: ChainStepper,
        replica: Replica | None,
        columns: dict[str, Tensor],
        order: Tensor,
    ) -> CompiledGrants | None:
        """None where steps or columns are not the kernel's."""
        steps = stepper.steps
        if steps is None or "y" not in columns:
            return None
        if "x" in columns:
            fits = steps.takes(columns["x"], columns["y"])
        else:
            width = int(columns["x.width"])
            fits = steps.takes_csr(columns["x.values"], width, columns["y"]) and not stepper.decay
        if not fits:
            return None
        found = cls(work, stepper, steps, replica, columns)
        found._order = order
        found._train(0, 0, 1, 0.0, 0)  # compiles, or loads what was compiled, before training time begins
        return found

    _order: Tensor

    def run(self, grant: Grant, lr: float, token: int) -> tuple[int, float]:
        """Rows used and the sum of their losses."""
        self._steps.reserve(grant.batch)
        done, loss, bad = self._train(grant.start, grant.stop, grant.batch, lr, token)
        if bad:  # the same batch once more, through torch, which says what is wrong with the label
            rows = self._order[grant.start + done : min(grant.stop, grant.start + done + grant.batch)]
            x = next(Rows(self._columns, "x").batches(rows, len(rows)))
            self._stepper.step(x, self._y[rows], lr)
        return done, loss

    def _train(self, start: int, stop: int, batch: int, lr: float, token: int) -> tuple[int, float, bool]:
        steps, work = self._steps, self._work
        done, loss, bad = self._kernel.train(
            steps.layers,
            steps.slopes,
            steps.loss,
            steps.scratch,
            *(*self._x, self._y.data_ptr(), self._order.data_ptr()),
            *(start, stop, batch),
            *(float(lr), np.float32(1.0 - lr * self._stepper.decay)),
            *(self._pairs, self._canary, work.board.cells, work.number, token),
            *(work.merge_every, self._bound, SAMPLE_EVERY),
        )
        return int(done), float(loss), bool(bad)
