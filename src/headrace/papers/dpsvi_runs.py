"""The experiments of the DPSVI page: learning curves, threads, and simulated machines. Plain data in and out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from headrace.errors import DataError
from headrace.papers import find_data
from headrace.papers.dpsvi_learners import Learner, Topics, headrace_online, likelihood
from headrace.topics.affine import applied
from headrace.topics.corpus import corpus_of
from headrace.topics.lda import LatentDirichletAllocation
from headrace.topics.options import resolve
from headrace.topics.task import TopicTask

FILES = {"AP": "ap_topicmodels.npz", "KOS": "kos.npz", "NIPS": "nips_uci.npz", "PNAS": "pnas.npz"}
Curve = list[dict[str, float]]
LARGE_PER_S = 40
"""Documents of the large synthetic corpus for each second of the page's time; a pass of the slowest library over
them takes about a fiftieth of it."""


def corpora(seconds: float = 0.0) -> dict[str, csr_matrix]:
    """The corpora that are there, and synthetic ones that always are; the large one grows with the time there is."""
    found = {"synthetic": synthetic(4000, 4000, 50, 100, seed=0)}
    large = min(100_000, round(LARGE_PER_S * seconds))
    if large >= 8000:
        found["synthetic, large"] = synthetic(large, 10_000, 50, 100, seed=1)
    for name, file in FILES.items():
        try:
            values = np.load(find_data(file), allow_pickle=False)
        except DataError:
            continue
        parts = tuple(values[f"X_{part}"] for part in ("data", "indices", "indptr"))
        found[name] = csr_matrix(parts, shape=tuple(values["X_shape"]), dtype=np.float64)
    return found


def synthetic(documents: int, words: int, topics: int, length: int, seed: int) -> csr_matrix:
    """Documents drawn from the model: words of Zipf-like frequency, few topics to a document."""
    draws = np.random.RandomState(seed)
    frequency = 1.0 / np.arange(1, words + 1)
    beta = np.array([draws.gamma(0.1, 1.0, words) * frequency for _ in range(topics)])
    beta /= beta.sum(axis=1, keepdims=True)
    lengths = draws.poisson(length, documents) + 1
    theta = draws.dirichlet(np.full(topics, 0.1), documents)
    counts = np.array([draws.multinomial(n, p) for n, p in zip(lengths, theta, strict=True)])
    rows = [np.repeat(np.arange(documents), counts[:, k]) for k in range(topics)]
    columns = [draws.choice(words, len(rows[k]), p=beta[k]) for k in range(topics)]
    row, column = np.concatenate(rows), np.concatenate(columns)
    return csr_matrix((np.ones(len(row)), (row, column)), shape=(documents, words))


def split(matrix: csr_matrix, seed: int = 0) -> tuple[csr_matrix, csr_matrix]:
    """Nine tenths to learn from, one to measure on."""
    order = np.random.RandomState(seed).permutation(matrix.shape[0])
    test = matrix.shape[0] // 10
    return matrix[order[test:]], matrix[order[:test]]


MOST_PASSES = 200  # of a curve; small corpora have converged long before


def curve(
    learner: Learner, train: Any, held_out: Any, topics: int, seed: int, limit_s: float, looks: int = 1
) -> Curve:
    """Likelihood after every pass until ``limit_s`` CPU seconds of learning are used; measuring is not timed.

    ``looks`` is how often a pass looks at every document.
    """
    points: Curve = []
    spent, passes = 0.0, 0
    with closing(learner(train, topics, seed)) as steps:
        while spent < limit_s and passes < MOST_PASSES:
            start = time.process_time()
            learned = next(steps)
            spent += time.process_time() - start
            passes += 1
            # Measure at passes 1, 2, 3, 5, 8, ...: the curve is drawn over a logarithm of time.
            due = not points or passes >= 1.4 * points[-1]["passes"]
            if due or spent >= limit_s or passes == MOST_PASSES:
                seen = passes * looks * train.shape[0]
                value = likelihood(learned, held_out)
                points.append({"seconds": spent, "passes": passes, "documents": seen, "likelihood": value})
    return points


def threads(train: Any, held_out: Any, topics: int, seed: int, jobs: int, passes: int = 5) -> Curve:
    """Wall time, documents and likelihood after each of some passes with ``jobs`` threads."""
    # Small batches, so that every thread has many steps to take.
    steps, seconds, points = headrace_online(train, topics, seed, jobs, batch_size=64), 0.0, []
    for number in range(1, passes + 1):
        start = time.perf_counter()
        learned = next(steps)
        seconds += time.perf_counter() - start
        value = likelihood(learned, held_out)
        points.append({"seconds": seconds, "documents": number * train.shape[0], "likelihood": value})
    return points


def machines(train: Any, held_out: Any, topics: int, seed: int, workers: int, rounds: int = 24) -> Curve:
    """Machines in turn in this process: each pulls, learns its share of a round, and pushes a map.

    All machines of a round pull before any of them pushes, which is the staleness of a real cluster. The
    documents learned per machine are what a cluster's time is proportional to.
    """
    settings = resolve(
        LatentDirichletAllocation(topics, learning_method="online", batch_size=64).get_params()
    )
    start = np.random.RandomState(seed).gamma(100.0, 0.01, (topics, train.shape[1]))
    tasks = [TopicTask(start, settings, train.shape[0]) for _ in range(workers)]
    values = tasks[0].parameters()["topics"].numpy()
    share = max(64, train.shape[0] // 16)
    corpus, at, points, step = corpus_of(train), 0, [], 1
    for number in range(1, rounds + 1):
        for task in tasks:
            task.pull(values, step)
        for task in tasks:
            last = min(at + share, len(corpus))
            task.learn(corpus.part(at, last))
            at = last % len(corpus)
        for task in tasks:
            values = applied(values, task.push())
        step += workers * max(1, share // 64)
        learned = Topics(partial(np.transpose, values), 1.0 / topics, False)
        points.append({"documents": number * share, "likelihood": likelihood(learned, held_out)})
    return points


def needed(points: Sequence[dict[str, float]], level: float, of: str) -> float | None:
    """How many ``of`` (seconds, documents) a curve takes to reach a likelihood; None if it never does."""
    best, before = -np.inf, None
    for point in points:
        value = max(best, point["likelihood"])
        if value >= level:
            if before is None or value == best:
                return point[of]
            share = (level - best) / (value - best)
            return float(before[of] + share * (point[of] - before[of]))
        best, before = value, point
    return None
