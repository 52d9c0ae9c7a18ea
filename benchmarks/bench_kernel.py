"""Are KernelClassifier's fits faster than scikit-learn's SVC and KernelRidge at equal accuracy, and how near
to the machine's matrix-product rate do its kernel products run?

    HEADRACE_DATA=data python benchmarks/bench_kernel.py [mnist] [covtype] [rate]

Both sides run in one process, one after the other, on the same rows; a ratio above 1 means that Headrace is
faster. Accuracies are printed beside the times; the kernels are each side's best of a small search made
beforehand (the same for both where both have it). ``rate`` compares floating-point operations 2·m·n·(d+c)
per second of K(B, X)·A with those of a plain float32 product of the same shapes.

TABLE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.preprocessing import LabelBinarizer
from sklearn.svm import SVC

from headrace import KernelClassifier
from headrace.kernel.functions import find_kernel
from headrace.kernel.operands import Operands
from headrace.kernel.products import KernelProduct

Data = tuple[Any, Any, Any, Any]


def mnist(rows: int) -> Data:
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "mnist.npz", allow_pickle=False) as z:
        chosen = np.random.RandomState(0).permutation(60_000)[:rows]
        flat = {k: z[k].reshape(len(z[k]), -1) for k in ("x_train", "x_test")}
        scale = np.float32(255)
        return flat["x_train"][chosen] / scale, z["y_train"][chosen], flat["x_test"] / scale, z["y_test"]


def covtype(rows: int, held: int = 10_000) -> Data:
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "covtype.npz", allow_pickle=False) as z:
        chosen = np.random.RandomState(0).permutation(len(z["y"]))[: rows + held]
        X, y = z["X"][chosen].astype(np.float32), z["y"][chosen]
    X = (X - X[:rows].mean(0)) / (X[:rows].std(0) + 1e-6)
    return X[:rows], y[:rows], X[rows:], y[rows:]


class RidgeClassifier:
    """KernelRidge on indicator columns."""

    def __init__(self, **options: Any) -> None:
        self.ridge, self.labels = KernelRidge(**options), LabelBinarizer()

    def fit(self, X: Any, y: Any) -> RidgeClassifier:
        self.ridge.fit(X, self.labels.fit_transform(y).astype(np.float32))
        return self

    def score(self, X: Any, y: Any) -> float:
        return float((self.labels.classes_[self.ridge.predict(X).argmax(1)] == y).mean())


def timed(name: str, make: Callable[[], Any], data: Data) -> tuple[float, float]:
    X, y, Xt, yt = data
    start = time.perf_counter()
    model = make().fit(X, y)
    fitted = time.perf_counter() - start
    accuracy = model.score(Xt, yt)
    total = time.perf_counter() - start
    print(
        f"  {name:34} fit {fitted:7.2f} s   with predictions {total:7.2f} s   accuracy {accuracy:.4f}",
        flush=True,
    )
    return fitted, accuracy


def compare(title: str, data: Data, ours: dict[str, Any], theirs: dict[str, Callable[[], Any]]) -> None:
    print(f"{title}: {data[0].shape[0]} rows of {data[0].shape[1]}")
    KernelClassifier(verbose=False, **ours).fit(data[0][:3000], data[1][:3000])  # warm up
    fit, accuracy = timed("headrace", lambda: KernelClassifier(verbose=False, random_state=0, **ours), data)
    for name, make in theirs.items():
        other, reached = timed(name, make, data)
        print(
            f"    {name} / headrace: {other / fit:.2f} in time, {100 * (accuracy - reached):+.2f} points "
            "of accuracy"
        )


def bench_mnist() -> None:
    compare(
        "MNIST",
        mnist(10_000),
        {"kernel": "laplacian", "bandwidth": 10.0, "epochs": 3},
        {
            "SVC(rbf, C=10, gamma=0.02)": lambda: SVC(C=10, gamma=0.02),
            "KernelRidge(laplacian-like rbf)": lambda: RidgeClassifier(kernel="rbf", gamma=0.015, alpha=0.05),
        },
    )


def bench_covtype() -> None:
    data = covtype(50_000)
    compare(
        "covtype",
        data,
        {"kernel": "laplacian", "bandwidth": 2.0, "epochs": 4},
        {"SVC(rbf, C=10, gamma=0.5)": lambda: SVC(C=10, gamma=0.5, cache_size=2000)},
    )
    n = len(data[0])
    print(f"  KernelRidge would hold {2 * 8 * n * n / 2**30:.0f} GB (the matrix in float64 and its factor)")


def bench_rate() -> None:
    torch.manual_seed(0)
    for d, c in ((784, 10), (512, 100), (54, 7)):
        m, n = 512, 16_384
        operands = Operands(
            kernel=find_kernel("laplacian"),
            bandwidth=10.0,
            mean_d=torch.zeros(d),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        product = KernelProduct(operands, operands.right(torch.randn(n, d)))
        left, weights = operands.left(product.right_pk[:m]), torch.randn(n, c)
        a, b, out = torch.randn(m, d), torch.randn(n, d).T, torch.empty(m, n)
        a2, b2 = torch.randn(2048, 2048), torch.randn(2048, 2048)
        best = {"ours": 1e9, "product": 1e9, "square": 1e9}
        for _ in range(12):  # interleaved, so that other load falls on all alike
            for name, call in (
                ("ours", lambda: product.multiply(left, weights)),
                ("product", lambda: torch.mm(a, b, out=out)),
                ("square", lambda: torch.mm(a2, b2)),
            ):
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
        rate = 2 * m * n * (d + c) / best["ours"]
        shaped, square = 2 * m * n * d / best["product"], 2 * 2048**3 / best["square"]
        print(
            f"d={d} c={c}: {rate / 1e9:.0f} GFLOP/s, {rate / shaped:.0%} of a product of this shape, "
            f"{rate / square:.0%} of a square product"
        )


if __name__ == "__main__":
    if not os.environ.get("HEADRACE_DATA"):
        print("HEADRACE_DATA is not set: only the rate is measured")
    chosen = sys.argv[1:] or (["mnist", "covtype", "rate"] if os.environ.get("HEADRACE_DATA") else ["rate"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in chosen:
        {"mnist": bench_mnist, "covtype": bench_covtype, "rate": bench_rate}[name]()
