"""The Triton kernels against the oracle and the torch path: in Triton's interpreter, and on a GPU where there is one.

The interpreter has to be chosen before triton is imported, so its test runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from headrace.topics import batched
from headrace.topics.corpus import corpus_of
from headrace.topics.device import DeviceTopics
from headrace.topics.estep import EPS, Inference, runs_of
from headrace.topics.local import Rate
from headrace.topics.state import Topics

# topics, whether collapsed, largest block of words: more topics than stay live, few, documents beyond a block
CASES = [(40, False, 1024), (40, True, 1024), (5, False, 1024), (40, False, 32)]


def oracle() -> Any:
    path = Path(__file__).parent.parent / "oracles" / "topics.py"
    spec = importlib.util.spec_from_file_location("oracle_topics", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(count: int, words: int, seed: int) -> csr_matrix:
    """Documents of very different lengths, one of them empty."""
    draws = np.random.RandomState(seed)
    counts = draws.poisson(1.5, (count, words)) * (draws.rand(count, words) < draws.rand(count, 1) ** 2)
    counts[count // 2] = 0
    return csr_matrix(counts.astype(np.float64))


def sharp(topics: int, words: int) -> np.ndarray:
    draws = np.random.RandomState(topics)
    return draws.gamma(0.3, 30.0, (topics, words)) * (draws.rand(topics, words) < 0.1) + 0.05


def compare(
    device: torch.device, made_by: Any, count: int = 8, words: int = 45, cases: list[Any] = CASES
) -> None:
    """One path against the oracle (γ, a step, the words' likelihood) and against the torch path bit by bit of work."""
    for topics, collapsed, block in cases:
        if hasattr(made_by, "CLASSES"):
            made_by.CLASSES = ((16, 1), (32, 1)) if block < 64 else ((64, 1), (1024, 8))
        matrix = documents(count, words, topics)
        corpus, components = corpus_of(matrix), sharp(topics, words)
        alpha = np.full(topics, 1 / topics, dtype=np.float32)
        how = Inference(alpha=alpha, tol=1e-5, max_iter=400, collapsed=collapsed)
        pairs = [(matrix[i].indices, matrix[i].data) for i in range(count)]
        there = DeviceTopics(Topics.from_components(components, 0.05), device, made_by)
        options = {"tol": 1e-5, "max_iter": 400, "collapsed": collapsed}
        expected, statistics = oracle().e_step(pairs, components, alpha.astype(np.float64), **options)
        gammas = there.infer(corpus, how, eps=0.0)
        assert np.abs(gammas - expected).max() < 5e-3, (topics, collapsed, np.abs(gammas - expected).max())
        theta = expected / expected.sum(axis=1, keepdims=True)
        beta = components / components.sum(axis=1, keepdims=True)
        wanted = float((matrix.toarray() * np.log(theta @ beta)).sum())
        assert abs(there.word_sum(corpus, theta, collapsed=True) / wanted - 1) < 1e-5
        tally = there.steps(corpus, [(0, count)], how, Rate(), 1, 3.0 * count)
        rho = 11.0**-0.7
        after = oracle().online_step(components, statistics, 0.05, rho, 3.0)
        assert tally.documents == count and tally.iterations > 0
        made = there.home().components()
        assert np.abs(made - after).max() < 5e-3 * after.max(), (
            topics,
            collapsed,
            np.abs(made - after).max(),
        )
        same_as_torch(device, made_by, corpus, components, collapsed)


def same_as_torch(device: torch.device, made_by: Any, corpus: Any, components: Any, collapsed: bool) -> None:
    """A few iterations from noisy starts, mini-batches, scikit-learn's constant: equal to rounding."""
    topics = len(components)
    how = Inference(
        alpha=np.linspace(0.1, 0.3, topics, dtype=np.float32),
        tol=0.0,
        max_iter=4,
        collapsed=collapsed,
        noise=5,
    )
    runs, found = runs_of(len(corpus), 5), []
    for module in (made_by, batched):
        there = DeviceTopics(Topics.from_components(components, 0.05), device, module)
        tally = there.steps(corpus, runs, how, Rate(), 3, 30.0)
        filled = int((np.diff(corpus.indptr) > 0).sum())
        assert tally.steps == len(runs) and tally.iterations == 4 * filled
        gammas = there.infer(corpus, how, eps=EPS)
        there.batch(iter([(corpus, runs)]), how, 1)
        found.append((gammas, there.home().components()))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-3, rtol=1e-3)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=2e-3, rtol=1e-3)


def test_torch_path_on_the_cpu() -> None:
    compare(torch.device("cpu"), batched)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter() -> None:
    code = (
        "import importlib.util, torch, triton.runtime.interpreter as i\n"
        # The interpreter converts arrays of one element with int(), which numpy 2.4 refuses.
        "before = i._LangPatchScope.set_attr\n"
        "def set_attr(self, obj, name, value):\n"
        "    index = lambda tensor: int(tensor.handle.data.item())\n"
        "    return before(self, obj, name, index if name == '__index__' else value)\n"
        "i._LangPatchScope.set_attr = set_attr\n"
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r})\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        "from headrace.topics import launches\n"
        "t.compare(torch.device('cpu'), launches)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu() -> None:
    from headrace.topics import launches

    # Each case compiles a dozen kernels: the first one here, the others below.
    compare(torch.device("cuda"), launches, count=100, words=900, cases=CASES[:1])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_other_cases_on_the_gpu() -> None:
    from headrace.topics import launches

    compare(torch.device("cuda"), launches, count=100, words=900, cases=CASES[1:])
