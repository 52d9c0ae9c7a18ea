"""Which rows make up each buffer of a pass, and how a buffer is cut into batches. Pure.

A pass draws a permutation of blocks of neighbouring rows, cut at a random offset so that block borders move
from pass to pass. Laid end to end, the permuted blocks are one sequence in which every row stands exactly
once; ranks take equal parts of that sequence and buffers are equal parts of a rank's part, so whatever the
sizes and remainders, nothing is dropped and nothing comes twice.

Every rank makes the same number of steps: it is counted from the smallest rank, whose rows differ by at most
one from the largest. Where that one row would need a step of its own, it joins the batch before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError

Ranges = NDArray[np.int64]
"""Row ranges, one (start, stop) in each row."""


@dataclass(frozen=True, kw_only=True)
class PassShape:
    """What stays the same from pass to pass."""

    rows: int
    batch_size: int
    block: int = 0
    """Rows in a block; 0 means that one block holds everything, in the order of the file."""
    buffer_rows: int = 0
    """The most rows a buffer may hold; 0 means all. At least one batch is held."""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    shift: bool = True
    """Move block borders from pass to pass; not where blocks are what is decoded together."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OptionError(f"rank={self.rank} is not among the ranks 0 to {self.world_size - 1}")
        if self.rows < self.world_size:
            raise OptionError(
                f"{self.rows} rows cannot be shared by {self.world_size} ranks; each needs at least one"
            )
        if self.batch_size < 1:
            raise OptionError(f"batch_size={self.batch_size}; a batch needs at least one row")

    @property
    def fewest(self) -> int:
        """Rows of the rank that has fewest."""
        return self.rows // self.world_size

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part of the pass's sequence."""
        extra = self.rows % self.world_size
        start = self.rank * self.fewest + min(self.rank, extra)
        return start, start + self.fewest + (self.rank < extra)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where buffers begin and end within a rank's part; near equal, whole batches except at the end."""
        start, stop = self.part
        if not self.buffer_rows:
            return (0, stop - start)
        limit = max(self.batch_size, self.buffer_rows - self.buffer_rows % self.batch_size)
        count = -(-self.fewest // limit)
        each = -(-self.fewest // count)
        each = min(limit, -(-each // self.batch_size) * self.batch_size)
        inner = range(each, self.fewest, each)
        return (0, *inner, stop - start)

    @property
    def largest(self) -> int:
        """Rows of the largest buffer."""
        return max(last - first for first, last in itertools.pairwise(self.cuts))

    @property
    def buffers(self) -> int:
        """Buffers in a pass; the same on every rank."""
        return len(self.cuts) - 1

    def bounds(self, buffer: int) -> list[tuple[int, int]]:
        """The batches of one buffer, as ranges of positions in its order."""
        first, last = self.cuts[buffer], self.cuts[buffer + 1]
        last_step = buffer == self.buffers - 1
        common = (self.fewest if last_step else last) - first
        if self.drop_last:
            steps = common // self.batch_size
            return [(k * self.batch_size, (k + 1) * self.batch_size) for k in range(steps)]
        steps = -(-common // self.batch_size)
        edges = [*(k * self.batch_size for k in range(steps)), last - first]
        return list(itertools.pairwise(edges))

    def steps(self) -> list[int]:
        """How many batches each buffer gives in one round."""
        return [len(self.bounds(k)) for k in range(self.buffers)]


def pass_ranges(shape: PassShape, pass_index: int) -> list[Ranges]:
    """The row ranges of each buffer of this rank's pass, in reading order within the pass's sequence."""
    blocks = permuted_blocks(shape, pass_index)
    start, _ = shape.part
    return [
        arranged(cut(blocks, start + first, start + last), shape.block)
        for first, last in itertools.pairwise(shape.cuts)
    ]


def arranged(ranges: Ranges, block: int) -> Ranges:
    """The ranges of one buffer in the order in which the disk reads them best: whole blocks by position,
    then rests.

    A rest shifts whatever follows it in the slot by a part of a block, so rests come last; neighbours are
    joined.
    """
    if len(ranges) < 2:
        return ranges
    rest = (ranges[:, 1] - ranges[:, 0]) != block
    ranges = ranges[np.lexsort((ranges[:, 0], rest))]
    joins = ranges[1:, 0] == ranges[:-1, 1]
    first = np.concatenate(([True], ~joins))
    last = np.concatenate((~joins, [True]))
    return np.stack((ranges[first, 0], ranges[last, 1]), axis=1)


def permuted_blocks(shape: PassShape, pass_index: int) -> Ranges:
    """All rows as block ranges in the order of this pass."""
    if shape.block == 0 or shape.block >= shape.rows:
        return np.array([[0, shape.rows]], dtype=np.int64)
    random = np.random.default_rng(np.random.SeedSequence([shape.seed & (2**64 - 1), pass_index, 0xB10C]))
    # The first block is cut short by a random number of rows, so that no two rows are neighbours for ever.
    offset = int(random.integers(shape.block)) if shape.shift else 0
    edges = np.arange(offset, shape.rows, shape.block, dtype=np.int64)
    edges = np.concatenate(([0], edges[edges > 0], [shape.rows]))
    blocks = np.stack((edges[:-1], edges[1:]), axis=1)
    return np.asarray(random.permutation(blocks, axis=0))


def cut(blocks: Ranges, first: int, last: int) -> Ranges:
    """The piece from position ``first`` to ``last`` of the sequence that the blocks make end to end."""
    ends = np.cumsum(blocks[:, 1] - blocks[:, 0])
    begins = ends - (blocks[:, 1] - blocks[:, 0])
    inside = (ends > first) & (begins < last)
    piece = blocks[inside].copy()
    if len(piece):
        piece[0, 0] += max(0, first - int(begins[inside][0]))
        piece[-1, 1] -= max(0, int(ends[inside][-1]) - last)
    return np.asarray(piece)


def row_numbers(ranges: Ranges) -> NDArray[np.int64]:
    """Every row of the ranges, one after the other."""
    lengths = ranges[:, 1] - ranges[:, 0]
    begins = np.cumsum(lengths) - lengths
    rows = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(ranges[:, 0] - begins, lengths)
    return np.asarray(rows)
