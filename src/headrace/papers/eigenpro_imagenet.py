"""Features of ImageNet's size for `eigenpro`: 1.3 million rows of 1536 numbers with 1000 labels, made at random.

The first batches of an epoch are run with everything that a step has: kernel values, product, correction on the
subsample, update. The epoch is extrapolated from them, and the page says so. Random features have the cost of real
ones and nothing to learn, so no accuracy is told.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from headrace.kernel.devices import choose_devices
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.fitting import make_operands
from headrace.kernel.losses import find_loss
from headrace.kernel.precondition import build_preconditioner
from headrace.kernel.products import KernelProduct
from headrace.kernel.regressor import KernelRegressor
from headrace.kernel.solver import Problem, _PlainStepper, batches

ROWS, FEATURES, LABELS, BATCH, SAMPLES = 1_300_000, 1536, 1000, 4096, 5120


def imagenet_epoch(
    device: torch.device,
    *,
    rows: int = ROWS,
    features: int = FEATURES,
    labels: int = LABELS,
    batch: int = BATCH,
    samples: int = SAMPLES,
    steps: int = 3,
) -> dict[str, Any]:
    """Seconds of the eigensystem and of some steps, and of the epoch that they make."""
    choice = choose_devices(device)
    generator = torch.Generator(device).manual_seed(0)
    data = torch.randn(rows, features, generator=generator, device=device)
    bandwidth = float(features) ** 0.5
    settings = KernelRegressor(bandwidth=bandwidth, device=device, verbose=False)._settings(labels)
    operands = make_operands(data, settings, torch.float32, bandwidth)
    product = KernelProduct(operands, operands.right(data), fused=choice.fuses(operands))
    del data
    classes = torch.randint(0, labels, (rows,), generator=generator, device=device)
    targets = torch.zeros(rows, labels, device=device).scatter_(1, classes[:, None], 1.0)
    with choice.precision(settings.tf32):
        start = _now(device)
        preconditioner = build_preconditioner(product, samples, batch, rows=rows)
        setup = _now(device) - start
        expansion = Expansion([Part(product=product, weights_pc=torch.zeros_like(targets), start=0)])
        problem = Problem(expansion=expansion, targets_nc=targets, loss=find_loss("squared", labels))
        stepper = _PlainStepper(problem, preconditioner, 1.0)
        parts = list(batches(0, rows, batch, torch.Generator().manual_seed(0)))
        stepper.step(parts[0])  # compiles
        start = _now(device)
        for part in parts[1 : steps + 1]:
            stepper.step(part)
        step = (_now(device) - start) / min(steps, len(parts) - 1)
    return {
        "rows": rows,
        "batch": batch,
        "batches": len(parts),
        "directions": preconditioner.directions,
        "setup_s": setup,
        "step_s": step,
        "epoch_s": step * len(parts),
        "products": choice.products(operands)[0],
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
