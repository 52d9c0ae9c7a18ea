"""The service of balanced orders as an actor: workers send sketches and do not wait; they wait for a permutation.

The service decides nothing about parameters. It saves its permutations and signs about once a second, where the
master's checkpoints lie. When it is lost Ray starts a new one, which goes on from the newest save: lost are the signs
of the batches since then. Workers name the permutation that they have in force, so a save of an earlier pass misleads
nobody: that worker's rows then keep their rank until its next pass.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.cluster.sending import as_array, shared_tensor
from headrace.engine import checkpoint
from headrace.engine.served import order_service
from headrace.errors import RunFolderError

SAVE_S = 1.0
"""Between two saves at least; a guess. It is what a killed service loses."""
MOST_OF_ITS_TIME = 0.05
"""Spent on saving: where a save is slow, there are fewer."""


class OrderActor:
    """An `OrderService`, one call after the other."""

    def __init__(self, rows: int, world_size: int, seed: int, folder: str) -> None:
        torch.set_num_threads(1)
        self.service = order_service(rows, world_size, seed)
        self.folder = Path(folder)
        self.saves, self.due_s = 0, 0.0
        with contextlib.suppress(RunFolderError):  # none yet: this is the first start
            state, _ = checkpoint.load_newest(self.folder)
            self.saves = state["saves"]
            # A run that is resumed may have another number of workers.
            if [len(order) for order in state["orders"]] == [len(order) for order in self.service.orders]:
                self.service.load_state_dict(state)

    def observe(self, worker: int, indices: NDArray[Any], vectors: NDArray[Any]) -> None:
        self.service.observe(worker, shared_tensor(indices), shared_tensor(vectors))
        self._save_if_due()

    def next_epoch(self, worker: int, own: NDArray[Any] | None) -> NDArray[Any]:
        order = self.service.next_epoch(worker, None if own is None else shared_tensor(own))
        self._save_if_due()
        return as_array(order)

    def go_on(self, worker: int, order: NDArray[Any]) -> None:
        self.service.go_on(worker, shared_tensor(order))
        self._save_if_due()

    def _save_if_due(self) -> None:
        began_s = time.monotonic()
        if began_s < self.due_s:
            return
        self.saves += 1
        checkpoint.save_checkpoint(
            self.folder, self.saves, {**self.service.state_dict(), "saves": self.saves}
        )
        now_s = time.monotonic()
        self.due_s = now_s + max(SAVE_S, (now_s - began_s) / MOST_OF_ITS_TIME)


class RayOrders:
    """`Orders` of a worker; calls of one worker arrive in order."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def observe(self, worker: int, indices: Tensor, vectors_bk: Tensor) -> None:
        self.actor.observe.remote(worker, as_array(indices), as_array(vectors_bk))

    def next_epoch(self, worker: int, own: Tensor | None = None) -> Tensor:
        import ray

        order = self.actor.next_epoch.remote(worker, None if own is None else as_array(own))
        return shared_tensor(ray.get(order)).clone()

    def go_on(self, worker: int, order: Tensor) -> None:
        self.actor.go_on.remote(worker, as_array(order))
