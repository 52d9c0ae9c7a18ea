"""A topic model as a worker runs it: pull λ, take local steps without locks, push an affine map.

`TopicTask` is a `headrace.types.Task` (`parameters`, `step`) for anything that drives Tasks, and offers the two
calls of a `ParameterStore`'s client besides: `pull` takes λ over, `push` says what became of it. Between the two,
`learn` takes one local step per mini-batch in as many threads as there are workers.

The state of the parent's λ that a task pulled is kept (V × K float32) until its push is made: the memory of a
machine is one λ, that copy, and the rows in use of every thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.topics.affine import Push, push_of
from headrace.topics.corpus import Corpus, corpus_of
from headrace.topics.learner import Learner
from headrace.topics.local import Tally
from headrace.topics.options import Settings
from headrace.topics.state import Topics
from headrace.types import Columns, Evidence, State


class TopicTask:
    """One machine's part in learning topics together."""

    def __init__(self, components: NDArray[Any], settings: Settings, total: float) -> None:
        """Start from λ (K × V); ``total`` is the size of the collection that all machines learn from."""
        self.total = total
        self.learner = Learner(Topics.from_components(components, settings.prior), settings)
        self._pulled_vk = self._lambda()
        self._decay, self._documents = 1.0, 0

    def _lambda(self) -> NDArray[np.float32]:
        topics = self.learner.topics
        values: NDArray[np.float32] = topics.excess[:, : topics.topics] * np.float32(topics.scale)
        values += np.float32(topics.prior)
        return values

    # Task

    def parameters(self) -> dict[str, Tensor]:
        """λ, V × K, as it is now."""
        return {"topics": torch.from_numpy(self._lambda())}

    def step(self, batch: Columns, state: State) -> Evidence:
        """One local step from a batch whose first column holds counts, documents × words, dense or CSR."""
        counts = next(iter(batch.values()))
        corpus = corpus_of(_matrix(counts), "TopicTask.step")
        self.learn(corpus)
        loss = -self.learner.bound(corpus) / max(corpus.words, 1.0)
        return Evidence(loss=torch.tensor(loss), count=len(corpus))

    # The local level

    def learn(self, corpus: Corpus) -> Tally:
        """One step per mini-batch of ``corpus``."""
        first = self.learner.step
        tally = self.learner.online(corpus, self.total)
        for number in range(first, self.learner.step):
            self._decay *= 1.0 - self.learner.settings.rate.at(number)
        self._documents += tally.documents
        return tally

    def pull(self, topics_vk: NDArray[Any] | Tensor, step: int | None = None) -> None:
        """Go on from these λ (V × K), ``step`` is the number of the next mini-batch among all machines."""
        learner = self.learner
        # Compressed pushes of others may leave a count a little below its prior.
        values = np.maximum(np.asarray(topics_vk, dtype=np.float32), np.float32(learner.topics.prior))
        learner.topics = Topics.from_components(values.T, learner.topics.prior)
        if step is not None:
            learner.step = step
        self._pulled_vk, self._decay, self._documents = values, 1.0, 0

    def learned(self) -> tuple[NDArray[np.float32], float]:
        """λ as it is now, and Π (1 − ρ) since the last `pull`."""
        return self._lambda(), self._decay

    def push(self) -> Push:
        """What the steps since the last `pull` did to λ; the task goes on from where it is."""
        now = self._lambda()
        made = push_of(self._pulled_vk, now, self._decay, self._documents)
        self._pulled_vk, self._decay, self._documents = now, 1.0, 0
        return made

    def set_prior(self, alpha: NDArray[np.float32]) -> None:
        """Take over the documents' prior that was learned elsewhere."""
        self.learner.how = replace(self.learner.how, alpha=np.asarray(alpha, dtype=np.float32))


def _matrix(counts: Tensor) -> Any:
    """A tensor of counts as scipy or numpy."""
    if counts.layout == torch.sparse_csr:
        from scipy.sparse import csr_matrix

        parts = (counts.values().numpy(), counts.col_indices().numpy(), counts.crow_indices().numpy())
        return csr_matrix(parts, shape=tuple(counts.shape))
    return counts.numpy()
