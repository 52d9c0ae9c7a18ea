"""How well the topics explain documents: scikit-learn's bound and perplexity, and document completion.

The bound is the variational lower bound on log p(documents), term by term as scikit-learn defines it, so that
perplexities can be compared across the two libraries. It charges for the topics too (V × K terms), so it is
no measure for comparing numbers of topics or kinds of inference. Document completion is: infer a document
from half of its words, predict the other half. Both perplexities are exp(−log likelihood per word): lower is
better, V would be a uniform guess, and differences of one percent are within the noise of different seeds.

The words' part is a compiled float32 sum per word, added up in float64; the Dirichlet terms are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, psi

from headrace.topics import kernels
from headrace.topics.corpus import Corpus
from headrace.topics.estep import RUN, Inference, copy_rows, in_threads, infer_all, runs_of
from headrace.topics.state import Scratch, Topics, aligned


def document_bound(
    topics: Topics, corpus: Corpus, gammas: NDArray[Any], alpha: NDArray[Any], scratches: Sequence[Scratch]
) -> float:
    """E[log p(words, θ) − log q(θ)]: the part of the bound that belongs to the documents."""
    gammas = np.asarray(gammas, dtype=np.float64)
    alpha = np.asarray(alpha, dtype=np.float64)
    sums = gammas.sum(axis=1)
    expectation = psi(gammas) - psi(sums)[:, None]
    value = word_sum(topics, corpus, np.exp(expectation), scratches, collapsed=False)
    value += float(np.sum((alpha - gammas) * expectation) + np.sum(gammaln(gammas)) - np.sum(gammaln(sums)))
    return value + len(corpus) * float(gammaln(alpha.sum()) - np.sum(gammaln(alpha)))


def topic_bound(topics: Topics) -> float:
    """E[log p(β | prior) − log q(β | λ)]."""
    sums = topics.sums()
    log_sums = psi(sums)
    prior, value = topics.prior, 0.0
    # Σ (prior − λ) (ψ(λ) − ψ(Σλ)) + log Γ(λ); scale × excess is λ − prior already.
    value += float(kernels.topic_terms(topics.excess, topics.topics, topics.scale, prior, log_sums))
    cells = topics.features * topics.topics
    value -= cells * float(gammaln(prior))
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


def completion_perplexity(
    topics: Topics,
    observed: Corpus,
    hidden: Corpus,
    how: Inference,
    scratches: Sequence[Scratch],
) -> float:
    """exp(−log likelihood per word) of ``hidden`` under θ inferred from ``observed``, the same documents."""
    gammas = infer_all(topics, observed, how, scratches, eps=0.0).astype(np.float64)
    theta = gammas / gammas.sum(axis=1, keepdims=True)
    words = hidden.words
    if words == 0:
        return float("nan")
    return float(np.exp(-word_sum(topics, hidden, theta, scratches, collapsed=True) / words))


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
