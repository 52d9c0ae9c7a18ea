"""Disk → host slots, in the background: reader threads fill what the ring allows, the consumer takes what is
full.

Threads: ``threads`` readers do jobs; one manager owns the ring, hears what was done and released, and hands
out jobs. They speak through queues alone, and nobody polls. `close` ends all of them and closes all files,
also in the middle of a buffer; a reader in a system call finishes it first.

Memory: the slots, and one bounce buffer of 4 MB for each reader.

``pause`` is called by the threads at named points. Tests put a sequencer there to force interleavings;
otherwise it does nothing.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from headrace.buffer.passes import Ranges
from headrace.buffer.ring import Fill, Ring
from headrace.buffer.slots import Lane, Slot
from headrace.buffer.worker import Worker
from headrace.errors import WorkerError
from headrace.types import Columns

Pause = Callable[[str], None]
Failure: TypeAlias = "tuple[int, int, Exception]"
"""The first and the last position that could not be filled, and why."""
Work = Callable[[Slot], list[Failure]]
OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Recipe:
    """How one buffer is filled."""

    key: Any
    rows: int
    jobs: tuple[Work, ...]
    """What readers do for it, in any order and at the same time; at least one."""
    leads: dict[str, int]
    """Bytes into each column's memory at which the rows begin."""


class Cook(Protocol):
    """Turns row ranges into jobs, and owns the files that they read."""

    lanes: tuple[Lane, ...]

    def recipe(self, key: Any, ranges: Ranges, slot: Slot) -> Recipe: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Loaded:
    """A full buffer; valid until it is released."""

    key: Any
    rows: int
    columns: Columns
    load_s: float
    """What this buffer took: from its first job, or from the end of the buffer before where that came later."""
    bad: tuple[tuple[int, int], ...]
    """Positions that could not be read and are to be skipped."""
    failures: tuple[Exception, ...]
    fill: Any
    """What `release` needs; nobody else's business."""
    row_ids: Tensor | None = None
    """Position → row, on the device, where whoever brought the buffer there brought these too."""


@dataclass(frozen=True)
class Done:
    """A reader's word to the manager: one job is done."""

    fill: Fill
    failures: list[Failure]


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
        self._plan: Iterator[tuple[Any, Ranges]] | None = iter(plan)
        self.slots = slots
        self._on_error = on_error
        self._pause = pause
        self._ring = Ring(len(slots))
        self._recipes: dict[int, Recipe] = {}
        self._error: Exception | None = None
        self._filled_s = 0.0
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Fill, Recipe, Work] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Done | Fill | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Loaded | Exception | None] = queue.SimpleQueue()
        self._workers = [Worker(f"reader-{k}", self._read) for k in range(threads)]
        self._workers.append(Worker("manager", self._manage))

    def start(self) -> None:
        """Start the threads. Whoever calls this holds the pipeline already, and closes it whatever
        happens."""
        for worker in self._workers:
            worker.start()

    # ------------------------------------------------------------------ readers

    def _read(self) -> None:
        while (item := self._jobs.get()) is not None:
            fill, recipe, job = item
            if self._closed:
                continue
            self._pause("read")
            try:
                failures = job(self.slots[fill.slot])
            except Exception as error:
                failures = [(0, recipe.rows, error)]
            self._pause("done")
            self._events.put(Done(fill, failures))

    # ------------------------------------------------------------------ the manager

    def _manage(self) -> None:
        self._hand_out()
        while (event := self._events.get()) is not None and not self._closed:
            if isinstance(event, Done):
                self._job_done(event)
            else:
                self._ring.release(event)
            self._hand_out()
        self._ready.put(None)

    def _hand_out(self) -> None:
        """Give every free slot the next buffer's jobs; say so when there is no next and all are out."""
        while self._plan is not None and self._ring.free:
            try:
                step = next(self._plan, None)
                if step is None:
                    self._plan = None
                    break
                slot = self._ring.free[0]
                recipe = self._cook.recipe(step[0], step[1], self.slots[slot])
            except Exception as error:
                self._error, self._plan = error, None
                break
            fill = self._ring.begin(recipe.key, len(recipe.jobs), time.perf_counter())
            assert fill is not None
            self._recipes[slot] = recipe
            for job in recipe.jobs:
                self._jobs.put((fill, recipe, job))
        if self._plan is None and not self._ring.begun:
            self._ready.put(self._error)

    def _job_done(self, done: Done) -> None:
        fill = done.fill
        for first, last, failure in done.failures:
            fill.bad.append((first, last))
            fill.failures.append(failure)
        # Publish after filling: the buffer goes out only when its last job has come back.
        if self._ring.job_done(fill, time.perf_counter()):
            while (full := self._ring.take()) is not None:
                self._ready.put(self._loaded(full))

    def _loaded(self, fill: Fill) -> Loaded | Exception:
        # With both slots free the jobs of two buffers are out at once, and the later ones wait for the earlier:
        # counted from its first job, a buffer of a busy disk would seem to take up to twice its time.
        load_s = fill.ended_s - max(fill.began_s, self._filled_s)
        self._filled_s = fill.ended_s
        if fill.failures and self._on_error == "raise":
            return in_our_words(fill.failures[0])
        recipe = self._recipes[fill.slot]
        return Loaded(
            key=recipe.key,
            rows=recipe.rows,
            columns=self.slots[fill.slot].tensors(recipe.rows, recipe.leads),
            load_s=max(load_s, 0.0),
            bad=tuple(sorted(set(fill.bad))),
            failures=tuple(fill.failures),
            fill=fill,
        )

    # ------------------------------------------------------------------ the consumer

    def take(self) -> Loaded | None:
        """The next buffer, waiting until it is full; None when the plan has come to its end."""
        self._pause("take")
        item = self._ready.get()
        if item is None or isinstance(item, Exception):
            self._ready.put(None)  # whoever asks again hears the same
        if isinstance(item, Exception):
            raise item
        return item

    def release(self, loaded: Loaded) -> None:
        """The consumer has used the buffer up: its slot is filled anew."""
        self._pause("release")
        self._events.put(loaded.fill)

    def is_full(self) -> bool:
        """Whether a buffer could be taken without waiting."""
        return not self._ready.empty()

    def stop(self) -> None:
        """Take no more work; whoever waits is woken and gets None."""
        self._closed = True
        self._events.put(None)
        for _ in self._workers:
            self._jobs.put(None)
        self._ready.put(None)

    def close(self) -> None:
        """End the threads, close the files, give the memory back. May be called again, also after an
        interrupt."""
        self.stop()
        for worker in self._workers:
            worker.end()
        self._cook.close()
        for slot in self.slots:
            slot.close()


def in_our_words(error: Exception) -> Exception:
    """The error for the consumer: ours as they are, others with what was being done."""
    if type(error).__module__.startswith("headrace."):
        return error
    told = WorkerError(f"a reader failed on a buffer: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
