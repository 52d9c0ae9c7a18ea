"""The compiled kernels against the float64 oracle and against scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from scipy.sparse import csr_matrix
from scipy.special import psi

from headrace.engine import tiles
from headrace.topics import kernels, vector
from headrace.topics.bound import document_bound, topic_bound, word_sum
from headrace.topics.corpus import corpus_of
from headrace.topics.estep import Inference, infer_all, infer_run
from headrace.topics.state import Scratch, Topics


def documents_of(matrix: csr_matrix) -> list:
    bounds = zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
    return [(matrix.indices[lo:hi], matrix.data[lo:hi]) for lo, hi in bounds]


@njit
def exp_digamma(x, out):
    for i in range(0, x.size, 16):
        vector.store(out, i, vector.exp_digamma(vector.load(x, i), vector.splat(np.float32(0))))


def test_exp_digamma_is_scipys() -> None:
    x = np.logspace(np.log10(0.02), 7, 4800).astype(np.float32)
    out = np.empty_like(x)
    exp_digamma(x, out)
    expected = np.exp(psi(x.astype(np.float64)))
    # The error of the power of e, one float32 step of up to 50, is the error of the result.
    # Above 1e6 the fractions of the recurrence are left at 4e-6.
    allowed = 6e-7 + 4e-7 / x + np.where(x > 1e6, 4e-6, 0)
    assert (np.abs(out - expected) / expected < allowed).all()


@njit
def turned(table, offsets, out):
    vector.transpose(table, offsets, 16, 16, out, 0, 24)


def test_transpose_gathers_sixteen_rows() -> None:
    table = np.arange(40 * 32, dtype=np.float32)
    rows = np.random.RandomState(0).permutation(40)[:32]
    out = np.zeros(16 * 24, dtype=np.float32)
    turned(table, (rows * 32).astype(np.int32), out)
    assert np.array_equal(out.reshape(16, 24)[:, :16], table.reshape(40, 32)[rows[16:], 16:].T)


def run(matrix: csr_matrix, components, alpha, prior=0.1, **options):
    topics = Topics.from_components(components, prior)
    how = Inference(alpha=np.asarray(alpha, dtype=np.float32), **options)
    scratch = Scratch(*components.shape)
    used, rounds = infer_run(topics, corpus_of(matrix), (0, matrix.shape[0]), how, scratch, eps=0.0)
    stats = np.zeros(components.shape)
    table = scratch.rows[: used * scratch.width].reshape(used, scratch.width)
    stats[:, scratch.words[:used]] = table[:, : len(components)].T
    return scratch.gammas[: matrix.shape[0]].copy(), stats, rounds


@pytest.mark.parametrize("topics", [1, 5, 16, 23])
@pytest.mark.parametrize("collapsed", [False, True])
def test_e_step_is_the_oracles(oracle: Any, corpus: csr_matrix, topics: int, collapsed: bool) -> None:
    matrix = corpus[:60]
    draws = np.random.RandomState(topics)
    components = draws.gamma(0.3, 1.0, (topics, 200)) + 0.05
    alpha = draws.uniform(0.05, 0.5, topics)
    options = {"tol": 1e-4, "max_iter": 300, "collapsed": collapsed}
    gammas, stats, _ = run(matrix, components, alpha, **options)
    expected, statistics = oracle.e_step(documents_of(matrix), components, alpha, **options)
    assert np.abs(gammas - expected).max() < 2e-3
    assert np.abs(stats - statistics).max() < 2e-3
    # Every word of every document is given to some topic.
    assert np.allclose(stats.sum(axis=0), matrix.sum(axis=0), rtol=1e-4)


def test_iterations_are_counted_as_in_the_oracle(oracle: Any, corpus: csr_matrix) -> None:
    components = np.random.RandomState(0).gamma(100.0, 0.01, (6, 200))
    for limit in (1, 2, 3, 7):
        gammas, _, rounds = run(corpus[:20], components, np.full(6, 0.2), tol=0.0, max_iter=limit)
        expected, _ = oracle.e_step(
            documents_of(corpus[:20]), components, np.full(6, 0.2), tol=0.0, max_iter=limit
        )
        assert rounds == 20 * limit
        assert np.abs(gammas - expected).max() < 1e-3


def sharp_topics(topics: int, words: int, seed: int) -> np.ndarray:
    """Topics after much data: few words each, everything else at the prior."""
    draws = np.random.RandomState(seed)
    components = np.full((topics, words), 0.02)
    for k in range(topics):
        components[k, draws.permutation(words)[: words // topics * 2]] += draws.gamma(
            1.0, 200.0, words // topics * 2
        )
    return components


def test_topics_that_left_do_not_change_the_result(oracle: Any, corpus: csr_matrix) -> None:
    components = sharp_topics(40, 200, 3)
    alpha = np.full(40, 1 / 40)
    gammas, stats, _ = run(corpus[:40], components, alpha, 0.02, tol=1e-5, max_iter=1000)
    expected, statistics = oracle.e_step(
        documents_of(corpus[:40]), components, alpha, tol=1e-5, max_iter=1000
    )
    assert np.abs(gammas - expected).max() < 0.02
    assert np.abs(stats - statistics).max() < 0.02


def test_a_topic_that_left_too_early_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # One document whose last word only topic 1 explains, and only by a little more than the floor allows.
    block = np.zeros(2 * 16, dtype=np.float32)
    block[0:2], block[16:18] = [1.0, 1e-6], [0.0, 1.0]
    numbers, out = np.zeros((6, 16), np.float32), np.array([1], np.int32)
    offsets = np.zeros(16, np.int32)
    numbers[0, :2], numbers[1, :2] = [5.0, 2.0], [1.0, 1e5]
    assert revived(block, out, offsets, numbers)
    numbers[1, 1] = 1e-5
    assert not revived(block, out, offsets, numbers)


@njit
def revived(block, out, offsets, numbers):
    full, share, gamma, e, mask = kernels._rows_of(numbers)
    sums = full + 5 * numbers.shape[1] * 4
    at = tiles.address
    return kernels._revived(at(block), 16, at(out), 1, full, False, share, at(offsets), gamma, e, mask, sums)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_small_corpus(oracle: Any, data: st.DataObject) -> None:
    documents, words, topics = (data.draw(st.integers(1, 7)) for _ in range(3))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=documents * words, max_size=documents * words))
    matrix = csr_matrix(np.array(counts, dtype=np.float64).reshape(documents, words))
    components = np.random.RandomState(data.draw(st.integers(0, 9))).gamma(1.0, 1.0, (topics, words)) + 0.02
    alpha = np.full(topics, data.draw(st.sampled_from([0.01, 0.1, 1.0, 5.0])))
    # Four iterations: equal topics under a small prior are an unstable balance that rounding tips over later.
    gammas, stats, _ = run(matrix, components, alpha, max_iter=4, tol=0.0)
    expected, statistics = oracle.e_step(documents_of(matrix), components, alpha, max_iter=4, tol=0.0)
    filled = np.diff(matrix.indptr) > 0
    assert np.abs(gammas - expected)[filled].max(initial=0) < 1e-2
    assert np.abs(stats - statistics).max() < 1e-2
    assert np.array_equal(gammas[~filled], np.tile(alpha.astype(np.float32), ((~filled).sum(), 1)))


def test_bound_is_the_oracles(oracle: Any, corpus: csr_matrix) -> None:
    matrix = corpus[:50]
    components = np.random.RandomState(0).gamma(0.5, 2.0, (6, 200)) + 0.1
    alpha = np.linspace(0.1, 0.6, 6)
    topics, scratches = Topics.from_components(components, 0.3), [Scratch(6, 200)]
    gammas = infer_all(topics, corpus_of(matrix), Inference(alpha=alpha.astype(np.float32)), scratches)

    def words(powers: Any, collapsed: bool) -> float:
        return word_sum(topics, corpus_of(matrix), powers, scratches, collapsed=collapsed)

    ours = document_bound(gammas, alpha, words) + topic_bound(topics)
    expected = oracle.bound(documents_of(matrix), components, gammas.astype(np.float64), alpha, 0.3)
    assert ours == pytest.approx(expected, rel=1e-6)


def test_the_topics_part_of_the_bound_is_the_same_in_threads(oracle: Any) -> None:
    components = np.random.RandomState(0).gamma(0.5, 2.0, (6, 1300)) + 0.1
    topics = Topics.from_components(components, 0.3)
    assert topic_bound(topics, 3) == topic_bound(topics)
    nothing = csr_matrix((1, 1300))
    expected = oracle.bound(documents_of(nothing), components, np.full((1, 6), 0.2), np.full(6, 0.2), 0.3)
    assert topic_bound(topics, 3) == pytest.approx(expected, rel=1e-6)


def test_a_document_that_needs_a_topic_back(oracle: Any) -> None:
    """At first topic 0 holds the frequent word and topic 1 leaves; then topic 2 takes that word over."""
    components = np.array([[500.0, 1000, 98500], [0.001, 90, 99910], [1000.0, 0.001, 99000]])
    matrix, alpha = csr_matrix(np.array([[1000.0, 1, 0]])), np.full(3, 0.5)
    options = {"tol": 1e-6, "max_iter": 2000}
    gammas, _, _ = run(matrix, components, alpha, 0.001, **options)
    expected, _ = oracle.e_step(documents_of(matrix), components, alpha, **options)
    assert expected[0, 1] > 0.504
    assert np.abs(gammas - expected).max() < 1e-3
