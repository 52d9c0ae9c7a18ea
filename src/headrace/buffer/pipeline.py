"""Disk → host slots, in the background: reader threads fill what the ring allows, the consumer takes what is
full.

Threads: ``threads`` readers take jobs from one queue and wait on nothing else; whoever frees a slot hands
out the next buffer's jobs, so there is no scheduler and no polling. `close` ends all threads and closes all
files, also in the middle of a buffer; readers in a system call finish it first.

Memory: ``slots`` slots and one bounce buffer of 4 MB for each reader.

``pause`` is called by the threads at named points, with no lock held. Tests put a sequencer there to force
interleavings; otherwise it does nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.buffer.passes import Ranges
from headrace.buffer.ring import Fill, Ring
from headrace.buffer.slots import Lane, Slot
from headrace.errors import WorkerError
from headrace.types import Columns

Pause = Callable[[str], None]
Failure = tuple[int, int, Exception]
"""The first and the last position that could not be filled, and why."""
Work = Callable[[Slot], list[Failure]]
OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Recipe:
    """How one buffer is filled."""

    key: Any
    rows: int
    jobs: tuple[Work, ...]
    """What readers do for it, in any order and at the same time."""
    leads: dict[str, int]
    """Bytes into each column's memory at which the rows begin."""


class Cook(Protocol):
    """Turns row ranges into jobs, and owns the files that they read."""

    lanes: tuple[Lane, ...]

    def recipe(self, key: Any, ranges: Ranges, slot: Slot) -> Recipe: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Loaded:
    """A full buffer in host memory; valid until it is released."""

    key: Any
    rows: int
    columns: Columns
    load_s: float
    """From the first job to the last."""
    bad: tuple[tuple[int, int], ...]
    """Positions that could not be read and are to be skipped."""
    failures: tuple[Exception, ...]
    fill: Any
    """What `release` needs; nobody else's business."""


def nothing(point: str) -> None:
    """The pause outside of tests."""


class Pipeline:
    """Fills slots with the buffers that ``plan`` yields, in order."""

    def __init__(
        self,
        cook: Cook,
        plan: Iterable[tuple[Any, Ranges]],
        slots: list[Slot],
        *,
        threads: int = 4,
        on_error: OnError = "raise",
        pause: Pause = nothing,
    ) -> None:
        self._cook = cook
        self._plan: Iterator[tuple[Any, Ranges]] = iter(plan)
        self.slots = slots
        self._on_error = on_error
        self._pause = pause
        self._ring = Ring(len(slots))
        self._recipes: dict[int, Recipe] = {}
        self._jobs: queue.SimpleQueue[tuple[Fill, Work] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read, name=f"headrace-reader-{k}", daemon=True)
            for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._hand_out()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ readers

    def _read(self) -> None:
        while (item := self._jobs.get()) is not None:
            fill, job = item
            if not self._closed:
                self._do(fill, job)

    def _do(self, fill: Fill, job: Work) -> None:
        self._pause("read")
        try:
            failures = job(self.slots[fill.slot])
        except Exception as error:
            failures = [(0, self._recipes[fill.slot].rows, error)]
        self._pause("done")
        with self._changed:
            for first, last, failure in failures:
                fill.bad.append((first, last))
                fill.failures.append(failure)
            # Publish after filling: the count falls only when the bytes are there.
            if self._ring.job_done(fill, time.perf_counter()):
                self._changed.notify_all()

    def _hand_out(self) -> None:
        """Give every free slot the next buffer's jobs."""
        while not self._closed:
            with self._changed:
                if self._ended or not self._ring.free:
                    return
                step = next(self._plan, None)
                if step is None:
                    self._ended = True
                    self._changed.notify_all()
                    return
                slot = self._ring.free[0]
                recipe = self._cook.recipe(step[0], step[1], self.slots[slot])
                fill = self._ring.begin(recipe.key, len(recipe.jobs), time.perf_counter())
                assert fill is not None
                self._recipes[slot] = recipe
                if not recipe.jobs:
                    self._changed.notify_all()
            for job in recipe.jobs:
                self._jobs.put((fill, job))

    # ------------------------------------------------------------------ the consumer

    def take(self) -> Loaded | None:
        """The next buffer, waiting until it is full; None when the plan has come to its end."""
        self._pause("take")
        with self._changed:
            while (fill := self._ring.take()) is None:
                if self._closed or (self._ended and not self._ring.begun):
                    return None
                self._changed.wait()
            recipe = self._recipes[fill.slot]
        if fill.failures and self._on_error == "raise":
            self._fail(fill)
        columns = self.slots[fill.slot].tensors(recipe.rows, recipe.leads)
        return Loaded(
            recipe.key, recipe.rows, columns, fill.ended_s - fill.began_s, tuple(sorted(set(fill.bad))),
            tuple(fill.failures), fill,
        )  # fmt: skip

    def _fail(self, fill: Fill) -> None:
        first = fill.failures[0]
        if type(first).__module__.startswith("headrace."):
            raise first
        raise WorkerError(f"a reader failed on a buffer: {type(first).__name__}: {first}") from first

    def release(self, loaded: Loaded) -> None:
        """The consumer has used the buffer up: its slot is filled anew."""
        self._pause("release")
        with self._changed:
            self._ring.release(loaded.fill)
        self._hand_out()

    def is_full(self) -> bool:
        """Whether a buffer could be taken without waiting."""
        with self._changed:
            return bool(self._ring.begun) and self._ring.begun[0].jobs == 0

    def stop(self) -> None:
        """Take no more work; whoever waits is woken and gets None."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for _ in self._threads:
            self._jobs.put(None)

    def close(self) -> None:
        """End the threads, close the files, give the memory back. May be called again."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()
        self._cook.close()
        for slot in self.slots:
            slot.close()
