"""Documents that live on a device, with what every mini-batch of them needs laid out ahead.

A mini-batch is inferred document by document and then added to the topics word by word. The second wants the
mini-batch's entries sorted by word; they are sorted once, on the device, when the documents arrive, and used in
every pass. Documents go longest first, so that the last to finish are short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.topics.corpus import Corpus
from headrace.topics.estep import Run


@dataclass(frozen=True)
class Part:
    """One mini-batch of resident documents."""

    first: int
    documents: int
    order: Tensor
    """int32, the numbers of its documents from 0, longest first."""
    lengths: NDArray[np.int64]
    """Distinct words of the documents, in that order."""
    begin: int
    end: int
    """Its distinct words are ``words[begin:end]``."""


class Resident:
    """A corpus on a device."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        self.corpus, self.device = corpus, device
        self.indptr = self._there(corpus.indptr)
        self.indices = self._there(corpus.indices)
        self.counts = self._there(corpus.counts)
        self._parts: list[Part] = []
        self.words = self.starts = self.entries = self.docs = torch.zeros(0, device=device)
        self._runs: tuple[Run, ...] = ()

    def _there(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        held = (self.indptr, self.indices, self.counts, self.words, self.starts, self.entries, self.docs)
        return sum(value.nbytes for value in held)

    def divide(self, runs: Sequence[Run]) -> list[Part]:
        """The mini-batches of these consecutive runs, sorted by word; kept until other runs are asked for."""
        if tuple(runs) != self._runs:
            self._parts = self.parts(runs, self._sort_by_word(runs))
            self._runs = tuple(runs)
        return self._parts

    def parts(self, runs: Sequence[Run], bounds: Sequence[int] | None = None) -> list[Part]:
        """Runs of documents to infer; without ``bounds`` nothing can be learned from them."""
        lengths, at, made = np.diff(self.corpus.indptr), 0, []
        orders = [np.argsort(-lengths[first:last], kind="stable") for first, last in runs]
        flat = self._there(np.concatenate([np.zeros(0, dtype=np.int32), *orders]).astype(np.int32))
        for number, (first, last) in enumerate(runs):
            begin, end = (0, 0) if bounds is None else (bounds[number], bounds[number + 1])
            order, sizes = flat[at : at + last - first], lengths[first:last][orders[number]]
            made.append(Part(first, last - first, order, sizes, begin, end))
            at += last - first
        return made

    def _sort_by_word(self, runs: Sequence[Run]) -> list[int]:
        """Fill ``words``, ``starts``, ``entries`` and ``docs``; returns where each run's words begin."""
        features = self.corpus.features
        firsts = torch.tensor([first for first, _ in runs], device=self.device)
        lengths = self.indptr.diff()
        doc = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)
        run = torch.bucketize(doc, firsts, right=True) - 1
        key, entries = torch.sort(run * features + self.indices, stable=True)
        distinct, counts = torch.unique_consecutive(key, return_counts=True)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.words = (distinct % features).to(torch.int32)
        self.entries = entries.to(torch.int32 if len(entries) < 2**31 else torch.int64)
        self.docs = (doc - firsts[run])[entries].to(torch.int32)
        edges = torch.arange(len(runs) + 1, device=self.device) * features
        return [int(edge) for edge in torch.searchsorted(distinct, edges).tolist()]

    def entry_slice(self, part: Part) -> tuple[int, int]:
        """Where the entries of a mini-batch lie."""
        indptr = self.corpus.indptr
        return int(indptr[part.first]), int(indptr[part.first + part.documents])
