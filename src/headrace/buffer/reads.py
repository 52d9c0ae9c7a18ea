"""From row ranges to reads: which bytes of which file go where in a slot. Pure.

O_DIRECT moves whole sectors between the disk and memory whose address is a multiple of the sector, without
passing through the page cache. Rows begin anywhere, so one read is split in three: the sector in which the
rows begin and the one in which they end go to a small bounce buffer, and all sectors between go straight
into the slot. That needs the slot's address and the file's offset to agree modulo the sector; `phase`
arranges it for all whole blocks of a buffer, and `split` falls back to the bounce buffer alone for pieces
that do not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headrace.buffer.passes import Ranges
from headrace.types import Span

SECTOR = 4096
"""Large enough for every disk we know; devices with smaller sectors accept it."""
JOB_BYTES = 4 << 20
"""What one thread reads before it looks for new work: large enough that Python's share is small, small
enough that threads finish a buffer together. A guess that measured well."""


class Piece(NamedTuple):
    """A run of rows of one column: where its bytes lie and where they go."""

    span: Span
    offset: int
    """First byte in the file."""
    length: int
    dest: int
    """First byte in the column's part of the slot."""


def pieces(spans: Sequence[Span], ranges: Ranges, max_bytes: int = JOB_BYTES) -> Iterator[Piece]:
    """The reads that bring the rows of ``ranges``, packed one after the other, into a slot."""
    if len(spans) == 1:
        yield from pieces_of_one(spans[0], ranges, max_bytes)
        return
    ends = np.cumsum([span.rows for span in spans])
    dest = 0
    for start, stop in ranges.tolist():
        row = start
        while row < stop:
            k = int(np.searchsorted(ends, row, side="right"))
            span, first = spans[k], int(ends[k]) - spans[k].rows
            last = min(stop, int(ends[k]))
            whole = (last - row) * span.row_bytes
            offset = span.offset + (row - first) * span.row_bytes
            for part in range(0, whole, max_bytes):
                length = min(max_bytes, whole - part)
                yield Piece(span, offset + part, length, dest + part)
            dest += whole
            row = last


def pieces_of_one(span: Span, ranges: Ranges, max_bytes: int) -> Iterator[Piece]:
    """The same for a column in one file, where the arithmetic can be done for all ranges at once."""
    lengths = (ranges[:, 1] - ranges[:, 0]) * span.row_bytes
    dests = np.cumsum(lengths) - lengths
    offsets = span.offset + ranges[:, 0] * span.row_bytes
    for offset, length, dest in zip(offsets.tolist(), lengths.tolist(), dests.tolist(), strict=True):
        for part in range(0, length, max_bytes):
            yield Piece(span, offset + part, min(max_bytes, length - part), dest + part)


def phase(spans: Sequence[Span], ranges: Ranges, item_bytes: int) -> int:
    """How far into its memory a slot should begin so that the first range, and all congruent to it, need no
    copy."""
    first = next(pieces(spans, ranges[:1]), None)
    if first is None:
        return 0
    lead = first.offset % SECTOR
    return lead if lead % item_bytes == 0 else 0


class Split(NamedTuple):
    """One direct read: ``head`` and ``tail`` sectors through the bounce buffer, ``middle`` straight into the
    slot."""

    start: int
    """Where the read begins in the file; a multiple of the sector."""
    skip: int
    """Bytes before the wanted ones."""
    head: int
    """Bytes of the first sector or sectors that go through the bounce buffer."""
    middle: int
    tail: int
    """Bytes of the last sector; only the first ``tail_used`` are wanted."""
    tail_used: int

    @property
    def needed(self) -> int:
        """Bytes that the file must give for all wanted ones to be there."""
        return self.head + self.middle + self.tail_used


def split(offset: int, length: int, address: int, sector: int = SECTOR) -> Split:
    """How to read ``length`` bytes at ``offset`` to memory at ``address``."""
    skip = offset % sector
    start = offset - skip
    whole = -(-(skip + length) // sector) * sector
    if (address - offset) % sector or whole < 4 * sector:
        return Split(start, skip, whole, 0, 0, 0) if whole else Split(start, 0, 0, 0, 0, 0)
    head = sector if skip else 0
    tail_used = (offset + length) % sector
    tail = sector if tail_used else 0
    return Split(start, skip, head, whole - head - tail, tail, tail_used)
