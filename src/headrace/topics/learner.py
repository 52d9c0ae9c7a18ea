"""One learning run: topics, priors, the number of the next step, and the workers' memory.

The estimator is the face; this is the engine room. It knows documents only as `Corpus` chunks, so a matrix in
memory, a file read in pieces and a stream are the same to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.topics.bound import completion_perplexity, document_bound, per_word, topic_bound, word_sum
from headrace.topics.compiled import announce
from headrace.topics.corpus import Corpus
from headrace.topics.estep import EPS, RUN, Inference, Run, infer_all, runs_of
from headrace.topics.local import Step, Tally, batch_pass, run_steps
from headrace.topics.options import Settings
from headrace.topics.priors import BATCH_WEIGHT, improved
from headrace.topics.state import Scratch, Topics

if TYPE_CHECKING:
    from headrace.topics.device import DeviceTopics


PIECE = 32_768
"""Documents whose bound is computed together."""


class Learner:
    """Learns `topics` from chunks of documents."""

    def __init__(self, topics: Topics, settings: Settings, step: int = 1) -> None:
        self._topics = topics
        self.settings = settings
        self._there: DeviceTopics | None = None
        self.step = step
        """The number of the next mini-batch, from 1 as in scikit-learn."""
        self.how = Inference(
            alpha=settings.alpha,
            tol=settings.tol,
            max_iter=settings.max_doc_iter,
            collapsed=settings.collapsed,
            noise=settings.noise,
        )
        self.workers = [Scratch(topics.topics, topics.features) for _ in range(settings.jobs)]

    @property
    def topics(self) -> Topics:
        """The topics, on the host."""
        return self._topics if self._there is None else self._there.home()

    @topics.setter
    def topics(self, topics: Topics) -> None:
        self._topics, self._there = topics, None

    @property
    def there(self) -> DeviceTopics | None:
        """The topics on the device that was asked for; None when that is the CPU's kernels."""
        if self._there is None and self.settings.device != "cpu":
            from headrace.topics.device import DeviceTopics, torch_device

            self._there = DeviceTopics(self._topics, torch_device(self.settings.device))
        return self._there

    @property
    def nbytes(self) -> int:
        """Memory of the topics and of all workers."""
        return self.topics.nbytes + sum(worker.nbytes for worker in self.workers)

    def online(self, corpus: Corpus, total: float) -> Tally:
        """One step per mini-batch of ``corpus``, which stands for ``total`` documents."""
        runs = runs_of(len(corpus), self.settings.batch_size)
        if not runs:
            return Tally()
        first, self.step = self.step, self.step + len(runs)
        if self.there is not None:
            learn = self.settings.learn_priors
            tally = self.there.steps(corpus, runs, self.how, self.settings.rate, first, total, learn)
            return self._with_prior_of(self.there, tally)
        return run_steps(
            self.topics, corpus, runs, lambda: self.how, self.settings.rate, first, total, self.workers,
            self._observe if self.settings.learn_priors else None,
        )  # fmt: skip

    def batch(self, chunks: Iterable[Corpus]) -> Tally:
        """One pass of batch learning."""
        size = max(self.settings.batch_size, RUN)
        if self.there is not None:
            cut = ((c, runs_of(len(c), 32 * size)) for c in chunks)
            done = self.there.batch(cut, self.how, self.step, self.settings.learn_priors)
            self.step += 1
            return self._with_prior_of(self.there, done)
        done = batch_pass(
            self.topics, ((c, runs_of(len(c), self._share(c, size))) for c in chunks), self.how, self.workers,
            self.step, self._observe_batch if self.settings.learn_priors else None,
        )  # fmt: skip
        self.step += 1
        return done

    def _with_prior_of(self, there: DeviceTopics, tally: Tally) -> Tally:
        """Take over the prior that the device learned, if it learned one."""
        if there.alpha is not self.how.alpha:
            self.how = replace(self.how, alpha=there.alpha)
        return tally

    def _share(self, corpus: Corpus, size: int) -> int:
        """Documents per run: small enough that every worker gets some."""
        return max(16, min(size, -(-len(corpus) // len(self.workers))))

    def _observe(self, step: Step, gammas: NDArray[np.float32]) -> None:
        # Threads may do this at the same time; one of the two small moves is then lost, and nothing else.
        self.how = replace(self.how, alpha=improved(self.how.alpha, gammas, step.weight))

    def _observe_batch(self, run: Run, gammas: NDArray[np.float32]) -> None:
        self.how = replace(self.how, alpha=improved(self.how.alpha, gammas, BATCH_WEIGHT))

    def infer(self, corpus: Corpus, eps: float = EPS) -> NDArray[np.float32]:
        """γ of every document."""
        if self.there is not None:
            return self.there.infer(corpus, self.how, eps)
        return infer_all(self.topics, corpus, self.how, self.workers, eps=eps)

    def bound(self, corpus: Corpus, gammas: NDArray[Any] | None = None) -> float:
        """The documents' part of the bound."""
        if gammas is None and self.there is not None:
            return self.there.document_bound(corpus, self.how)
        if gammas is None and len(corpus) > PIECE:
            # γ of some documents at a time: those of all would need more memory than the topics.
            pieces = runs_of(len(corpus), PIECE)
            return sum(self.bound(corpus.part(first, last)) for first, last in pieces)
        gammas = self.infer(corpus) if gammas is None else gammas
        return document_bound(gammas, self.how.alpha, partial(self._word_sum, corpus), self.settings.jobs)

    def _word_sum(self, corpus: Corpus, powers: NDArray[Any], collapsed: bool) -> float:
        if self.there is not None:
            return self.there.word_sum(corpus, powers, collapsed=collapsed)
        return word_sum(self.topics, corpus, powers, self.workers, collapsed=collapsed)

    def perplexity(self, chunks: Iterable[Corpus]) -> float:
        """exp(−bound per word) of all chunks together, scikit-learn's definition."""
        there = self.there
        value, words = (
            topic_bound(self._topics, self.settings.jobs) if there is None else there.topic_bound(),
            0.0,
        )
        for corpus in chunks:
            value += self.bound(corpus)
            words += corpus.words
        return per_word(value, words)

    def completion(self, observed: Corpus, hidden: Corpus) -> float:
        """Held-out perplexity by document completion."""
        gammas = self.infer(observed, eps=0.0)
        return completion_perplexity(gammas, hidden.words, partial(self._word_sum, hidden))


def warm_up() -> None:
    """Compile every kernel, or load it from the cache; says so when it takes long."""
    corpus = Corpus(
        np.array([0, 1], dtype=np.int64), np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.float32), 1
    )
    with announce("the topic kernels"):
        from headrace.topics.local import Rate

        topics = Topics.from_components(np.ones((1, 1)), 1.0)
        how = Inference(alpha=np.ones(1, dtype=np.float32))
        workers = [Scratch(1, 1)]
        run_steps(topics, corpus, [(0, 1)], lambda: how, Rate(), 1, 1.0, workers)
        word_sum(topics, corpus, np.ones((1, 1)), workers, collapsed=True)
        topic_bound(topics)
