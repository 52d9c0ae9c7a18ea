"""Forces an interleaving: threads stop at named points until the test lets them go on."""

from __future__ import annotations

import threading
from collections import Counter


class Sequencer:
    """Called by threads as ``pause(point)``; a point is open unless the test closed it."""

    def __init__(self, *closed: str) -> None:
        self._changed = threading.Condition()
        self._closed = dict.fromkeys(closed, 0)
        self.arrived: Counter[str] = Counter()

    def __call__(self, point: str) -> None:
        with self._changed:
            self.arrived[point] += 1
            self._changed.notify_all()
            if point in self._closed:
                self._wait(lambda: self._closed.get(point, 1) > 0, f"a pass through {point!r}")
                if point in self._closed:
                    self._closed[point] -= 1

    def let(self, point: str, count: int = 1) -> None:
        """Let so many threads pass a closed point."""
        with self._changed:
            self._closed[point] += count
            self._changed.notify_all()

    def open(self, point: str) -> None:
        """Let all pass from now on."""
        with self._changed:
            self._closed.pop(point, None)
            self._changed.notify_all()

    def until(self, point: str, count: int) -> None:
        """Wait until so many threads have come to a point in all."""
        with self._changed:
            self._wait(lambda: self.arrived[point] >= count, f"{count} threads at {point!r}")

    def _wait(self, ready, what: str) -> None:
        if not self._changed.wait_for(ready, timeout=60):
            raise AssertionError(f"waited 60 s for {what}; arrived so far: {dict(self.arrived)}")
