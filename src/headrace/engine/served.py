"""A balanced order whose signs are made elsewhere: one `OrderService` signs the rows of all workers in one walk.

A worker owns a fixed share of the rows. Its hooks sketch the gradients of the rows that it uses and send the sketches
off, some hundred rows at a time; at the end of a pass it asks for its next permutation of the share. It waits for the
service only then. What a worker has not sent when it dies is lost: those rows keep their rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.buffer.passes import PassShape
from headrace.order.balancers import Rows
from headrace.order.basic import permutation
from headrace.order.coordinated import OrderService
from headrace.order.learner import Learner
from headrace.order.options import LearnerOptions
from headrace.types import Evidence, State

SKETCH = 128
"""Numbers that travel for each row: 512 bytes. A guess; half of what one machine keeps for itself."""


class Orders(Protocol):
    """What a worker asks of the service, wherever it runs."""

    def observe(self, worker: int, indices: Tensor, vectors_bk: Tensor) -> None: ...

    def next_epoch(self, worker: int, own: Tensor | None = None) -> Tensor: ...

    def go_on(self, worker: int, order: Tensor) -> None: ...


def share_of(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a worker's rows stand in the permutation that deals them."""
    return PassShape(rows=rows, batch_size=1, rank=rank, world_size=world_size).part


def order_service(rows: int, world_size: int, seed: int) -> OrderService:
    """The service for so many workers with equal shares."""
    parts = [share_of(rows, rank, world_size) for rank in range(world_size)]
    return OrderService([stop - start for start, stop in parts], SKETCH, seed=seed)


class _Sender(Learner):
    """Sketches as any learner does, and sends instead of signing."""

    send: Any = None

    def _sign(self, indices: Tensor, rows: Rows, vectors_bk: Tensor) -> None:
        self.send(indices.cpu(), vectors_bk.float().cpu())


class ServedOrder:
    """The `Order` of one worker, over all rows: only its own part of a permutation ever changes."""

    def __init__(self, rows: int, rank: int, world_size: int, service: Orders, *, seed: int = 0) -> None:
        self.rank, self.service = rank, service
        self.start, self.stop = share_of(rows, rank, world_size)
        # Equal on all workers: it deals the rows.
        self.dealt = permutation(rows, seed, 0, torch.device("cpu"))
        self._place = torch.full((rows,), -1, dtype=torch.int64)
        self._place[self.dealt[self.start : self.stop]] = torch.arange(self.stop - self.start)
        self.own: Tensor | None = None
        """The permutation of the share in force, as positions in it."""
        self._batch: Tensor | None = None
        options = LearnerOptions(kind="pair", k=SKETCH, seed=seed)
        self.learner = _Sender(rows, options, next_indices=lambda: self._batch)
        self.learner.send = self._send

    def watch(self, module: nn.Module) -> None:
        self.learner.watch(module)

    def begin_batch(self, indices: Tensor) -> None:
        self._batch = indices

    def _send(self, indices: Tensor, vectors_bk: Tensor) -> None:
        self.service.observe(self.rank, self._place[indices], vectors_bk)

    def observe(self, indices: Tensor, evidence: Evidence) -> None:
        """Take in per-example signals that the caller computed."""
        if evidence.signals_bk is not None:
            self._send(indices, evidence.signals_bk)

    def epoch(self) -> Iterator[Tensor]:
        self.learner.settle()
        self.own = self.service.next_epoch(self.rank, self.own)
        return iter((self.whole(),))

    def whole(self) -> Tensor:
        """All rows, with this worker's in the order in force."""
        assert self.own is not None
        share = self.dealt[self.start : self.stop]
        return torch.cat([self.dealt[: self.start], share[self.own], self.dealt[self.stop :]])

    def state_dict(self) -> State:
        return {"own": None if self.own is None else self.own.to(torch.int32)}

    def load_state_dict(self, state: State) -> None:
        """Go on in the order that was in force, and tell the service, which may be a new one."""
        if state["own"] is not None:
            self.own = state["own"].long()
            self.service.go_on(self.rank, self.own)
