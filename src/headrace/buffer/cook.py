"""How the columns of a source get into slots: wide ones as ranges of files, narrow ones by rows from their
map.

A column whose block is smaller than `NARROW_BYTES`, as labels are, is read through the page cache, which
turns its tiny reads into few large ones. Where blocks are of a few rows only, it is gathered by rows from
its memory map.

Slots hold the types in which columns are served. What is stored in another type is converted by the reader, part by
part through scratch memory of its own, so that nobody needs a second copy of a buffer.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.buffer.direct import FileReader, check_sizes
from headrace.buffer.passes import Ranges, row_numbers
from headrace.buffer.pipeline import Failure, Recipe, Work
from headrace.buffer.reads import JOB_BYTES, SECTOR, Piece, phase, pieces
from headrace.buffer.slots import Lane, Slot
from headrace.errors import DataError
from headrace.types import Columns, Span

NARROW_BYTES = 16 << 10
"""Below this a read costs more than it brings; a guess between a page and a disk's best size."""
KEPT_BYTES = 64 << 20
"""Narrow columns up to this size are read whole: labels of eight million rows and more."""
FEW_ROWS = 16
"""In blocks of fewer rows, a read for each block costs more than touching the map; a guess."""


class SpanCook:
    """Fills slots from spans of files and from tensors in memory."""

    def __init__(
        self,
        stored: Columns,
        spans: dict[str, tuple[Span, ...]],
        *,
        block: int,
        direct: bool,
        served: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.stored = dict(stored)
        self.lanes = tuple(
            Lane(name, (served or {}).get(name, t.dtype), tuple(t.shape[1:])) for name, t in stored.items()
        )
        self.wide = {
            name for name, t in stored.items() if block == 0 or stored_row_bytes(t) * block >= NARROW_BYTES
        }
        self.spans = {
            lane.name: spans[lane.name]
            for lane in self.lanes
            if lane.name in spans
            and (lane.name in self.wide or block == 0 or block >= FEW_ROWS or stored[lane.name].is_meta)
        }
        self._all_spans = spans
        self.files = FileReader(direct=direct)
        self._local = threading.local()
        self._kept = False

    def recipe(self, key: Any, ranges: Ranges, slot: Slot) -> Recipe:
        """The jobs that bring the rows of ``ranges`` into ``slot``."""
        check_sizes(self._all_spans)
        self._keep_small_lanes()
        rows = int((ranges[:, 1] - ranges[:, 0]).sum())
        leads = dict.fromkeys(self.stored, 0)
        jobs: list[Work] = []
        for lane in self.lanes:
            if lane.name in self.spans:
                spans = self.spans[lane.name]
                if not self._converts(lane):
                    leads[lane.name] = phase(spans, ranges, lane.dtype.itemsize)
                jobs += self._file_jobs(lane, spans, ranges, leads[lane.name])
            else:
                jobs += self._memory_jobs(lane, ranges, rows)
        return Recipe(key, rows, tuple(jobs), leads)

    def _converts(self, lane: Lane) -> bool:
        """Whether a column is stored in another type than it is served in."""
        return self.stored[lane.name].dtype != lane.dtype

    def _keep_small_lanes(self) -> None:
        """At the first recipe, which is the manager's: Ctrl-C strikes the main thread alone, and a file that is
        opened there may be left open."""
        if self._kept:
            return
        self._kept = True
        for lane in self.lanes:
            if lane.name in self.spans and lane.name not in self.wide:
                self._keep_if_small(lane)

    def _keep_if_small(self, lane: Lane) -> None:
        """Read a narrow column once and for all where that takes little memory."""
        spans = self.spans[lane.name]
        if sum(span.rows for span in spans) * max(spans[0].row_bytes, lane.row_bytes) > KEPT_BYTES:
            return
        memory = bytearray(sum(span.rows * span.row_bytes for span in spans))
        view = memoryview(memory)
        try:
            for piece in pieces(spans, np.array([[0, sum(span.rows for span in spans)]])):
                self.files.read(piece, view[piece.dest : piece.dest + piece.length], 0, direct=False)
        except (DataError, OSError):
            return  # reading buffer by buffer says which rows are broken, or leaves them out
        values = torch.frombuffer(memory, dtype=self.stored[lane.name].dtype).view(-1, *lane.shape)
        self.stored[lane.name] = values.to(lane.dtype)
        del self.spans[lane.name]

    def _file_jobs(self, lane: Lane, spans: tuple[Span, ...], ranges: Ranges, lead: int) -> list[Work]:
        jobs, batch, size = [], [], 0
        for piece in pieces(spans, ranges):
            batch.append(piece)
            size += piece.length
            if size >= JOB_BYTES:
                jobs.append(self._file_job(lane, tuple(batch), lead))
                batch, size = [], 0
        return [*jobs, self._file_job(lane, tuple(batch), lead)] if batch else jobs

    def _file_job(self, lane: Lane, batch: tuple[Piece, ...], lead: int) -> Work:
        direct, converts = lane.name in self.wide, self._converts(lane)

        def work(slot: Slot) -> list[Failure]:
            address = slot.address(lane.name)
            view = memoryview(slot.memory[lane.name])
            failures: list[Failure] = []
            with contextlib.suppress(DataError, OSError):  # the reads themselves say it better
                self.files.announce(batch, direct=direct)
            for piece in batch:
                at = lead + piece.dest
                try:
                    if converts:
                        self._read_converted(piece, lane, slot, direct=direct)
                    else:
                        self.files.read(piece, view[at : at + piece.length], address + at, direct=direct)
                except (DataError, OSError) as error:
                    failures.append(failed(piece, error))
            return failures

        return work

    def _read_converted(self, piece: Piece, lane: Lane, slot: Slot, *, direct: bool) -> None:
        """Read to this thread's scratch memory, and from there into the slot in the type that is served."""
        scratch: mmap.mmap | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = mmap.mmap(-1, JOB_BYTES + SECTOR)
        at = piece.offset % SECTOR
        if at % self.stored[lane.name].dtype.itemsize:
            at = 0
        address = int(np.frombuffer(scratch, dtype=np.uint8).ctypes.data)
        self.files.read(piece, memoryview(scratch)[at : at + piece.length], address + at, direct=direct)
        stored = self.stored[lane.name].dtype
        count = piece.length // stored.itemsize
        values = torch.frombuffer(scratch, dtype=stored, count=count, offset=at)
        into = torch.frombuffer(
            slot.memory[lane.name], dtype=lane.dtype, count=count,
            offset=piece.dest // stored.itemsize * lane.dtype.itemsize,
        )  # fmt: skip
        convert_into(values, into)

    def _memory_jobs(self, lane: Lane, ranges: Ranges, rows: int) -> list[Work]:
        values = self.stored[lane.name]
        numbers = row_numbers(ranges)
        step = max(1, JOB_BYTES // max(lane.row_bytes, 1))

        def job(first: int) -> Work:
            last = min(first + step, rows)

            def work(slot: Slot) -> list[Failure]:
                out = slot.tensors(rows, dict.fromkeys(slot.memory, 0))[lane.name][first:last]
                take_into(values, numbers[first:last], out)
                return []

            return work

        return [job(first) for first in range(0, rows, step)]

    def close(self) -> None:
        self.files.close()


def stored_row_bytes(values: Tensor) -> int:
    """Bytes of one row as it is stored."""
    return values.dtype.itemsize * math.prod(values.shape[1:])


def failed(piece: Piece, error: Exception) -> Failure:
    """The rows that a piece would have brought, and the error with file and offset."""
    if not isinstance(error, DataError):
        error = DataError(
            f"{piece.span.path} could not be read at byte {piece.offset}: {error}; "
            'on_error="skip" leaves such rows out'
        )
    row_bytes = piece.span.row_bytes
    return piece.dest // row_bytes, -(-(piece.dest + piece.length) // row_bytes), error


def convert_into(values: Tensor, out: Tensor) -> None:
    """The same values in the type of ``out``, on this thread alone and without the interpreter lock."""
    if torch.bfloat16 in (values.dtype, out.dtype):
        out.copy_(values)
    else:
        np.copyto(out.numpy(), values.numpy(), casting="unsafe")


def take_into(values: Tensor, rows: np.ndarray[Any, Any], out: Tensor) -> None:
    """Gather rows into given memory, on this thread alone and without the interpreter lock."""
    if values.dtype != out.dtype:
        found = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype)
        take_into(values, rows, found)
        convert_into(found, out)
        return
    if values.dtype == torch.bfloat16:
        values, out = values.view(torch.int16), out.view(torch.int16)
    np.take(values.numpy(), rows, axis=0, out=out.numpy(), mode="clip")
