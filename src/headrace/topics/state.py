"""The topics while they are learned, and the memory that a worker needs beside them.

λ = prior + scale × excess. A step λ ← (1 − ρ) λ + ρ λ̂ then touches only the rows of the words it has seen:
the decay of all others is in the one number `scale`. Since additions to `excess` commute, the steps of
several threads may land in any order. A float64 sum of every column of `excess` is carried along, because the
E-step needs Σ_v λ_vk and must not read V × K numbers for it.

One `Topics` is shared by all workers; one `Scratch` belongs to one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import psi

from headrace.errors import OptionError
from headrace.topics.corpus import Corpus

LANES = 16
SMALLEST_SCALE = 1e-10
"""Below it `rebase` is due: float32 additions to `excess` grow as 1 / scale."""


def padded(count: int) -> int:
    """The next multiple of 16."""
    return (count + LANES - 1) // LANES * LANES


def _blocks(topics: int) -> list[tuple[int, int]]:
    return [(first, min(first + LANES, topics)) for first in range(0, topics, LANES)]


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """Zeros that start on a cache line: a vector load that crosses two lines costs two."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    values: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return values


@dataclass
class Topics:
    """K topics over V words."""

    excess: NDArray[np.float32]
    """V × padded K; the padding stays zero."""
    topics: int
    prior: float
    scale: float = 1.0
    column: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The sums of the columns of ``excess``."""

    @classmethod
    def from_components(cls, components: NDArray[Any], prior: float) -> Topics:
        """From λ as scikit-learn keeps it, K × V."""
        topics, features = components.shape
        excess = aligned((features, padded(topics)))
        for first, last in _blocks(topics):
            excess[:, first:last] = (components[first:last] - prior).T
        made = cls(excess, topics, prior)
        made.recount()
        return made

    @classmethod
    def drawn(cls, draws: Any, topics: int, features: int, prior: float) -> Topics:
        """scikit-learn's start: γ(100, 1/100) is one, give or take a tenth, so that topics differ."""
        excess = aligned((features, padded(topics)))
        # Some topics at a time: the same draws, and no second table of the size of the topics.
        for first, last in _blocks(topics):
            excess[:, first:last] = (draws.gamma(100.0, 0.01, (last - first, features)) - prior).T
        made = cls(excess, topics, prior)
        made.recount()
        return made

    @property
    def features(self) -> int:
        return int(self.excess.shape[0])

    @property
    def width(self) -> int:
        return int(self.excess.shape[1])

    @property
    def flat(self) -> NDArray[np.float32]:
        return self.excess.reshape(-1)

    @property
    def nbytes(self) -> int:
        return int(self.excess.nbytes)

    def recount(self) -> None:
        """Sum the columns afresh. Additions that two threads made at once may have lost one of them."""
        self.column = self.excess.sum(axis=0, dtype=np.float64)

    def rebase(self) -> None:
        """Make ``scale`` one again. No other thread may be at work."""
        self.excess *= np.float32(self.scale)
        self.scale = 1.0
        self.recount()

    def components(self, dtype: Any = np.float64) -> NDArray[Any]:
        """λ, K × V."""
        values = self.excess[:, : self.topics].T.astype(dtype, order="C")
        values *= self.scale
        values += self.prior
        return values

    def sums(self, scale: float | None = None) -> NDArray[np.float64]:
        """Σ_v λ_vk."""
        factor = self.scale if scale is None else scale
        # Races may leave a sum a little off; it can never fall below what the prior alone gives a topic.
        least = 1e-3 * self.prior * self.features
        return np.maximum(self.prior * self.features + factor * self.column[: self.topics], least)

    def inverse(self, collapsed: bool, scale: float | None = None) -> NDArray[np.float32]:
        """What every row is multiplied by: 1 / exp(ψ(Σ_v λ_vk)), or 1 / Σ_v λ_vk when collapsed."""
        values = np.zeros(self.width, dtype=np.float32)
        sums = self.sums(scale)
        values[: self.topics] = 1.0 / sums if collapsed else np.exp(-psi(sums))
        return values


class Scratch:
    """One worker's memory: its copy of the rows in use, their statistics, and one document.

    It grows to the largest run of documents it has seen: K × 4 bytes for each distinct word of a run, for each
    document of it and for each distinct word of one document, and 12 bytes for each entry.
    """

    def __init__(self, topics: int, features: int) -> None:
        self.width = padded(topics)
        self.topics = topics
        self.slot = np.full(features, -1, dtype=np.int32)
        self.words = np.zeros(0, dtype=np.int32)
        self.locs = np.zeros(0, dtype=np.int32)
        self.starts = self.cursor = self.entry_doc = np.zeros(0, dtype=np.int32)
        self.rows = self.block = self.powers = np.zeros(0, dtype=np.float32)
        self.floors = self.scales = self.entry_share = np.zeros(0, dtype=np.float32)
        self.gammas = np.zeros((0, topics), dtype=np.float32)
        self.ints = aligned((5, self.width + LANES), np.int32)
        self.work = aligned((10, self.width))
        self.lines = aligned((5, LANES))
        self.column = np.zeros(self.width)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def reserve(self, corpus: Corpus, first: int, last: int) -> None:
        """Room for documents first..last."""
        entries = int(corpus.indptr[last] - corpus.indptr[first])
        longest = padded(int(np.diff(corpus.indptr[first : last + 1]).max(initial=LANES)))
        if self.locs.size < entries:
            self.locs, self.entry_doc = (np.empty(entries, dtype=np.int32) for _ in range(2))
            self.entry_share = np.empty(entries, dtype=np.float32)
        if self.lines.shape[1] < longest:
            self.lines = aligned((5, longest))
            self.ints = aligned((5, max(longest, self.width + LANES)), np.int32)
            self.block = aligned((self.width * longest,))
        elif not self.block.size:
            self.block = aligned((self.width * self.lines.shape[1],))
        if len(self.gammas) < last - first:
            self.gammas = np.empty((last - first, self.topics), dtype=np.float32)
            self.powers = aligned(((last - first) * self.width,))
        capacity = min(self.slot.size, entries)
        if self.words.size < capacity:
            self.words = np.empty(capacity, dtype=np.int32)
            self.starts = np.empty(capacity + 1, dtype=np.int32)

    def reserve_rows(self, used: int) -> None:
        """Room for the rows of ``used`` distinct words."""
        if used * self.width >= 2**31:
            raise OptionError(
                f"{used} distinct words in one mini-batch times {self.width} topics exceed 2³¹ numbers; "
                "lower batch_size"
            )
        if self.floors.size < used:
            # A quarter more than asked, so that runs of similar size do not allocate again and again.
            capacity = min(used + used // 4, self.slot.size)
            self.rows = aligned((capacity * self.width,))
            self.cursor = np.empty(capacity, dtype=np.int32)
            self.floors = np.empty(capacity, dtype=np.float32)
            self.scales = np.empty(capacity, dtype=np.float32)
