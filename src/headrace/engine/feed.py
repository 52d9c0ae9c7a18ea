"""What fills the loader's buffers: the whole data at once, or one part of it after another.

A `Feed` gives, for each pass, filled buffers in turn. `ResidentFeed` has one, which never changes.
`BufferedFeed` keeps readers at work on the next buffers while one is used, also over the end of a pass.

Who owns what: a `BufferedFeed` owns its readers, their files and the slots. They end when a pass is broken
off, when the feed is closed, and when nobody holds the feed any more.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.buffer import labels
from headrace.buffer.ahead import ReadAhead
from headrace.buffer.cook import SpanCook
from headrace.buffer.fetch import Fetch
from headrace.buffer.passes import PassShape, Ranges, pass_ranges, row_numbers
from headrace.buffer.pipeline import Loaded, OnError, Pause, Pipeline, nothing
from headrace.buffer.slots import Lane, Slot
from headrace.buffer.stage import DeviceStage
from headrace.engine.placement import MEMORY_SHARE
from headrace.engine.residence import copied, free_memory, load
from headrace.engine.reuse import Reuse
from headrace.types import Columns, Plan, Source, Spanned

LABEL_BUFFERS = 3
"""So many first buffers are looked at for labels that are unlike."""


@dataclass(frozen=True)
class Filled:
    """Rows on the device, before an order is laid over them."""

    columns: Columns
    rows: int
    index: int
    row_ids: Tensor | None
    bad: tuple[tuple[int, int], ...] = ()
    """Positions that could not be read."""


@dataclass
class FeedStatistics:
    """What reading cost so far."""

    buffers: int = 0
    load_s: float = 0.0
    """Time in which readers worked on buffers; high against the time of training means that the disk is the
    limit."""
    skipped_rows: int = 0
    failures: list[str] = field(default_factory=list)
    """What could not be read, at most a hundred messages."""


class Feed(Protocol):
    """Where a loader's rows come from."""

    shape: PassShape
    plan: Plan
    reuse: Reuse
    statistics: FeedStatistics

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        """The buffers of a pass, from the given one on; closing the generator stops all that it started."""
        ...

    def close(self) -> None: ...


class ResidentFeed:
    """All rows on the device, or in memory where the device is the CPU.

    It owns the thread that brings memory-mapped files in; that ends with the files, or with `close`."""

    def __init__(
        self, source: Source, device: torch.device, plan: Plan, shape: PassShape, reuse: Reuse
    ) -> None:
        self.source, self.device, self.shape, self.reuse = source, device, shape, reuse
        reuse.auto = False
        self.plan = plan.with_("rounds", reuse.current, "all rows stay, so a round is a pass")
        for d in copied(source, device):
            self.plan = self.plan.with_(d.name, d.value, d.reason)
        self.statistics = FeedStatistics()
        self._columns: Columns | None = None
        self._fetch: Fetch | None = None
        self._finalizer: Any = None

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        if self._columns is None:
            self._begin_fetch()
            self._columns = load(self.source, self.device)
        self._tell_notes()
        if first == 0:
            yield Filled(self._columns, self.shape.rows, 0, None)

    def _begin_fetch(self) -> None:
        """Rows of memory maps are brought in by reading in order what would else be read at random."""
        if not isinstance(self.source, Spanned) or not getattr(self.source, "mapped", False):
            return
        spans = [span for column in self.source.spans().values() for span in column]
        if sum(span.rows * span.row_bytes for span in spans) > MEMORY_SHARE * free_memory():
            return  # asked to stay in memory that is not there: reading on would push out what is in use
        self._fetch = Fetch(spans)
        self._finalizer = weakref.finalize(self, self._fetch.close)
        self._fetch.start()

    def _tell_notes(self) -> None:
        while self._fetch is not None and self._fetch.notes:
            warnings.warn(self._fetch.notes.pop(), UserWarning, stacklevel=2)

    def close(self) -> None:
        """Forget the rows; they are loaded again when they are asked for."""
        self._columns = None
        if self._fetch is not None:
            self._fetch.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        fetch, self._fetch, self._finalizer = self._fetch, None, None
        for note in fetch.notes if fetch is not None else ():
            warnings.warn(note, UserWarning, stacklevel=2)


class Stage(Protocol):
    """Whatever has full buffers."""

    def start(self) -> None: ...

    def take(self) -> Loaded | None: ...

    def release(self, loaded: Loaded) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Reading:
    """How buffers are read."""

    threads: int = 8
    direct: bool = False
    on_error: OnError = "raise"
    slots: int = 2
    pause: Pause = nothing


class BufferedFeed:
    """One part of the rows after another, read while the part before is used."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        plan: Plan,
        shape: PassShape,
        reuse: Reuse,
        reading: Reading,
    ) -> None:
        self.source, self.device, self.shape, self.reuse, self.reading = source, device, shape, reuse, reading
        self.plan = plan.with_(
            "rounds",
            "auto" if reuse.auto else reuse.current,
            "as often as loading makes it free, fewer as the step size falls" if reuse.auto else "as asked",
        )
        self.statistics = FeedStatistics()
        self._stage: Stage | None = None
        self._next: tuple[int, int] | None = None
        self._finalizer: Any = None
        self._shares: list[np.ndarray[Any, Any]] | None = []

    # ------------------------------------------------------------------ passes

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        whole = False
        try:
            stage = self._stage_at(pass_index, first)
            for index in range(first, self.shape.buffers):
                loaded = stage.take()
                assert loaded is not None, "the plan ended before the pass did"
                self._next = (pass_index, index + 1)
                self._count(loaded)
                yield self._filled(loaded, index)
                stage.release(loaded)
            self._next = (pass_index + 1, 0)
            whole = True
        finally:
            if not (whole and self._endless):
                self.close()

    def _stage_at(self, pass_index: int, first: int) -> Stage:
        """The readers, already at work on this buffer if all went in turn."""
        if self._stage is None or self._next != (pass_index, first):
            self.close()
            # Held before it starts: an interrupt at any moment finds it here and closes it.
            self._stage = self._make_stage(pass_index, first)
            self._finalizer = weakref.finalize(self, self._stage.close)
            self._stage.start()
        return self._stage

    @property
    def _spanned(self) -> bool:
        """Whether rows have fixed places in files or memory, which several readers may copy at once."""
        return isinstance(self.source, Spanned) and not any(c.sparse for c in self.source.columns)

    @property
    def _endless(self) -> bool:
        """Whether readers go on into the next pass; a user's dataset is not called when nobody asked for
        it."""
        return self._spanned

    def _make_stage(self, pass_index: int, first: int) -> Stage:
        steps = buffer_plan(self.shape, pass_index, first, endless=self._endless)
        cuda = self.device.type == "cuda"
        lanes = tuple(Lane(c.name, c.dtype, c.shape) for c in self.source.columns)
        rows = self.shape.largest
        if not self._spanned:
            fixed = cuda and not any(column.sparse for column in self.source.columns)
            read_to = torch.device("cpu") if fixed else self.device
            ahead = ReadAhead(self.source, steps, read_to, on_error=self.reading.on_error)
            return DeviceStage(ahead, lanes, rows, self.device) if fixed else ahead
        assert isinstance(self.source, Spanned)
        cook = SpanCook(
            self.source.stored(), self.source.spans(), block=self.shape.block, direct=self.reading.direct,
            served={column.name: column.dtype for column in self.source.columns},
        )  # fmt: skip
        slots = [Slot(cook.lanes, rows, pinned=cuda) for _ in range(self.reading.slots)]
        pipeline = Pipeline(
            cook, steps, slots, threads=self.reading.threads, on_error=self.reading.on_error,
            pause=self.reading.pause,
        )  # fmt: skip
        return DeviceStage(pipeline, lanes, rows, self.device) if cuda else pipeline

    # ------------------------------------------------------------------ buffers

    def _filled(self, loaded: Loaded, index: int) -> Filled:
        columns = {column.name: loaded.columns[column.name] for column in self.source.columns}
        self._look_at_labels(columns, loaded.rows)
        row_ids = loaded.row_ids
        if row_ids is None:
            row_ids = torch.from_numpy(row_numbers(loaded.key)).to(self.device)
        return Filled(columns, loaded.rows, index, row_ids, loaded.bad)

    def _count(self, loaded: Loaded) -> None:
        self.statistics.buffers += 1
        self.statistics.load_s += loaded.load_s
        self.reuse.loaded(loaded.load_s)
        if loaded.bad:
            bad = {k for first, last in loaded.bad for k in range(first, last)}
            self.statistics.skipped_rows += len(bad)
            room = 100 - len(self.statistics.failures)
            self.statistics.failures += [str(error) for error in loaded.failures][:room]

    def _look_at_labels(self, columns: Columns, rows: int) -> None:
        """Warn once when the first buffers' labels are unlike."""
        target = next((c for c in self.source.columns if c.role == "target"), None)
        if self._shares is None or target is None or target.shape or target.dtype != torch.int64:
            return
        values = columns[target.name][:rows].cpu().numpy()
        if len(values) == 0 or values.min() < 0 or values.max() > 100_000:
            self._shares = None
            return
        self._shares.append(labels.label_shares(values, 1))
        told = labels.warning(self._shares, len(values))
        if told is not None:
            warnings.warn(told, UserWarning, stacklevel=2)
        if told is not None or len(self._shares) == LABEL_BUFFERS:
            self._shares = None

    def close(self) -> None:
        """End the readers and give their memory back."""
        if self._stage is not None:
            self._stage.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._stage, self._finalizer, self._next = None, None, None


def buffer_plan(
    shape: PassShape, pass_index: int, first: int, *, endless: bool
) -> Iterator[tuple[Ranges, Ranges]]:
    """The buffers to read, in order, from one buffer of one pass on; the ranges are their own key."""
    for index in itertools.count(pass_index) if endless else (pass_index,):
        ranges = pass_ranges(shape, index)
        for buffer in range(first, shape.buffers):
            yield ranges[buffer], ranges[buffer]
        first = 0
