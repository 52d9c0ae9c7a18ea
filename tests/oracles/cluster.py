"""Serial SGD and matrix factorisation, naively, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


class Factorisation:
    """min ‖UVᵀ − A‖² over one entry at a time: non-convex. The vector is U and V, flat."""

    def __init__(self, rows: int = 12, columns: int = 10, rank: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.rows, self.columns, self.rank = rows, columns, rank
        self.target = draw(rows, rank) @ draw(rank, columns)
        self.start = 0.3 * draw((rows + columns) * rank)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        edge = self.rows * self.rank
        return vector[:edge].view(self.rows, self.rank), vector[edge:].view(self.columns, self.rank)

    def loss(self, vector: Tensor) -> float:
        u, v = self.split(vector)
        return float(((u @ v.T - self.target) ** 2).mean())

    def step(self, vector: Tensor, i: int, j: int, lr: float) -> float:
        """One step on entry (i, j), in place; returns the loss before it."""
        u, v = self.split(vector)
        miss = float(u[i] @ v[j] - self.target[i, j])
        gradient_u, gradient_v = miss * v[j], miss * u[i]
        u[i] -= lr * gradient_u
        v[j] -= lr * gradient_v
        return miss**2

    def draws(self, steps: int, seed: int) -> list[tuple[int, int]]:
        generator = torch.Generator().manual_seed(seed)
        i = torch.randint(self.rows, (steps,), generator=generator)
        j = torch.randint(self.columns, (steps,), generator=generator)
        return list(zip(i.tolist(), j.tolist(), strict=True))

    def serial(self, steps: int, lr: float, seed: int) -> Tensor:
        vector = self.start.clone()
        for i, j in self.draws(steps, seed):
            self.step(vector, i, j, lr)
        return vector
