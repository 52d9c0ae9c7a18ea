"""The first run: one network on scikit-learn's digits, by the usual loop and by `headrace.fit`, loss against time.

    python examples/plot_first_run.py [OUT.svg]

Both begin with the same weights and take batches of 64 with the same optimizer; the usual loop is a shuffling
DataLoader with autograd. Each is warmed up with a few updates that do not count.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.report.page import Series
from headrace.report.svg import write_svg_lines

EPOCHS, LR = 12, 0.1


def usual_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> list[tuple[float, float]]:
    """(seconds, mean loss) at the end of every epoch."""
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    points, started = [], time.perf_counter()
    for _ in range(epochs):
        total = 0.0
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(yb)
        points.append((time.perf_counter() - started, total / len(x)))
    return points


def by_headrace(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> list[tuple[float, float]]:
    run = hr.fit(model, (x, y), lr=LR, epochs=epochs, batch_size=64, progress=False)
    return [(row["seconds"], row["loss"]) for row in run.epochs]


def main(out: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).repeat(8, 1), torch.tensor(labels).repeat(8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    for side in (usual_loop, by_headrace):
        side(copy.deepcopy(model), x[:640], y[:640], 2)
    usual = usual_loop(copy.deepcopy(model), x, y, EPOCHS)
    ours = by_headrace(copy.deepcopy(model), x, y, EPOCHS)
    print(f"{EPOCHS} epochs: usual loop {usual[-1][0]:.2f} s, headrace {ours[-1][0]:.2f} s")
    print(f"last loss: usual loop {usual[-1][1]:.4f}, headrace {ours[-1][1]:.4f}")
    lines = [
        Series("DataLoader loop", [p[0] for p in usual], [p[1] for p in usual]),
        Series("headrace.fit", [p[0] for p in ours], [p[1] for p in ours]),
    ]
    title = f"The same network and updates on this machine ({torch.get_num_threads()} cores)"
    write_svg_lines(out, title, lines, "seconds", "training loss", log_y=True)
    print(f"plot: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("first_run.svg"))
