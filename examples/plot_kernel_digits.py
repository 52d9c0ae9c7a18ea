"""Digits by a kernel machine that finds its batch size, preconditioner and step, and what happens when
batches are forced.

Runs in a few seconds, prints what was chosen and why, and writes ``kernel_digits.html``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

import headrace as hr
from headrace.report.page import Page, Series


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0)

    start = time.perf_counter()
    model = hr.KernelClassifier(kernel="laplacian").fit(X, y)
    print(f"headrace: accuracy {model.score(X_test, y_test):.4f} in {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    svc = SVC(C=10).fit(X, y)
    print(f"SVC(rbf): accuracy {svc.score(X_test, y_test):.4f} in {time.perf_counter() - start:.2f} s")

    epochs, series = list(range(1, 9)), []
    for batch in (16, 64, 256):
        options = {"bandwidth": model.bandwidth_, "batch_size": batch, "warm_start": True, "verbose": False}
        forced = hr.KernelClassifier("laplacian", epochs=1, **options)
        residuals = [forced.fit(X, y).residuals_[-1] for _ in epochs]
        q = forced.plan_["directions"]
        series.append(Series(f"batches of {batch}, {q} directions", epochs, residuals))
    page = Page("Digits by a kernel machine", subtitle=f"accuracy {model.score(X_test, y_test):.4f}")
    page.text(
        "Larger batches need more directions of the kernel flattened; the epochs they need stay the same."
    )
    page.lines(
        "Residual over epochs", series, x_label="epoch", y_label="residual, lower is better", log_y=True
    )
    page.table(["choice", "value", "why"], [[d.name, d.value, d.reason] for d in model.plan_.decisions])
    print("plot:", page.save(out / "kernel_digits.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
