"""A thread that can be ended for certain, also when Ctrl-C struck in the middle of its start.

The interpreter raises KeyboardInterrupt between any two instructions of the main thread, also between taking
a lock and entering the block that gives it back. Whatever the main thread shares with workers therefore goes
through `queue.SimpleQueue`, whose calls are whole or not at all; it takes no lock, condition or semaphore of
theirs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

GRACE_S = 0.5
"""How long a thread whose start was interrupted may take to show itself; the system starts one in
microseconds."""


class Worker(threading.Thread):
    """A daemon thread whose `end` waits for it whatever state its start is in."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=f"headrace-{name}", daemon=True)
        self._work = work
        self._asked = False
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        self._asked = True
        super().start()

    def run(self) -> None:
        self._begun.put(None)
        self._work()

    def end(self) -> None:
        """Wait until the thread has ended; it must have been told to. Nothing to do when it never began."""
        if threading.current_thread() is self or not self._asked:
            return
        # An interrupt inside of start() leaves a thread that `join` takes for one that was never started,
        # though the system may be about to run it.
        try:
            self._begun.get(timeout=GRACE_S)
        except queue.Empty:
            return
        self._begun.put(None)
        self.join()
