"""Buffered mini-batch gradient descent: what reuse costs in accuracy, and what it saves in time.

Experiments: ``ols`` (linear regression against its theory), ``pl`` (a Polyak–Łojasiewicz loss: the
neighbourhood in which descent ends), ``images`` (digits, objects and a folder of JPEGs through buffers, at equal
steps, at equal time and at equal loads; `bmgd_images`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import unknown
from headrace.papers import PaperOptions
from headrace.papers.bmgd_images import run_images, write_images
from headrace.report.page import Page, Series

Numbers = dict[str, Any]


def run(options: PaperOptions) -> Path:
    """Run the experiments asked for, save their numbers, and write the page."""
    wanted = options.only or tuple(EXPERIMENTS)
    for name in wanted:
        if name not in EXPERIMENTS:
            raise unknown("experiment", name, EXPERIMENTS)
    page = Page(
        "Buffered mini-batch gradient descent",
        subtitle="Qi, Huang, Zhu, Huang and Wang (2023), run on this machine",
    )
    page.text(
        "Data beyond device memory come in buffers; while one loads, the model trains several rounds on "
        "the other. "
        "Rounds on a buffer cost no reading, but they pull the parameters towards that buffer's own optimum."
    )
    share = options.seconds / len(wanted)
    numbers: Numbers = {}
    for name in wanted:
        experiment, write = EXPERIMENTS[name]
        numbers[name] = experiment(options, share)
        write(page, numbers[name])
    (options.out / "bmgd.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    path = options.out / "index.html"
    page.save(path)
    return path


# ---------------------------------------------------------------------- linear regression


@dataclass(frozen=True)
class Cycle:
    """One setting of buffered descent on a regression."""

    buffers: int = 10
    batches: int = 20
    rows: int = 20
    """In one batch."""
    features: int = 5
    pull: float = 2.0
    """K·c with c = step size × curvature × batches × rounds: what the theory says decides."""


def predicted_ratio(buffers: int, pull: float) -> float:
    """Mean squared error of the last iterate over that of least squares, K·tanh(c/2)/tanh(K·c/2)."""
    c = pull / buffers
    return buffers * math.tanh(c / 2) / math.tanh(pull / 2)


def simulate_ratio(cycle: Cycle, rounds: int, replicates: int, seed: int) -> tuple[float, float]:
    """The same ratio by running fixed buffers to their limit cycle; the mean and its standard error."""
    generator = torch.Generator().manual_seed(seed)
    k, m, b, d = cycle.buffers, cycle.batches, cycle.rows, cycle.features
    x = torch.randn(replicates, k, m, b, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(replicates, k, m, b, generator=generator, dtype=torch.float64)
    step = cycle.pull / k / (m * rounds)
    grams = torch.einsum("rkmbi,rkmbj->rkmij", x, x) / b
    sides = torch.einsum("rkmbi,rkmb->rkmi", x, noise) / b
    theta = torch.zeros(replicates, d, dtype=torch.float64)
    # The true parameters are zero, so theta is the error itself. Passes until the start is forgotten to 1e-9.
    for _ in range(max(3, math.ceil(21 / cycle.pull))):
        for buffer in range(k):
            for _ in range(rounds):
                for batch in range(m):
                    pulled = torch.einsum("rij,rj->ri", grams[:, buffer, batch], theta)
                    theta = theta - step * (pulled - sides[:, buffer, batch])
    exact = torch.linalg.solve(grams.sum((1, 2)), sides.sum((1, 2)))
    found, least = theta.square().sum(1), exact.square().sum(1)
    ratio = float(found.mean() / least.mean())
    spread = float((found - ratio * least).std() / least.mean() / math.sqrt(replicates))
    return ratio, spread


def run_ols(options: PaperOptions, seconds: float) -> Numbers:
    """Ratios over the pull, for two numbers of buffers and two of rounds."""
    pulls = [0.5, 1.0, 2.0, 5.0, 10.0]
    replicates = max(50, min(400, int(seconds * 5)))
    rows: list[Numbers] = []
    for buffers in (5, 10):
        for rounds in (1, 4):
            for pull in pulls:
                cycle = Cycle(buffers=buffers, pull=pull)
                ratio, error = simulate_ratio(cycle, rounds, replicates, seed=1)
                rows.append(
                    {"buffers": buffers, "rounds": rounds, "pull": pull, "simulated": ratio, "error": error,
                     "predicted": predicted_ratio(buffers, pull)}
                )  # fmt: skip
    return {"replicates": replicates, "rows": rows}


def write_ols(page: Page, numbers: Numbers) -> None:
    page.heading("Linear regression: how far from least squares a constant step size ends")
    page.text(
        "With a constant step size and fixed buffers the cycles converge to a point that is not the "
        "least-squares "
        "fit. Theory (derived for isotropic inputs and small steps): the error's ratio is "
        "K·tanh(c/2)/tanh(Kc/2) with "
        "c = step size × curvature × batches × rounds. It depends on rounds only through the product with "
        "the step "
        f"size. 1 is as good as least squares, K a fit to the last buffer alone. {numbers['replicates']} "
        f"replicates; "
        "bands are two standard errors."
    )
    series = []
    for group, (buffers, rounds) in enumerate(sorted({(r["buffers"], r["rounds"]) for r in numbers["rows"]})):
        rows = [r for r in numbers["rows"] if (r["buffers"], r["rounds"]) == (buffers, rounds)]
        x = [r["pull"] for r in rows]
        series.append(
            Series(
                f"simulated, K={buffers}, R={rounds}", x, [r["simulated"] for r in rows],
                low=[r["simulated"] - 2 * r["error"] for r in rows],
                high=[r["simulated"] + 2 * r["error"] for r in rows], group=group,
            )
        )  # fmt: skip
        series.append(Series(f"predicted, K={buffers}", x, [r["predicted"] for r in rows], group=group))
    page.lines("Error over that of least squares", series, x_label="K·c", y_label="ratio", log_x=True)
    page.table(
        ["K", "R", "K·c", "predicted", "simulated", "± (standard error)"],
        [
            [r["buffers"], r["rounds"], r["pull"], *(f"{r[name]:.3f}" for name in ("predicted", "simulated", "error"))]
            for r in numbers["rows"]
        ],
        caption="Low is good: 1 is least squares itself.",
    )  # fmt: skip


# ---------------------------------------------------------------------- Polyak–Łojasiewicz


def pl_floor(step: float, rounds: int, buffers: int, passes: int, seed: int) -> list[float]:
    """Loss above the optimum after each pass, on an over-parametrised least-squares problem with buffer
    noise.

    f(w) = mean over rows of (aᵢ·w − bᵢ)²/2 with fewer rows than parameters in the rank of A: not strongly
    convex, but Polyak–Łojasiewicz. Targets disagree between buffers, so that each buffer has an optimum of
    its own.
    """
    generator = torch.Generator().manual_seed(seed)
    rank, width, rows, batch = 8, 24, 1600, 20
    basis = torch.randn(rank, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    a = torch.randn(rows, rank, generator=generator, dtype=torch.float64) @ basis
    b = a @ torch.randn(width, generator=generator, dtype=torch.float64)
    b += torch.randn(rows, generator=generator, dtype=torch.float64)
    best = 0.5 * float((a @ (torch.linalg.pinv(a) @ b) - b).square().mean())
    w = torch.zeros(width, dtype=torch.float64)
    per_buffer, losses = rows // buffers, []
    for _ in range(passes):
        for buffer in range(buffers):
            first = buffer * per_buffer
            for _ in range(rounds):
                order = first + torch.randperm(per_buffer, generator=generator)
                for rows_now in order.split(batch):
                    residual = a[rows_now] @ w - b[rows_now]
                    w = w - step * (a[rows_now].T @ residual) / len(rows_now)
        losses.append(0.5 * float((a @ w - b).square().mean()) - best)
    return losses


def run_pl(options: PaperOptions, seconds: float) -> Numbers:
    """Loss over passes for several step sizes and rounds, the median of the seeds."""
    runs = []
    for step in (0.4, 0.1, 0.025):
        for rounds in (1, 4):
            curves = [pl_floor(step, rounds, 8, 40, seed) for seed in range(options.seeds)]
            runs.append({"step": step, "rounds": rounds, "loss": np.median(curves, axis=0).tolist()})
    return {"runs": runs, "seeds": options.seeds}


def write_pl(page: Page, numbers: Numbers) -> None:
    page.heading("Polyak–Łojasiewicz losses: linear convergence to a neighbourhood")
    page.text(
        "A loss with flat directions that still satisfies the Polyak–Łojasiewicz condition, 8 fixed "
        "buffers. The "
        "expected shape: a straight line on this scale, then a floor that falls with the step size and "
        "rises with the "
        "rounds, until a step so large that every round forgets the others' data: there the floor is that of a fit to "
        f"the last buffer, and rounds change little. Medians of {numbers['seeds']} seeds; low is good."
    )
    page.lines(
        "Loss above the optimum",
        [
            Series(f"step {r['step']}, R={r['rounds']}", list(range(1, len(r["loss"]) + 1)), r["loss"])
            for r in numbers["runs"]
        ],
        x_label="passes over the data",
        y_label="loss above the optimum",
        log_y=True,
    )
    page.table(
        ["step size", "rounds", "floor: mean of the last ten passes"],
        [[r["step"], r["rounds"], f"{np.mean(r['loss'][-10:]):.2e}"] for r in numbers["runs"]],
        caption="Low is good.",
    )


EXPERIMENTS: dict[str, tuple[Callable[[PaperOptions, float], Numbers], Callable[[Page, Numbers], None]]] = {
    "ols": (run_ols, write_ols),
    "pl": (run_pl, write_pl),
    "images": (run_images, write_images),
}
