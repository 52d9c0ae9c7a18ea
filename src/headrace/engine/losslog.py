"""Losses on their way from the device to the metric rows, without making the device wait.

Every update writes its loss into one element of a window on the device. At a row's end the window is copied to
host memory asynchronously; the row is handed out when its copy has arrived, at the latest when somebody must
know (end of an epoch, checkpoint). On a CPU both happen at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.types import State


@dataclass
class Row:
    """A metric row and the losses it summarises."""

    values: dict[str, Any]
    losses: Tensor
    counts: list[int]
    ready: torch.cuda.Event | None = None

    @property
    def mean(self) -> float:
        """Mean loss per example."""
        weights = torch.tensor(self.counts, dtype=torch.float64)
        return float((self.losses.double() * weights).sum() / weights.sum())

    @property
    def first_bad(self) -> int | None:
        """Which update of the row is the first whose loss is not finite."""
        bad = (~torch.isfinite(self.losses)).nonzero()
        return int(bad[0]) if len(bad) else None


class LossLog:
    """The window that steppers write into, and the rows that wait for their losses."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.window = torch.zeros(capacity, device=device, dtype=torch.float32)
        self.counts: list[int] = []
        self.waiting: deque[Row] = deque()

    @property
    def filled(self) -> int:
        return len(self.counts)

    @property
    def room(self) -> int:
        return len(self.window) - self.filled

    def take(self, updates: int) -> Tensor:
        """Where the next updates write their losses."""
        return self.window[self.filled : self.filled + updates]

    def advance(self, counts: list[int]) -> None:
        """The updates with so many examples each have been issued."""
        self.counts.extend(counts)

    def close_row(self, values: dict[str, Any]) -> None:
        """End the row; its loss is filled in when it is read."""
        losses = self.window[: self.filled]
        ready = None
        if self.window.is_cuda:
            host = torch.empty(self.filled, pin_memory=True)
            host.copy_(losses, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            losses = host
        else:
            losses = losses.clone()
        self.waiting.append(Row(values, losses, self.counts, ready))
        self.counts = []

    def arrived(self, *, wait: bool) -> Iterator[Row]:
        """Rows whose losses are on the host, oldest first; all of them with ``wait``."""
        while self.waiting:
            ready = self.waiting[0].ready
            if ready is not None:
                if wait:
                    ready.synchronize()
                elif not ready.query():
                    return
            yield self.waiting.popleft()

    def partial_is_finite(self) -> bool:
        """Whether the losses of the row that is still open are finite; waits for the device."""
        return bool(torch.isfinite(self.window[: self.filled]).all())

    def state_dict(self) -> State:
        return {"window": self.window[: self.filled].clone(), "counts": list(self.counts)}

    def load_state_dict(self, state: State) -> None:
        self.counts = [int(count) for count in state["counts"]]
        self.waiting.clear()
        self.window[: self.filled].copy_(state["window"])
