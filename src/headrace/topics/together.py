"""What a cluster is told to learn topics, and one machine's part of it.

A machine pulls λ, takes one local step for each mini-batch of its share of the documents, in threads without locks or
on its GPU, and pushes what became of λ as an affine map (`headrace.topics.affine` says why). Of a chunk of documents
every machine takes an equal range; documents in memory are one chunk, files are read by every machine from its own
disk. A machine that was lost goes on behind its last merged push.

Invariant: of every pass each document is in exactly one machine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DataError, OptionError
from headrace.topics.corpus import Corpus
from headrace.topics.documents import Documents, open_documents
from headrace.topics.learner import Learner
from headrace.topics.options import Settings
from headrace.topics.state import Topics
from headrace.topics.task import TopicTask
from headrace.types import Learned

AfterPass = Callable[[int, int], bool]
"""``(documents, passes)`` since it was called last; True ends the run."""


@dataclass(frozen=True, kw_only=True)
class TopicWork:
    """Topics as a cluster sees them: one flat vector, λ of V × K."""

    settings: Settings
    topics_vk: NDArray[np.float32]
    """Where learning starts."""
    corpus: Corpus | None
    """The documents where they are in memory; every node gets them once and its workers share them."""
    path: str | None
    """The documents where they are a file, at this path on every machine."""
    documents: int
    """How many there are, or are said to be."""
    passes: int
    total_steps: int | None
    compress: Any = None
    seed: int = 0
    world_size: int = 1

    def values(self) -> Tensor:
        return torch.from_numpy(self.topics_vk.reshape(-1))

    def statistics_from(self) -> int | None:
        return None

    def take(self, vector: Tensor) -> None:
        self.topics_vk[:] = vector.reshape(self.topics_vk.shape).numpy()

    def local(self, rank: int) -> TopicSteps:
        return TopicSteps(self, rank)

    def open(self) -> Documents:
        """The documents, on this machine."""
        if self.corpus is not None:
            return Documents.of(self.corpus)
        assert self.path is not None
        found = open_documents(Path(self.path), self.topics_vk.shape[0])
        if found.features != len(self.topics_vk):
            raise DataError(
                f"{self.path} has {found.features} words on this machine and {len(self.topics_vk)} on the one that "
                "started the run; put the same file on both"
            )
        return found


class TopicSteps:
    """One machine's steps; the `LocalSteps` of headrace.cluster."""

    def __init__(self, work: TopicWork, rank: int) -> None:
        self.work, self.rank = work, rank
        settings = work.settings
        # Steps of other machines count too: they have moved λ, so ours are as small as theirs make them.
        rate = replace(settings.rate, workers=work.world_size)
        settings = replace(settings, rate=rate, noise=settings.noise + 7919 * rank)
        self.task = TopicTask(work.topics_vk.T, settings, work.documents)
        self.documents = work.open()
        self.passes, self.chunk, self.at, self.steps = 0, 0, 0, 0
        self._chunks: Iterator[Corpus] | None = None
        self._share: Corpus | None = None

    def resume(self, place: Any) -> None:
        if place is None:
            return
        self.passes, chunk, at, self.steps = (int(place[name]) for name in PLACE)
        if chunk:
            # The chunk at hand is read again; of this machine's range of it, what was merged is skipped.
            self._chunks, self.chunk = islice(iter(self.documents), chunk - 1, None), chunk - 1
            self._next_share()
            self.at = at

    def advance(self, vector: Tensor, steps: int) -> Learned:
        """Up to ``steps`` mini-batches from ``vector``."""
        task, size = self.task, self.work.settings.batch_size
        task.pull(vector.reshape(self.work.topics_vk.shape), self.steps + 1)
        taken = rows = 0
        while taken < steps and self._has_share():
            assert self._share is not None
            last = min(self.at + (steps - taken) * size, len(self._share))
            part = self._share.part(self.at, last)
            tally = task.learn(part)
            taken, rows, self.at = taken + tally.steps, rows + tally.documents, last
            self.steps += tally.steps
        finished = not self._has_share()
        values_vk, decay = task.learned()
        return Learned(
            vector=torch.from_numpy(values_vk).reshape(-1),
            steps=taken,
            rows=rows,
            loss=0.0,
            decay=decay,
            place=dict(zip(PLACE, (self.passes, self.chunk, self.at, self.steps), strict=True)),
            finished=finished,
        )

    def _has_share(self) -> bool:
        """Have documents left; False when the last pass is over."""
        while self._share is None or self.at >= len(self._share):
            if self.passes >= self.work.passes or not self._next_share():
                return False
        return True

    def _next_share(self) -> bool:
        """This machine's range of the next chunk; False behind the last chunk of the last pass."""
        if self._chunks is None:
            self._chunks = iter(self.documents)
        chunk = next(self._chunks, None)
        if chunk is None:
            self.passes, self.chunk, self._chunks, self._share, self.at = self.passes + 1, 0, None, None, 0
            return self.passes < self.work.passes
        size, world = len(chunk), self.work.world_size
        # Which machine gets the longer range moves on with the chunks.
        turn = (self.rank + self.chunk) % world
        self._share = chunk.part(size * turn // world, size * (turn + 1) // world)
        self.chunk, self.at = self.chunk + 1, 0
        return True


PLACE = ("passes", "chunk", "at", "steps")


def learn_together(
    settings: Settings,
    learner: Learner,
    documents: Documents,
    path: Any,
    cluster: Any,
    passes: int,
    total_samples: float,
    after: AfterPass,
) -> Any:
    """Learn on a cluster what ``learner`` then has; ``after`` is called when passes are over. Returns how it went."""
    from headrace.training import run_on_cluster

    check_together(settings, documents, path)
    total = documents.total or round(total_samples)
    work = TopicWork(
        settings=settings,
        topics_vk=np.ascontiguousarray(learner.topics.components(np.float32).T),
        corpus=documents.whole() if documents.in_memory else None,
        path=None if documents.in_memory else str(Path(path).resolve()),
        documents=total,
        passes=passes,
        total_steps=passes * -(-total // settings.batch_size),
    )
    watch = _Watch(learner, work.topics_vk.shape, total, passes, after)
    result = run_on_cluster(work, cluster, watch.progress, cores=settings.jobs)
    watch.take(work.topics_vk)
    learner.step = 1 + result.steps
    watch.end()
    return result


def check_together(settings: Settings, documents: Documents, path: Any) -> None:
    """What cannot be learned on a cluster, said before anything starts."""
    if settings.method == "batch":
        raise OptionError(
            "cluster= learns in mini-batches and learning_method='batch' takes one step per pass; choose 'online' or "
            "'collapsed'"
        )
    if settings.learn_priors:
        raise OptionError("learn_priors and cluster= do not go together; leave out one of them")
    if not documents.in_memory and not isinstance(path, (str, Path)):
        raise OptionError(
            "cluster= wants documents that every machine can read again: a matrix, or a path that all machines have"
        )


class _Watch:
    """Follows a cluster's passes."""

    def __init__(
        self, learner: Learner, shape: tuple[int, ...], total: int, passes: int, after: AfterPass
    ) -> None:
        self.learner, self.shape, self.total, self.most, self.after = learner, shape, total, passes, after
        self.passes, self.stopped = 0, False

    def progress(self, status: dict[str, Any], vector: Callable[[], Tensor]) -> bool:
        passes = status["rows"] // self.total
        # The last pass is followed when the run has ended, with the topics that it ends with.
        if passes > self.passes and passes < self.most and not self.stopped:
            self.take(vector().numpy())
            self._over(passes)
        return self.stopped

    def take(self, values: NDArray[Any]) -> None:
        """The learner goes on with these topics. Compressed pushes may leave a count a little below its prior."""
        prior = self.learner.topics.prior
        self.learner.topics = Topics.from_components(np.maximum(values.reshape(self.shape), prior).T, prior)

    def end(self) -> None:
        """The last pass is over."""
        if not self.stopped and self.most > self.passes:
            self._over(self.most)

    def _over(self, passes: int) -> None:
        # Several passes may have ended since the last look; only the newest topics can be measured.
        new, self.passes = passes - self.passes, passes
        self.stopped = self.after(new * self.total, new)
