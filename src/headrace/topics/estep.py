"""Inferring documents: the compiled E-step, called for runs of documents and shared out over threads.

The caller decides what follows from the statistics; nothing here changes the topics.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import WorkerError
from headrace.topics import kernels
from headrace.topics.corpus import Corpus
from headrace.topics.state import Scratch, Topics

EPS = float(np.finfo(np.float64).eps)
"""What scikit-learn adds to the sum of every word; it silences words that no topic has ever seen."""

RUN = 512
"""Documents whose rows are copied together when nothing else decides: they fit the second-level cache."""

Run = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How a document is inferred."""

    alpha: NDArray[np.float32]
    """The prior of the topics of a document, one number per topic."""
    tol: float = 1e-3
    """A document has converged when the mean change of its γ falls below this."""
    max_iter: int = 100
    collapsed: bool = False
    """Zero-order collapsed updates: counts in the place of exp(ψ(·))."""
    noise: int = 0
    """Seed of the starts of γ while learning; 0 starts every γ at one."""

    def noise_at(self, step: int) -> int:
        """A seed for one step, not zero unless ``noise`` is."""
        return (self.noise * 1_000_003 + step * 7919) % (2**31 - 1) + 1 if self.noise else 0


def infer_run(
    topics: Topics,
    corpus: Corpus,
    run: Run,
    how: Inference,
    scratch: Scratch,
    *,
    scale: float | None = None,
    eps: float = EPS,
    want_stats: bool = True,
    noise: int = 0,
) -> tuple[int, int]:
    """Infer the documents of ``run``; returns (distinct words, iterations).

    Afterwards ``scratch.gammas`` holds their γ, ``scratch.words`` the distinct words and ``scratch.stats``
    the statistics of those words.
    """
    first, last = run
    scale = topics.scale if scale is None else scale
    used = copy_rows(topics, corpus, run, scratch, collapsed=how.collapsed, scale=scale, eps=eps)
    rounds = kernels.learn(
        corpus.indptr, corpus.counts, first, last, scratch.locs, scratch.rows, scratch.floors, scratch.width,
        how.alpha, np.float32(how.tol), how.max_iter, how.collapsed, scratch.gammas, want_stats, scratch.starts,
        scratch.cursor[:used], scratch.powers, scratch.entry_doc, scratch.entry_share, scratch.ints,
        scratch.work, scratch.block, scratch.lines, noise,
    )  # fmt: skip
    if want_stats:
        kernels.gather_statistics(
            scratch.rows, used, scratch.width, scratch.starts, scratch.entry_doc, scratch.entry_share,
            scratch.powers,
        )  # fmt: skip
    return used, int(rounds)


def copy_rows(
    topics: Topics, corpus: Corpus, run: Run, scratch: Scratch, *, collapsed: bool, scale: float, eps: float
) -> int:
    """Copy the rows of the words of ``run`` into ``scratch``; returns how many distinct words there are."""
    first, last = run
    scratch.reserve(corpus, first, last)
    used = kernels.localise(
        corpus.indptr, corpus.indices, first, last, scratch.slot, scratch.words, scratch.locs, scratch.starts
    )
    scratch.reserve_rows(used)
    kernels.fill_rows(
        topics.flat, scale, topics.prior, topics.inverse(collapsed, scale), scratch.words, used,
        scratch.width, collapsed, eps, scratch.rows, scratch.floors, scratch.scales,
    )  # fmt: skip
    return int(used)


def runs_of(documents: int, size: int) -> list[Run]:
    """Consecutive runs of at most ``size`` documents."""
    return [(first, min(first + size, documents)) for first in range(0, documents, size)]


def in_threads(work: Callable[[int, Any], None], tasks: Sequence[Any], jobs: int, name: str) -> None:
    """Call ``work(worker, task)`` for every task, each taken by whichever of ``jobs`` threads comes first.

    With one job everything happens in the calling thread, in order. The first failure stops the others after
    the task they are at, and is raised here with the worker's name and its task.
    """
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            work(0, task)
        return
    # next() of a count is one bytecode-level call in C: no two threads get the same number.
    tickets, stop = itertools.count(), threading.Event()
    failures: list[tuple[int, Any, BaseException]] = []

    def worker(number: int) -> None:
        while not stop.is_set() and (ticket := next(tickets)) < len(tasks):
            try:
                work(number, tasks[ticket])
            except BaseException as error:
                failures.append((number, tasks[ticket], error))
                stop.set()

    threads = [
        threading.Thread(target=worker, args=(n,), name=f"headrace-{name}-{n}", daemon=True)
        for n in range(min(jobs, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if failures:
        number, task, error = failures[0]
        raise WorkerError(f"{name} worker {number} failed at {task}: {error}") from error


def infer_all(
    topics: Topics, corpus: Corpus, how: Inference, scratches: Sequence[Scratch], *, eps: float = EPS
) -> NDArray[np.float32]:
    """γ of every document, D × K, over as many threads as there are scratches."""
    gammas = np.empty((len(corpus), topics.topics), dtype=np.float32)

    def work(worker: int, run: Run) -> None:
        first, last = run
        infer_run(topics, corpus, run, how, scratches[worker], eps=eps, want_stats=False)
        gammas[first:last] = scratches[worker].gammas[: last - first]

    size = max(16, min(RUN, -(-len(corpus) // len(scratches))))
    in_threads(work, runs_of(len(corpus), size), len(scratches), "inference")
    return gammas
