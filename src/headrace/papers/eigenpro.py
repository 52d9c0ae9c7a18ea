"""EigenPro 2.0 (Ma & Belkin, MLSys 2019) on this machine: ``headrace papers eigenpro``.

Four experiments. ``scaling`` is the paper's central figure: epochs and iterations to a target residual
against the batch size, for the kernel as it is and for the adapted kernel. ``formulas`` computes q and m for
the paper's own setting on MNIST. ``accuracy`` sets accuracy and fit time on real data beside peers that are
installed and beside what was published. ``imagenet`` runs the first batches of an epoch over random features of
ImageNet's size, on a GPU only, and extrapolates. Every number that the page shows is written to ``numbers.json`` too.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, MissingExtraError, unknown
from headrace.kernel import KernelClassifier
from headrace.kernel.devices import choose_devices
from headrace.papers import PaperOptions
from headrace.papers.eigenpro_data import Split, load
from headrace.papers.eigenpro_imagenet import imagenet_epoch
from headrace.papers.eigenpro_scaling import Curve, critical_batches, paper_setting
from headrace.report.page import Page, Series

EXPERIMENTS = ("scaling", "formulas", "accuracy", "imagenet")
SETS = ("mnist", "fashion-mnist", "cifar10", "covtype", "a9a", "w8a", "usps")
PUBLISHED = [
    ["MNIST 60,000 (paper)", "Gaussian, σ=5, 12 GB GPU", "1.28 %", "7.7 s + 2.8 s setup"],
    ["ImageNet features, 1.3 M (paper)", "one Titan Xp", "not in our notes", "under an hour"],
    ["MNIST 60,000 (authors' code, one H200)", "Laplacian, σ=10, 5 epochs", "1.61 %", "65 to 79 s"],
    ["CIFAR5M features, 1 M centres (EigenPro 4)", "one A100", "11.3 %", "1268 s"],
]
QUANTITIES = {
    "epochs": "epochs to the target",
    "iterations": "iterations to the target",
    "seconds": "seconds of CPU to the target",
}
ROWS, SECONDS = 1000, 20.0
"""So many training rows of each set took so long on two cores, the peers included; time grows with their square."""


def run(options: PaperOptions) -> Path:
    """Run the experiments and return the page."""
    for name in options.only:
        if name not in EXPERIMENTS:
            raise unknown("experiment of eigenpro", name, EXPERIMENTS)
    chosen = options.only or EXPERIMENTS
    page = Page("EigenPro 2.0", subtitle="Kernel machines that adapt to the device")
    numbers: dict[str, Any] = {}
    if "scaling" in chosen:
        numbers["scaling"] = _scaling(page, options)
    if "formulas" in chosen:
        numbers["formulas"] = _formulas(page)
    if "accuracy" in chosen:
        numbers["accuracy"] = _accuracy(page, options)
    if "imagenet" in chosen:
        numbers["imagenet"] = _imagenet(page, options)
    (options.out / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return page.save(options.out / "index.html")


def _scaling(page: Page, options: PaperOptions) -> dict[str, Any]:
    split = load("mnist", 2000, 10)
    page.heading("Critical batch size and linear scaling")
    target = 0.2
    curves = critical_batches(split, target=target, seconds=options.seconds / 3, seeds=options.seeds)
    page.text(
        f"Laplacian kernel on {len(split.y)} rows of MNIST, until the residual is {target:g} of the "
        "targets. While a "
        "batch is smaller than the critical size, twice the batch needs half the iterations and the same "
        "epochs. "
        "Beyond it, iterations stay and epochs grow. Adapting the kernel moves the critical size to the "
        "right. "
        "Time falls while a larger batch saves iterations and costs less than it saves. Fewer is better in each "
        "figure. Bands span the seeds."
    )
    for quantity, label in QUANTITIES.items():
        page.lines(
            f"{label} against batch size",
            [_series(curve, quantity) for curve in curves],
            x_label="batch size",
            y_label=label,
            log_x=True,
            log_y=True,
        )
    rows = [[c.name, c.directions, c.critical, f"{c.top:.3g}", f"{c.peak:.3g}"] for c in curves]
    page.table(
        ["kernel", "q", "critical batch", "λ̃", "β"],
        rows,
        caption="a larger critical batch uses a larger device",
    )
    return {curve.name: curve.to_dict() for curve in curves}


def _series(curve: Curve, quantity: str) -> Series:
    values = [[point[quantity] for point in points] for points in curve.points.values()]
    return Series(
        curve.name,
        list(curve.points),
        [float(np.median(each)) for each in values],
        low=[float(min(each)) for each in values],
        high=[float(max(each)) for each in values],
    )


def _formulas(page: Page) -> dict[str, Any]:
    page.heading("The paper's own setting")
    found = paper_setting(load("mnist", 60_000, 10))
    page.text(
        "MNIST, Gaussian kernel of bandwidth 5, subsample of 2000: what the formulas give for the paper's "
        "batch."
    )
    page.table(
        ["quantity", "published", "here"],
        [
            ["q for m = 1432", 277, found["directions"]],
            ["m for q = 277", 1432, f"{found['batch_for_277']:.0f}"],
        ],
        caption="they differ by what another random subsample changes",
    )
    return found


def _accuracy(page: Page, options: PaperOptions) -> list[dict[str, Any]]:
    page.heading("Accuracy and time beside peers")
    rows = int(np.clip(ROWS * np.sqrt(options.seconds / SECONDS), 1000, 60_000))
    results: list[dict[str, Any]] = []
    missing: list[str] = []
    late: dict[str, list[str]] = {}
    end = time.perf_counter() + options.seconds
    for number, name in enumerate(SETS):
        # Each set has its share of what is left, so that none is crowded out.
        share = time.perf_counter() + (end - time.perf_counter()) / (len(SETS) - number)
        try:
            split = load(name, rows, 10_000)
        except (DataError, MissingExtraError) as error:
            missing.append(str(error).rstrip("."))
            continue
        for method, make in _methods(options.device).items():
            if time.perf_counter() > share:
                late.setdefault(name, []).append(method)
                continue
            results.append({"set": name, "rows": len(split.y), "method": method, **_timed(make(), split)})
    page.table(
        ["data", "rows", "method", "error", "fit, seconds of CPU", "fit, seconds"],
        [
            [
                r["set"],
                r["rows"],
                r["method"],
                f"{100 * r['error']:.2f} %",
                f"{r['cpu_s']:.2f}",
                f"{r['wall_s']:.2f}",
            ]
            for r in results
        ],
        caption="Lower is better everywhere. One run each; parameters not named are the defaults.",
    )
    if late:
        names = "; ".join(f"{name}: {len(methods)} methods" for name, methods in late.items())
        missing.append(f"the time budget was used up before {names}")
    for sentence in missing:
        page.text(f"Left out: {sentence}.")
    page.text(
        "Peers that need a GPU or do not install with pip (Falkon, ThunderSVM, cuML, the authors' code) were not "
        "run; the table below has what is known of them."
    )
    page.table(["published or measured elsewhere", "setting", "error", "time"], PUBLISHED)
    return results


def _imagenet(page: Page, options: PaperOptions) -> dict[str, Any]:
    page.heading("ImageNet's size")
    device = choose_devices(options.device).first
    if device.type != "cuda":
        page.text("Needs a GPU with 40 GB of memory and was left out: no CUDA device was chosen here.")
        return {}
    found = imagenet_epoch(device)
    page.text(
        f"1.3 million random rows of 1536 features, 1000 labels. {found['batches']} batches of {found['batch']} make "
        "an epoch; three were run, with their corrections and updates, and the epoch is extrapolated from them. "
        "The paper has an hour for the whole training on one Titan Xp."
    )
    page.table(
        ["eigensystem, s", "one batch, s", "an epoch, s (extrapolated)", "directions", "products"],
        [[found["setup_s"], found["step_s"], found["epoch_s"], found["directions"], found["products"]]],
        caption="Lower is better.",
    )
    return found


def _methods(device: str) -> dict[str, Any]:
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import SVC

    quiet: dict[str, Any] = {"verbose": False, "random_state": 0, "device": device}
    return {
        "headrace, laplacian, 5 epochs": lambda: KernelClassifier(epochs=5, **quiet),
        "headrace, gaussian, early stopping": lambda: KernelClassifier(
            "gaussian", early_stopping=True, **quiet
        ),
        "headrace, 1000 centres": lambda: KernelClassifier(centers=1000, epochs=2, **quiet),
        "scikit-learn SVC(rbf, C=10)": lambda: SVC(C=10),
        "scikit-learn Nystroem 1000 + ridge": lambda: make_pipeline(
            Nystroem(n_components=1000, random_state=0), RidgeClassifier(alpha=0.01)
        ),
    }


def _timed(model: Any, split: Split) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(split.X, split.y)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "error": 1 - float(model.score(split.X_test, split.y_test))}
