"""Gradient balancing as the papers write it, on materialised gradients, one example at a time, in float64.

Shares no code with the library: plain lists, one `autograd.grad` per example.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, int], Tensor]


def example_gradient(model: nn.Module, loss: Loss, row: int) -> Tensor:
    """The gradient of one example's loss over all trained parameters, as one vector."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(model, row), parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for p, g in zip(parameters, found, strict=True)
        ]
    )


class NaivePair:
    """Signs g_{2k−1} − g_{2k}; an example without a partner keeps its rank."""

    def __init__(self, d: int) -> None:
        self.d = d
        self.begin()

    def begin(self) -> None:
        self.s = torch.zeros(self.d, dtype=torch.float64)
        self.waiting: tuple[int, Tensor] | None = None
        self.signs: dict[int, int] = {}

    def see(self, row: int, gradient: Tensor) -> None:
        if self.waiting is None:
            self.waiting = (row, gradient)
            return
        first, z = self.waiting[0], self.waiting[1] - gradient
        self.waiting = None
        sign = 1 if float(self.s @ z) < 0 else -1
        self.s = self.s + sign * z
        self.signs[first], self.signs[row] = sign, -sign


class NaiveMean:
    """Signs g_i − (mean of the epoch before)."""

    def __init__(self, d: int) -> None:
        self.d = d
        self.mean = torch.zeros(d, dtype=torch.float64)
        self.sum = torch.zeros(d, dtype=torch.float64)
        self.count = 0
        self.begin()

    def begin(self) -> None:
        if self.count:
            self.mean = self.sum / self.count
        self.sum = torch.zeros(self.d, dtype=torch.float64)
        self.count = 0
        self.s = torch.zeros(self.d, dtype=torch.float64)
        self.signs: dict[int, int] = {}

    def see(self, row: int, gradient: Tensor) -> None:
        z = gradient - self.mean
        sign = 1 if float(self.s @ z) < 0 else -1
        self.s = self.s + sign * z
        self.signs[row] = sign
        self.sum = self.sum + gradient
        self.count += 1


def naive_reorder(order: list[int], signs: dict[int, int]) -> list[int]:
    """+ in visiting order, then − reversed; rows without a sign stay at their place."""
    plus = [row for row in order if signs.get(row) == 1]
    minus = [row for row in order if signs.get(row) == -1]
    moving = iter(plus + minus[::-1])
    return [next(moving) if row in signs else row for row in order]


def naive_drift(vectors: list[Tensor], order: list[int]) -> float:
    """The largest norm of a prefix sum of the centred vectors."""
    mean = sum(vectors) / len(vectors)
    prefix, largest = torch.zeros_like(vectors[0]), 0.0
    for row in order:
        prefix = prefix + vectors[row] - mean
        largest = max(largest, float(prefix.norm()))
    return largest


def train_and_order(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    first: list[int],
    *,
    kind: str,
    batch: int,
    epochs: int,
    accumulate: int = 1,
) -> list[list[int]]:
    """The orders of ``epochs`` epochs of training, the first included; mean over each batch, mean over accumulated."""
    d = sum(p.numel() for p in model.parameters() if p.requires_grad)
    walk = {"pair": NaivePair, "mean": NaiveMean}[kind](d)
    orders = [first]
    for _ in range(epochs):
        order = orders[-1]
        walk.begin()
        optimizer.zero_grad()
        batches = [order[i : i + batch] for i in range(0, len(order), batch)]
        for number, rows in enumerate(batches):
            for row in rows:
                walk.see(row, example_gradient(model, loss, row))
            total = torch.stack([loss(model, row) for row in rows]).mean() / accumulate
            total.backward()
            if (number + 1) % accumulate == 0 or number + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        orders.append(naive_reorder(order, walk.signs))
    return orders[:-1]
