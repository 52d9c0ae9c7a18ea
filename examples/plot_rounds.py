"""Rounds on a buffer: what reuse costs, and when it is free.

Linear regression through buffers of a folder of ``.npy`` files. With a constant step size, more rounds on each buffer
end farther from the least-squares fit; with a step size that falls to zero all end several times nearer, and rounds
cost little of that. Writes ``rounds.html``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

import headrace as hr
from headrace.report.page import Page, Series

ROWS, FEATURES, PASSES = 4000, 20, 12


def write(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=FEATURES) + rng.normal(size=ROWS)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return torch.from_numpy(x), torch.from_numpy(y)


def train(folder: Path, exact: torch.Tensor, rounds: int, decay: bool) -> list[float]:
    """Distance to the least-squares fit after each pass over the data."""
    found = []
    weights = torch.zeros(FEATURES)
    with hr.Loader(folder, batch_size=20, buffer=400 * 84, block=50, rounds=rounds, device="cpu") as loader:
        steps, step = PASSES * len(loader), 0
        for _ in range(PASSES):
            for x, y in loader:
                size = 0.03 * (1 - step / steps if decay else 1.0)
                weights -= size * (x.T @ (x @ weights - y)) / len(x)
                step += 1
            found.append(float((weights - exact).norm()))
    return found


def main() -> None:
    page = Page("Rounds on a buffer", subtitle="Ten buffers, linear regression")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        x, y = write(folder)
        exact = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        for decay in (False, True):
            kind = "falling" if decay else "constant"
            runs = [(rounds, train(folder, exact, rounds, decay)) for rounds in (1, 4, 10)]
            page.lines(
                f"A {kind} step size",
                [Series(f"{rounds} rounds", list(range(1, PASSES + 1)), found) for rounds, found in runs],
                x_label="passes over the data",
                y_label="distance to least squares",
                log_y=True,
            )
            for rounds, found in runs:
                print(
                    f"{kind} step size, {rounds:2} rounds: {found[-1]:.4f} from least squares (low is good)"
                )
    page.save(Path("rounds.html"))


if __name__ == "__main__":
    main()
