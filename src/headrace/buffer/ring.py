"""Who may touch which slot, and when. Pure: no thread, no lock, no memory; the shell that obeys is
`pipeline`.

A slot goes round: free → filling → full → taken → free. Invariants:
- A slot is full only when every one of its jobs is done. (Publishing earlier lets a step train on half a
buffer.) - A slot is filled only after it was free. (Reusing it earlier overwrites rows that a step still
reads.) - Buffers are taken in the order in which they were begun.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fill:
    """One buffer on its way through a slot."""

    slot: int
    key: Any
    """What the buffer is, for whoever takes it."""
    jobs: int
    """Jobs that are not done."""
    failures: list[Exception] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    """Positions, first and last, that could not be read."""
    began_s: float = 0.0
    ended_s: float = 0.0


class Ring:
    """The slots' states."""

    def __init__(self, slots: int) -> None:
        self.free = deque(range(slots))
        self.begun: deque[Fill] = deque()
        """Filling or full, oldest first."""
        self.taken: set[int] = set()

    def begin(self, key: Any, jobs: int, now_s: float = 0.0) -> Fill | None:
        """Claim a free slot for a new buffer; None when there is none."""
        if not self.free:
            return None
        fill = Fill(self.free.popleft(), key, jobs, began_s=now_s)
        self.begun.append(fill)
        return fill

    def job_done(self, fill: Fill, now_s: float = 0.0) -> bool:
        """Count one job as done; True when the buffer is full with it."""
        assert fill.jobs > 0, "a job was counted twice"
        fill.jobs -= 1
        if fill.jobs == 0:
            fill.ended_s = now_s
        return fill.jobs == 0

    def take(self) -> Fill | None:
        """The oldest buffer if it is full, else None."""
        if not self.begun or self.begun[0].jobs:
            return None
        fill = self.begun.popleft()
        self.taken.add(fill.slot)
        return fill

    def release(self, fill: Fill) -> None:
        """Free the slot of a buffer that was taken."""
        assert fill.slot in self.taken, "a slot was released that nobody had taken"
        self.taken.remove(fill.slot)
        self.free.append(fill.slot)
