"""Where workers write how they are, for the process that watches them: shared memory, one slot per worker.

Invariant: a slot is written by its worker alone and read by anyone, so there is no lock, and a worker that is killed
leaves its slot readable. A reader may see one number older than another; nothing is decided from their difference.
Episode returns go into a ring of the last `RING` per worker; ``episodes`` counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RING = 100
_TEXT = 4096
COUNTERS = ("steps", "updates", "episodes", "pushes", "staleness_sum", "staleness_max")
MEASURES = ("beat_s", "best", "lr", "policy_loss", "value_loss", "entropy", "cpu_s")


class Board:
    """Counters and measures of every worker; may be passed to a process when it is started."""

    def __init__(self, context: Any, workers: int) -> None:
        self.workers = workers
        self._counters = context.RawArray("q", workers * len(COUNTERS))
        self._measures = context.RawArray("d", workers * len(MEASURES))
        self._ring = context.RawArray("d", workers * RING * 2)
        self._text = context.RawArray("c", workers * _TEXT)
        self._stop = context.RawValue("b", 0)
        self.measures[:] = np.nan
        self.measures[:, MEASURES.index("beat_s")] = 0.0

    @property
    def counters(self) -> Array:
        return np.frombuffer(self._counters, np.int64).reshape(self.workers, -1)

    @property
    def measures(self) -> Array:
        return np.frombuffer(self._measures, np.float64).reshape(self.workers, -1)

    @property
    def ring(self) -> Array:
        """(worker, place, return and length)."""
        return np.frombuffer(self._ring, np.float64).reshape(self.workers, RING, 2)

    def total(self, name: str) -> int:
        """A counter, all workers together."""
        return int(self.counters[:, COUNTERS.index(name)].sum())

    def most(self, name: str) -> int:
        return int(self.counters[:, COUNTERS.index(name)].max())

    def measure(self, name: str) -> Array:
        """A measure of every worker."""
        return self.measures[:, MEASURES.index(name)]

    def recent(self) -> Array:
        """(episodes, 2) returns and lengths in the rings; the newest hundred of each worker."""
        counts = np.minimum(self.counters[:, COUNTERS.index("episodes")], RING)
        return np.concatenate([self.ring[w, : counts[w]] for w in range(self.workers)])

    def stop(self) -> None:
        """Ask all workers to end after their present rollout."""
        self._stop.value = 1

    @property
    def stopping(self) -> bool:
        return bool(self._stop.value)

    def write_error(self, worker: int, text: str) -> None:
        start = worker * _TEXT
        data = text.encode("utf-8", "replace")[: _TEXT - 1]
        self._text[start : start + len(data) + 1] = data + b"\0"

    def error(self, worker: int) -> str:
        """What the worker wrote last, or an empty string."""
        start = worker * _TEXT
        data = bytes(self._text[start : start + _TEXT])
        return data.split(b"\0", 1)[0].decode("utf-8", "replace")


class Slot:
    """One worker's part of the board; what an earlier life of the worker counted is kept."""

    def __init__(self, board: Board, worker: int) -> None:
        self._counters = board.counters[worker]
        self._measures = board.measures[worker]
        self._ring = board.ring[worker]

    def count(self, **changes: int) -> None:
        for name, change in changes.items():
            self._counters[COUNTERS.index(name)] += change

    def raise_to(self, name: str, value: int) -> None:
        place = COUNTERS.index(name)
        self._counters[place] = max(self._counters[place], value)

    def measure(self, **values: float) -> None:
        for name, value in values.items():
            self._measures[MEASURES.index(name)] = value

    def episode(self, total: float, length: int) -> None:
        # The ring's place is filled before the count is raised; the other order shows a reader an old return.
        place = int(self._counters[COUNTERS.index("episodes")]) % RING
        self._ring[place] = total, length
        self._counters[COUNTERS.index("episodes")] += 1
