"""How well the topics explain documents: scikit-learn's bound and perplexity, and document completion.

The bound is the variational lower bound on log p(documents), term by term as scikit-learn defines it, so that
perplexities can be compared across the two libraries. It charges for the topics too (V × K terms), so it is
no measure for comparing numbers of topics or kinds of inference. Document completion is: infer a document
from half of its words, predict the other half. Both perplexities are exp(−log likelihood per word): lower is
better, V would be a uniform guess, and differences of one percent are within the noise of different seeds.

The words' part is a compiled float32 sum per word, added up in float64; the Dirichlet terms are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, psi

from headrace.topics import kernels
from headrace.topics.corpus import Corpus
from headrace.topics.estep import RUN, copy_rows, in_threads, runs_of
from headrace.topics.state import Scratch, Topics, aligned

WordSum = Callable[[NDArray[Any], bool], float]
"""``(powers, collapsed)`` → `word_sum` of some documents, on whatever device holds the topics."""


def document_bound(gammas: NDArray[Any], alpha: NDArray[Any], word_sum: WordSum, jobs: int = 1) -> float:
    """E[log p(words, θ) − log q(θ)]: the part of the bound that belongs to the documents."""
    alpha = np.asarray(alpha, dtype=np.float64)
    powers = np.empty(gammas.shape, dtype=np.float32)
    parts: list[float] = []

    def work(worker: int, run: tuple[int, int]) -> None:
        gamma = np.asarray(gammas[slice(*run)], dtype=np.float64)
        sums = gamma.sum(axis=1)
        expectation = psi(gamma) - psi(sums)[:, None]
        # Below e^−87 float32 has only denormals, which cost some processors more than the rest of this function.
        powers[slice(*run)] = np.exp(np.maximum(expectation, -87.0))
        value = np.sum((alpha - gamma) * expectation) + np.sum(gammaln(gamma)) - np.sum(gammaln(sums))
        parts.append(float(value))

    in_threads(work, runs_of(len(gammas), RUN), jobs, "bound")
    value = sum(sorted(parts)) + word_sum(powers, False)
    return value + len(gammas) * float(gammaln(alpha.sum()) - np.sum(gammaln(alpha)))


def topic_bound(topics: Topics, jobs: int = 1) -> float:
    """E[log p(β | prior) − log q(β | λ)]; the same bits with any number of threads."""
    sums, prior = topics.sums(), topics.prior
    log_sums = psi(sums)
    runs = runs_of(topics.features, RUN)
    parts = np.zeros(len(runs))

    def work(worker: int, run: tuple[int, int]) -> None:
        # Σ (prior − λ) (ψ(λ) − ψ(Σλ)) + log Γ(λ); scale × excess is λ − prior already.
        parts[run[0] // RUN] = kernels.topic_terms(
            topics.excess, *run, topics.topics, topics.scale, prior, log_sums
        )

    in_threads(work, runs, jobs, "bound")
    value = float(parts.sum()) - topics.features * topics.topics * float(gammaln(prior))
    return value + float(np.sum(gammaln(prior * topics.features) - gammaln(sums)))


def word_sum(
    topics: Topics, corpus: Corpus, powers: NDArray[Any], scratches: Sequence[Scratch], *, collapsed: bool
) -> float:
    """Σ count × log Σ_k powers_dk B_wk, with B = exp(E[log β]) or, when collapsed, E[β]."""
    if not len(corpus):
        return 0.0
    parts: list[float] = []
    wide = aligned((len(corpus), topics.width))
    wide[:, : topics.topics] = powers

    def work(worker: int, run: tuple[int, int]) -> None:
        scratch, (first, last) = scratches[worker], run
        copy_rows(topics, corpus, run, scratch, collapsed=collapsed, scale=topics.scale, eps=0.0)
        parts.append(
            kernels.word_likelihood(
                corpus.indptr, corpus.counts, first, last, scratch.locs, scratch.rows, scratch.scales,
                topics.width, wide[first:last].reshape(-1),
            )
        )  # fmt: skip

    in_threads(work, runs_of(len(corpus), RUN), len(scratches), "likelihood")
    # Sorted, so that the order in which threads finished does not change the last bits.
    return float(sum(sorted(parts)))


def completion_perplexity(gammas: NDArray[Any], words: float, word_sum: WordSum) -> float:
    """exp(−log likelihood per word) of the hidden words under θ inferred from the observed ones."""
    if not words:
        return float("nan")
    gammas = gammas.astype(np.float64)
    return per_word(word_sum(gammas / gammas.sum(axis=1, keepdims=True), True), words)


def per_word(value: float, words: float) -> float:
    """exp(−value / words): infinite for bounds beyond any number, not a number without words."""
    if not words:
        return float("nan")
    with np.errstate(over="ignore"):
        return float(np.exp(-value / words))


def split_words(corpus: Corpus, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Every document in two halves: each occurrence of a word goes to one of them by a fair coin.

    Counts that are not whole numbers are halved.
    """
    draws = np.random.RandomState(seed)
    counts = corpus.counts
    if np.array_equal(counts, np.floor(counts)):
        first = draws.binomial(counts.astype(np.int64), 0.5).astype(np.float32)
    else:
        first = counts * np.float32(0.5)
    return _with(corpus, first), _with(corpus, counts - first)


def _with(corpus: Corpus, counts: NDArray[np.float32]) -> Corpus:
    """The corpus with other counts, and without the entries whose count is zero."""
    kept = counts > 0
    ends = np.concatenate([[0], np.cumsum(kept)])
    return Corpus(ends[corpus.indptr].astype(np.int64), corpus.indices[kept], counts[kept], corpus.features)
