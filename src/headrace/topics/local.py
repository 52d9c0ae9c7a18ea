"""The local level of DPSVI: several threads learn one set of topics without a lock.

Every mini-batch is a step with a number. The number alone decides the step's weight ρ_t = (τ0 + t)^−κ and the
scale before and after it, so a thread that has taken a number needs nothing from the others. It reads the
topics as they are (rows may mix versions), infers its documents, and adds ρ_t / scale_t+1 × D/|S| ×
statistics to the shared excess. Additions commute; in one thread the result is, bit for bit, the serial
recurrence.

The first steps come in waves: no step reads topics that miss more steps than they have seen. Fourteen threads that all
begin with the drawn topics each break the symmetry in their own way, and the sum of that takes passes to sort out:
documents hold more topics and converge later, which cost half as much again (docs/log.md).

What can go wrong is stated: two threads that add to the same number at the same time may leave one of the two
additions (Hogwild). `Topics.recount` heals the column sums after every round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DivergenceError
from headrace.topics import kernels
from headrace.topics.corpus import Corpus
from headrace.topics.estep import Inference, Run, in_threads, infer_run
from headrace.topics.state import SMALLEST_SCALE, Scratch, Topics, aligned

MOST = 1.0 - 1e-6
"""The largest step weight: at exactly one, the scale would become zero."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """ρ_t = (offset + t)^−decay, for steps t = 1, 2, ..."""

    offset: float = 10.0
    decay: float = 0.7
    workers: int = 1
    """Machines that learn together: of all their steps, this one's step s is about t = workers × s."""

    def at(self, step: int) -> float:
        return float(min((self.offset + self.workers * step) ** -self.decay, MOST))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One numbered step: which documents, with which weight, between which scales."""

    number: int
    run: Run
    weight: float
    before: float
    after: float


def plan_rounds(runs: Sequence[Run], rate: Rate, first: int, scale: float) -> list[list[Step]]:
    """Number the runs from ``first`` and cut them where the scale becomes too small to go on."""
    rounds: list[list[Step]] = []
    current: list[Step] = []
    for number, run in enumerate(runs, start=first):
        weight = rate.at(number)
        after = scale * (1.0 - weight)
        current.append(Step(number=number, run=run, weight=weight, before=scale, after=after))
        scale = after
        if scale < SMALLEST_SCALE:
            rounds.append(current)
            current, scale = [], 1.0
    return [*rounds, current] if current else rounds


def waves(steps: Sequence[Step], jobs: int) -> list[Sequence[Step]]:
    """``steps`` cut where threads must wait for one another; all that follows step ``jobs`` is one wave.

    A wave that begins with step t has at most t − 1 steps, so each of them misses no more than there have been.
    """
    cut: list[Sequence[Step]] = []
    at = 0
    while at < len(steps):
        size = max(1, steps[at].number - 1)
        end = at + size if size < jobs else len(steps)
        cut.append(steps[at:end])
        at = end
    return cut


@dataclass
class Tally:
    """What the steps did."""

    documents: int = 0
    iterations: int = 0
    steps: int = 0


Observer = Callable[[Step, NDArray[np.float32]], None]


def take_step(
    topics: Topics, corpus: Corpus, step: Step, how: Inference, total: float, scratch: Scratch
) -> int:
    """One step of the local level; returns the iterations of its documents."""
    used, rounds = infer_run(
        topics, corpus, step.run, how, scratch, scale=step.before, eps=0.0, noise=how.noise_at(step.number)
    )
    first, last = step.run
    factor = step.weight / step.after * total / (last - first)
    kernels.apply(
        topics.flat, scratch.words, used, scratch.width, scratch.rows, np.float32(factor), scratch.column
    )
    # In place: another thread holds the same array, and a new one would lose its additions.
    topics.column += factor * scratch.column
    return rounds


def run_steps(
    topics: Topics,
    corpus: Corpus,
    runs: Sequence[Run],
    inference: Callable[[], Inference],
    rate: Rate,
    first: int,
    total: float,
    scratches: Sequence[Scratch],
    observe: Observer | None = None,
) -> Tally:
    """Take one step per run, numbered from ``first``, in as many threads as there are scratches.

    ``total`` is the size of the whole collection that a run stands for. ``inference`` is asked before every
    step, so priors may be learned on the way; ``observe`` sees every step with the γ of its documents.
    """
    tallies = [Tally() for _ in scratches]

    def work(worker: int, step: Step) -> None:
        scratch, tally = scratches[worker], tallies[worker]
        tally.iterations += take_step(topics, corpus, step, inference(), total, scratch)
        tally.documents += step.run[1] - step.run[0]
        tally.steps += 1
        if observe is not None:
            observe(step, scratch.gammas[: step.run[1] - step.run[0]])

    for steps in plan_rounds(runs, rate, first, topics.scale):
        for wave in waves(steps, len(scratches)):
            in_threads(work, wave, len(scratches), "topic")
        topics.scale = steps[-1].after
        if len(scratches) > 1:
            topics.recount()
        check_finite(topics)
        if topics.scale < SMALLEST_SCALE:
            topics.rebase()
    done = Tally(*(sum(getattr(t, name) for t in tallies) for name in ("documents", "iterations", "steps")))
    # A lock-free prototype crashed in every thread while its timer counted documents: count what was done.
    assert done.documents == sum(last - first for first, last in runs)
    return done


def check_finite(topics: Topics) -> None:
    """Stop when the topics are no numbers any more; the column sums see every element."""
    if not np.isfinite(topics.column).all():
        raise DivergenceError(
            "the topics are no longer finite; check the counts for extreme values, or lower total_samples"
        )


def batch_pass(
    topics: Topics,
    chunks: Iterable[tuple[Corpus, Sequence[Run]]],
    how: Inference,
    scratches: Sequence[Scratch],
    step: int = 1,
    observe: Callable[[Run, NDArray[np.float32]], None] | None = None,
) -> Tally:
    """One pass of batch learning: λ ← prior + the statistics of all documents.

    The E-steps run in threads; adding a run's statistics to the sum takes turns, because here every addition
    counts, and takes a few percent of the E-step's time.
    """
    fresh = Topics(aligned(topics.excess.shape), topics.topics, topics.prior)
    tally, turn = Tally(), threading.Lock()

    for corpus, runs in chunks:

        def work(worker: int, run: Run, corpus: Corpus = corpus) -> None:
            scratch = scratches[worker]
            noise = how.noise_at(step + run[0])
            used, rounds = infer_run(topics, corpus, run, how, scratch, eps=0.0, noise=noise)
            if observe is not None:
                observe(run, scratch.gammas[: run[1] - run[0]])
            with turn:
                kernels.apply(
                    fresh.flat,
                    scratch.words,
                    used,
                    scratch.width,
                    scratch.rows,
                    np.float32(1.0),
                    scratch.column,
                )
                tally.documents += run[1] - run[0]
                tally.iterations += rounds

        in_threads(work, runs, len(scratches), "topic")
        assert tally.documents >= len(corpus)
    topics.excess, topics.scale = fresh.excess, 1.0
    topics.recount()
    check_finite(topics)
    return tally
