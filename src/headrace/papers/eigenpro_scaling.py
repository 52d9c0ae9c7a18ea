"""The scaling experiment of `eigenpro`: how many epochs a batch size needs, before and after adapting the
kernel.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.formulas import critical_batch, directions_for_batch, step_size
from headrace.kernel.functions import find_kernel
from headrace.kernel.losses import find_loss
from headrace.kernel.operands import Operands
from headrace.kernel.precondition import Preconditioner, build_preconditioner
from headrace.kernel.products import KernelProduct
from headrace.kernel.solver import Course, Problem, solve
from headrace.papers.eigenpro_data import Split

BATCHES = (4, 64, 512, 16, 256, 2, 128, 8, 32)
"""In an order that gives a figure even when the time runs out."""
MOST_EPOCHS = 300


@dataclass(kw_only=True)
class Curve:
    """Epochs, iterations and seconds of CPU to the target for each batch size, one entry for each seed."""

    name: str
    directions: int
    critical: int
    top: float
    peak: float
    points: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def critical_batches(split: Split, *, target: float, seconds: float, seeds: int) -> list[Curve]:
    """Curves for the kernel as it is and for the kernel adapted to a batch of 512."""
    product = make_product(split.X, "laplacian", 10.0)
    cache = KernelCache(product, torch.float32)
    targets = torch.eye(10)[torch.from_numpy(split.y.astype(np.int64))]
    curves = []
    for name, batch in (("original kernel", 1), ("adapted kernel", 512)):
        pre = build_preconditioner(product, min(1000, product.rows), batch, rows=product.rows)
        curve = Curve(
            name=name,
            directions=pre.directions,
            critical=critical_batch(pre.top, pre.peak),
            top=pre.top,
            peak=pre.peak,
        )
        end = time.perf_counter() + seconds / 2
        for size in BATCHES:
            if time.perf_counter() > end:
                break
            curve.points[size] = [
                _to_target(product, cache, targets, pre, size, target, seed) for seed in range(seeds)
            ]
        curve.points = dict(sorted(curve.points.items()))
        curves.append(curve)
    return curves


def make_product(X: Any, kernel: str, bandwidth: float) -> KernelProduct:
    operands = Operands(
        kernel=find_kernel(kernel),
        bandwidth=bandwidth,
        mean_d=torch.from_numpy(np.asarray(X.mean(axis=0))),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return KernelProduct(operands, operands.right(X))


def _to_target(
    product: KernelProduct,
    cache: KernelCache,
    targets: torch.Tensor,
    pre: Preconditioner,
    batch: int,
    target: float,
    seed: int,
) -> dict[str, float]:
    weights = torch.zeros_like(targets)
    expansion = Expansion([Part(product=product, weights_pc=weights, start=0)])
    begun = time.process_time()
    outcome = solve(
        Problem(
            expansion=expansion, targets_nc=targets, loss=find_loss("squared", targets.shape[1]), cache=cache
        ),
        pre,
        Course(
            batch=batch,
            step=step_size(batch, peak=pre.peak, top=pre.top, rows=product.rows),
            epochs=MOST_EPOCHS,
            tol=target,
            seed=seed,
        ),
    )
    residuals = [1.0, *outcome.residuals]
    # Between two epochs the residual falls about geometrically; a fraction of an epoch shows the law better.
    before, after = residuals[-2], residuals[-1]
    part = 1.0 if after >= before else np.log(before / target) / np.log(before / after)
    epochs = max(0.05, outcome.epochs - 1 + min(1.0, float(part)))
    seconds = (time.process_time() - begun) * epochs / outcome.epochs
    return {"epochs": epochs, "iterations": epochs * -(-product.rows // batch), "seconds": seconds}


def paper_setting(split: Split) -> dict[str, Any]:
    """q and m of the paper's setting on MNIST."""
    sample = split.X[np.random.RandomState(0).permutation(len(split.y))[:2000]]
    pre = build_preconditioner(make_product(sample, "gaussian", 5.0), 2000, 1432, rows=2000)
    values = pre.eigenvalues
    return {
        "directions": directions_for_batch(values, 1432),
        "batch_for_277": float((1 / values[276]) ** 0.95),
        "eigenvalues": [float(v) for v in values[:400:10]],
    }
