"""A learned order: the drift falls, and training gets ahead of shuffling.

Digits, one example per step, the same weights to begin with. The first plot is what balancing is about, the second
what it is for.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import headrace
from headrace.report.page import Page, Series

EPOCHS = 6
torch.set_num_threads(1)
data, target = load_digits(return_X_y=True)
x, y = torch.tensor(data[:1200] / 16, dtype=torch.float32), torch.tensor(target[:1200])

page = Page("A learned order", subtitle="Balanced pairs against random reshuffling on digits")
objectives, ratios = [], []
for kind in ("shuffled", "pair"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = headrace.BalancedSampler(len(x), kind=kind, seed=0)
    sampler.watch(model)
    objective = []
    for _ in range(EPOCHS):
        for row in sampler:
            optimizer.zero_grad()
            F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
            optimizer.step()
        with torch.no_grad():
            objective.append(float(F.cross_entropy(model(x), y)))
    sampler.end_epoch()
    objectives.append(Series(kind, list(range(1, EPOCHS + 1)), objective))
    if sampler.drift_ratio:
        ratios.append(Series(kind, list(range(1, EPOCHS + 1)), sampler.drift_ratio))
    print(f"{kind}: objective {objective[-1]:.4f} after {EPOCHS} epochs")

page.lines("Drift, H / √Σ‖g − ḡ‖² (the first epoch is shuffled)", ratios, x_label="epoch", y_label="ratio")
page.lines("Objective", objectives, x_label="epoch", y_label="mean loss", log_y=True)
page.save("balanced_order.html")
