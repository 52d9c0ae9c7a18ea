"""Topic models of several libraries, one pass at a time, judged by one piece of code.

A learner is a generator: each step makes one more pass (or some sweeps) and yields its topics. Whoever drives it
measures the CPU time of the steps. Peers that are not installed are left out, and named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.topics import LatentDirichletAllocation

BATCH = 256
SWEEPS = 20
"""Sweeps of a sampler that count as one pass: each looks at every document."""


@dataclass(frozen=True)
class Topics:
    """What a learner has learned so far."""

    read: Callable[[], NDArray[Any]]
    """Gives pseudo-counts, topics × words, until the learner goes on; its time is not the learner's."""
    alpha: Any
    collapsed: bool
    """How documents are to be inferred: with expected counts (samplers, collapsed) or variationally."""

    @property
    def components(self) -> NDArray[Any]:
        return self.read()


Learner = Callable[[Any, int, int], Generator[Topics, None, None]]
"""(documents, number of topics, seed) → topics after every pass."""


def headrace_online(
    train: Any, topics: int, seed: int, jobs: int | None = None, batch_size: int = BATCH
) -> Generator[Topics, None, None]:
    model = LatentDirichletAllocation(
        topics,
        learning_method="online",
        batch_size=batch_size,
        total_samples=train.shape[0],
        random_state=seed,
        n_jobs=jobs,
    )
    while True:
        model.partial_fit(train)
        yield Topics(lambda: model.components_, model.doc_topic_prior_, False)


def headrace_collapsed(train: Any, topics: int, seed: int) -> Generator[Topics, None, None]:
    # Many small steps, documents not iterated to the end: measured on AP, batches of 32 reach in 5 passes what
    # batches of 256 do not reach in 160.
    model = LatentDirichletAllocation(
        topics, learning_method="collapsed", doc_topic_prior=0.1, topic_word_prior=0.01, batch_size=32,
        max_doc_update_iter=20, total_samples=train.shape[0], random_state=seed,
    )  # fmt: skip
    while True:
        model.partial_fit(train)
        yield Topics(lambda: model.components_, model.doc_topic_prior_, True)


def scikit_learn(train: Any, topics: int, seed: int) -> Generator[Topics, None, None]:
    from sklearn.decomposition import LatentDirichletAllocation as Theirs

    model = Theirs(topics, batch_size=BATCH, total_samples=train.shape[0], random_state=seed)
    while True:
        model.partial_fit(train)
        yield Topics(lambda: model.components_, model.doc_topic_prior_, False)


def gensim(train: Any, topics: int, seed: int) -> Generator[Topics, None, None]:
    from gensim.models import LdaModel

    bounds = zip(train.indptr[:-1], train.indptr[1:], strict=True)
    corpus = [
        list(zip(train.indices[lo:hi].tolist(), train.data[lo:hi].tolist(), strict=True)) for lo, hi in bounds
    ]
    model = LdaModel(
        num_topics=topics, id2word={i: str(i) for i in range(train.shape[1])}, chunksize=BATCH, decay=0.7,
        offset=10.0, eval_every=None, iterations=100, random_state=seed, dtype=np.float64,
    )  # fmt: skip
    while True:
        model.update(corpus)
        yield Topics(model.state.get_lambda, 1.0 / topics, False)


def vowpal_wabbit(train: Any, topics: int, seed: int) -> Generator[Topics, None, None]:
    import vowpalwabbit

    with TemporaryDirectory() as folder:
        data, text = Path(folder) / "documents", Path(folder) / "topics"
        data.write_text("".join(_vowpal_lines(train)), encoding="utf-8")
        bits = max(1, (train.shape[1] - 1).bit_length())
        first = {
            "lda": topics,
            "lda_alpha": 1 / topics,
            "lda_rho": 1 / topics,
            "b": bits,
            "random_seed": seed + 1,
        }
        made, step = Path(folder) / "model-0", 10
        while True:
            last, made = made, made.with_name(f"model-{step}")
            # Every pass goes on from the model of the last one; a model does not keep the size of the collection.
            begin = {"initial_regressor": str(last)} if last.exists() else first
            vowpalwabbit.Workspace(
                **begin, lda_D=train.shape[0], minibatch=BATCH, power_t=0.7, initial_t=step, data=str(data),
                final_regressor=str(made), readable_model=str(text), quiet=True,
            ).finish()  # fmt: skip
            last.unlink(missing_ok=True)
            step += -(-train.shape[0] // BATCH)
            yield Topics(lambda: _vowpal_topics(text, topics, train.shape[1]), 1.0 / topics, False)


def _vowpal_lines(train: Any) -> Iterator[str]:
    for lo, hi in zip(train.indptr[:-1], train.indptr[1:], strict=True):
        entries = zip(train.indices[lo:hi].tolist(), train.data[lo:hi].tolist(), strict=True)
        yield "| " + " ".join(f"{word}:{count:g}" for word, count in entries) + "\n"


def _vowpal_topics(path: Path, topics: int, words: int) -> NDArray[Any]:
    """The topics of a readable model: behind its head, a line for each word, its number and its counts."""
    components = np.full((topics, words), 1.0 / topics)
    for line in path.read_text(encoding="utf-8").splitlines():
        parts = line.split()
        if len(parts) == topics + 1 and parts[0].isdigit() and int(parts[0]) < words:
            components[:, int(parts[0])] = [float(part) for part in parts[1:]]
    return components


def tomotopy(train: Any, topics: int, seed: int, sweeps: int = SWEEPS) -> Generator[Topics, None, None]:
    import tomotopy as library

    model = library.LDAModel(k=topics, alpha=0.1, eta=0.01, seed=seed + 1)
    for lo, hi in zip(train.indptr[:-1], train.indptr[1:], strict=True):
        words = np.repeat(train.indices[lo:hi], train.data[lo:hi].astype(int))
        if len(words):
            model.add_doc([str(word) for word in words])
    while True:
        model.train(sweeps, workers=1, parallel=library.ParallelScheme.NONE)
        yield Topics(
            lambda: _tomotopy_topics(model, train.shape[1]), np.asarray(model.alpha, dtype=np.float64), True
        )


def _tomotopy_topics(model: Any, words: int) -> NDArray[Any]:
    places = np.array([int(word) for word in model.used_vocabs])
    # A word that no document to learn from holds has the prior's count, as it has in the other libraries.
    components = np.full((model.k, words), 0.01)
    for k, count in enumerate(model.get_count_by_topics()):
        components[k, places] = model.get_topic_word_dist(k) * (count + 0.01 * len(places))
    return components


def installed() -> tuple[dict[str, Learner], list[str]]:
    """The learners that can run here, and the names of those that cannot."""
    learners: dict[str, Learner] = {
        "headrace online": headrace_online,
        "headrace collapsed": headrace_collapsed,
        "scikit-learn": scikit_learn,
    }
    peers: dict[str, Learner] = {"gensim": gensim, "tomotopy": tomotopy, "Vowpal Wabbit": vowpal_wabbit}
    missing = [name for name in peers if importlib.util.find_spec(name.lower().replace(" ", "")) is None]
    return {**learners, **{n: peer for n, peer in peers.items() if n not in missing}}, missing


def likelihood(topics: Topics, held_out: Any) -> float:
    """Log likelihood per held-out word, by document completion, under the learner's own prior."""
    components = topics.components
    judge = LatentDirichletAllocation(
        len(components),
        learning_method="collapsed" if topics.collapsed else "online",
        doc_topic_prior=topics.alpha,
        mean_change_tol=1e-4,
        max_doc_update_iter=500,
    )
    judge.components_ = components
    return -float(np.log(judge.held_out_perplexity(held_out)))
