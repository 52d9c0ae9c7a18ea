"""How many documents per CPU-second does each library learn from, at which held-out perplexity?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics.py [--data ap kos nips pnas] [--topics 50 100]``
(needs the ``topics`` extra; gensim is measured when it is installed).

Every library makes five passes of online variational Bayes over the same 90 % of the documents with the same
options (batch 256, offset 10, decay 0.7, priors 1/K, convergence 1e-3 or 100 iterations). CPU time of the whole
process over ``fit``, rounds interleaved, the best of each library's rounds. Perplexity: document completion on
the other 10 %, computed for all libraries by the same code from their topics. High documents per second are
good; a perplexity is comparable when it is within 1 % of scikit-learn's.

Two shared cores with AVX-512 (Sapphire Rapids), busy with other work; Python 3.11, numba 0.68.1, scikit-learn
1.9.1, gensim 4.4.0; two rounds (documents per CPU-second; ratio to headrace; perplexity against scikit-learn's):

===========  ==========  ==================  ====================  =====================================
corpus       headrace    scikit-learn        gensim                perplexity, headrace / gensim
===========  ==========  ==================  ====================  =====================================
AP, K=50     32,307      1,962 (16.5 x)      1,677 (19.3 x)        -2.2 % / -2.2 %
AP, K=100    22,058      1,237 (17.8 x)      1,091 (20.2 x)        +0.6 % / -1.4 %
KOS, K=50    43,071      2,824 (15.2 x)      2,418 (17.8 x)        -0.8 % / +1.1 %
KOS, K=100   27,653      1,578 (17.5 x)      1,668 (16.6 x)        +1.6 % / +1.9 %
PNAS, K=100  8,226       815 (10.1 x)        746 (11.0 x)          -0.0 % / -0.2 % (one round)
===========  ==========  ==================  ====================  =====================================

One seed says nothing about 1 %: seeds differ by 1.5 to 3 %. Means and errors of 40 seeds of headrace against 20 of
scikit-learn, same documents: AP, K=50, 2958 ± 14 against 2955 ± 16 (+0.1 %); AP, K=100, 2827 ± 10 against 2819 ± 14
(+0.3 %); KOS, K=50, 1793 ± 5 against 1807 ± 7 (-0.8 %); KOS, K=100, 1766 ± 4 against 1765 ± 7 (+0.0 %).
NIPS, K=100, 12 seeds against 5: 1965 ± 5 against 1947 ± 13 (+1.0 %); without letting topics go it was 1958 ± 6 on 8
seeds. One round of NIPS: 16.5 x scikit-learn and 16.8 x gensim at K=50, 18.8 x and
17.5 x at K=100.

Where the time goes (AP, K=100, topics learned, microseconds per document): iterations 15, copying and turning
the rows of a document 4, rows of a mini-batch (exp ψ) 6.5, statistics 3.5, numbering words 0.7. A full iteration
runs at 30 to 50 GFLOP/s; what remains is latency in short loops and rows that come from the outer caches.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

FILES = {"ap": "ap_topicmodels.npz", "kos": "kos.npz", "nips": "nips_uci.npz", "pnas": "pnas.npz"}
BATCH, PASSES = 256, 5


def read(name: str) -> csr_matrix:
    values = np.load(Path(os.environ["HEADRACE_DATA"]) / FILES[name], allow_pickle=False)
    parts = tuple(values[f"X_{part}"] for part in ("data", "indices", "indptr"))
    return csr_matrix(parts, shape=tuple(values["X_shape"]), dtype=np.float64)


def split(matrix: csr_matrix, seed: int = 0) -> tuple[csr_matrix, csr_matrix]:
    order = np.random.RandomState(seed).permutation(matrix.shape[0])
    test = matrix.shape[0] // 10
    return matrix[order[test:]], matrix[order[:test]]


def grown(matrix: csr_matrix, documents: int, seed: int = 0) -> csr_matrix:
    """A larger collection of the same kind: every document is half of the words of each of two real ones."""
    if documents <= matrix.shape[0]:
        return matrix
    draws, parts = np.random.RandomState(seed), []
    for first in range(0, documents, 8192):
        pair = draws.randint(0, matrix.shape[0], (2, min(8192, documents - first)))
        halves = [matrix[rows] for rows in pair]
        for half in halves:
            half.data = draws.binomial(half.data.astype(np.int64), 0.5).astype(np.float64)
        both = halves[0] + halves[1]
        both.eliminate_zeros()
        parts.append(both)
    return vstack(parts, format="csr")


def ours(train: csr_matrix, topics: int, seed: int) -> tuple[float, Any]:
    import headrace

    model = headrace.LatentDirichletAllocation(
        topics, learning_method="online", batch_size=BATCH, max_iter=PASSES, random_state=seed
    )
    start = time.process_time()
    model.fit(train)
    return time.process_time() - start, model.components_


def sklearns(train: csr_matrix, topics: int, seed: int) -> tuple[float, Any]:
    from sklearn.decomposition import LatentDirichletAllocation

    model = LatentDirichletAllocation(
        topics, learning_method="online", batch_size=BATCH, max_iter=PASSES, random_state=seed
    )
    start = time.process_time()
    model.fit(train)
    return time.process_time() - start, model.components_


def gensims(train: csr_matrix, topics: int, seed: int) -> tuple[float, Any]:
    from gensim.models import LdaModel

    bounds = zip(train.indptr[:-1], train.indptr[1:], strict=True)
    corpus = [
        list(zip(train.indices[lo:hi].tolist(), train.data[lo:hi].tolist(), strict=True)) for lo, hi in bounds
    ]
    words = {i: str(i) for i in range(train.shape[1])}
    start = time.process_time()
    model = LdaModel(
        corpus, num_topics=topics, id2word=words, chunksize=BATCH, passes=PASSES, decay=0.7, offset=10.0,
        eval_every=None, iterations=100, gamma_threshold=1e-3, random_state=seed, dtype=np.float64,
        alpha="symmetric", eta="symmetric",
    )  # fmt: skip
    return time.process_time() - start, model.state.get_lambda()


def completion(components: Any, held_out: csr_matrix) -> float:
    """One evaluator for all: our inference on the given topics, priors 1/K, tight convergence."""
    import headrace

    judge = headrace.LatentDirichletAllocation(len(components), mean_change_tol=1e-4, max_doc_update_iter=500)
    judge.components_ = components
    return judge.held_out_perplexity(held_out)


def libraries() -> dict[str, Any]:
    found = {"headrace": ours, "scikit-learn": sklearns}
    try:
        import gensim  # noqa: F401
    except ImportError:
        print("gensim is not installed and is left out")
        return found
    return {**found, "gensim": gensims}


def compare(name: str, topics: int, rounds: int) -> None:
    train, held_out = split(read(name))
    seconds: dict[str, list[float]] = {}
    perplexities: dict[str, list[float]] = {}
    for number in range(rounds):
        for library, learn in libraries().items():
            spent, components = learn(train, topics, number)
            seconds.setdefault(library, []).append(spent)
            perplexities.setdefault(library, []).append(completion(components, held_out))
    rates = {library: PASSES * train.shape[0] / min(spent) for library, spent in seconds.items()}
    for library, rate in rates.items():
        ratio = rates["headrace"] / rate
        perplexity = np.mean(perplexities[library])
        off = perplexity / np.mean(perplexities["scikit-learn"]) - 1
        print(
            f"{name:5} K={topics:<4} {library:13} {rate:8.0f} docs/CPU-s   headrace is {ratio:5.1f} x"
            f"   held-out perplexity {perplexity:7.1f} ({off:+.2%} of scikit-learn's)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", default=["ap", "kos"], choices=sorted(FILES))
    parser.add_argument("--topics", nargs="+", type=int, default=[50, 100])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    from headrace.topics.learner import warm_up

    warm_up()
    for name in options.data:
        for topics in options.topics:
            compare(name, topics, options.rounds)


if __name__ == "__main__":
    main()
