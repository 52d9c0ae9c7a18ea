"""Denormals are zero inside the kernels, and what they were outside."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from numba import njit
from scipy.sparse import csr_matrix

from headrace.engine.denormals import flush_denormals, restore
from headrace.topics.bound import topic_bound, word_sum
from headrace.topics.corpus import corpus_of
from headrace.topics.estep import Inference, copy_rows
from headrace.topics.local import Rate, run_steps
from headrace.topics.state import Scratch, Topics

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="only x86-64 has the mode"
)

SMALLEST = np.finfo(np.float32).tiny
K, V = 40, 200


def denormals(values: np.ndarray) -> int:
    sizes = np.abs(values)
    return int(((sizes > 0) & (sizes < SMALLEST)).sum())


def are_kept() -> tuple[bool, bool]:
    """Whether this thread makes denormals, and reads them, as arithmetic outside of kernels does."""
    made = np.full(64, 1e-20, np.float32) * np.full(64, 1e-20, np.float32)
    read = np.full(64, 1e-40, np.float32) * np.full(64, 1e20, np.float32)
    return bool((made > 0).all()), bool((read > 0).all())


def sharp() -> Topics:
    """Topics after much data under a small prior: exp(ψ(0.01)) is 1e-44."""
    components = np.full((K, V), 0.01)
    for k in range(K):
        components[k, 5 * k : 5 * k + 5] = np.random.RandomState(k).gamma(1.0, 2000.0, 5)
    return Topics.from_components(components, 0.01)


@njit(nogil=True)
def product_inside(a, b):
    mode = flush_denormals()
    product = a[0] * b[0]
    restore(mode)
    return product


def test_a_kernel_takes_denormals_for_zero() -> None:
    # Making one, and reading one: two bits.
    assert product_inside(np.full(1, 1e-20, np.float32), np.full(1, 1e-20, np.float32)) == 0
    assert product_inside(np.full(1, 1e-40, np.float32), np.full(1, 1e20, np.float32)) == 0
    assert product_inside(np.full(1, 2.0, np.float32), np.full(1, 3.0, np.float32)) == 6


def test_no_denormal_stays_in_the_rows(corpus: csr_matrix) -> None:
    topics, scratch, documents = sharp(), Scratch(K, V), corpus_of(corpus)
    how = Inference(alpha=np.full(K, 1 / K, np.float32))
    used = copy_rows(topics, documents, (0, 64), scratch, collapsed=False, scale=1.0, eps=0.0)
    rows = scratch.rows[: used * scratch.width]
    assert denormals(rows) == 0
    # They would be there: nearly all words of nearly all topics are at the prior.
    assert (rows == 0).mean() > 0.5
    run_steps(topics, documents, [(0, 64)], lambda: how, Rate(), 1, 300.0, [scratch])
    assert [denormals(values) for values in (scratch.rows, scratch.powers, scratch.block, topics.excess)] == [
        0
    ] * 4


@pytest.mark.parametrize("flushing", [False, True])
def test_the_mode_of_the_caller_is_what_it_was(corpus: csr_matrix, flushing: bool) -> None:
    topics, scratches, documents = sharp(), [Scratch(K, V)], corpus_of(corpus)
    how = Inference(alpha=np.full(K, 1 / K, np.float32))
    torch.set_flush_denormal(flushing)
    try:
        expected = (not flushing, not flushing)
        assert are_kept() == expected
        run_steps(topics, documents, [(0, 64), (64, 128)], lambda: how, Rate(), 1, 300.0, scratches)
        assert are_kept() == expected
        word_sum(topics, documents, np.full((len(documents), K), 1 / K), scratches, collapsed=False)
        topic_bound(topics)
        assert are_kept() == expected
    finally:
        torch.set_flush_denormal(False)
