"""Small corpora with known topics."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix


@pytest.fixture(scope="session")
def oracle() -> Any:
    """The naive float64 code of tests/oracles/topics.py."""
    path = Path(__file__).parent.parent / "oracles" / "topics.py"
    spec = importlib.util.spec_from_file_location("oracle_topics", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_corpus(
    documents: int, words: int, topics: int, length: int, seed: int, concentration: float = 0.05
) -> tuple[csr_matrix, Any]:
    """Counts drawn from the model itself, and the topics they were drawn from."""
    draws = np.random.RandomState(seed)
    beta = draws.dirichlet(np.full(words, concentration), topics)
    theta = draws.dirichlet(np.full(topics, 0.1), documents)
    rows = [draws.multinomial(draws.poisson(length), p / p.sum()) for p in theta @ beta]
    return csr_matrix(np.array(rows, dtype=np.float64)), beta


@pytest.fixture(scope="session")
def corpus() -> csr_matrix:
    """300 documents over 200 words from 6 topics."""
    return make_corpus(300, 200, 6, 60, seed=1)[0]
