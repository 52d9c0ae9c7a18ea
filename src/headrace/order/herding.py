"""Herding: the orders that balancing approximates, for study. They keep all n vectors (n · k numbers).

- `greedy_order`: at each step the vector that keeps the prefix sum shortest. O(n²) time.
- `herding_order`: balance and reorder the same fixed vectors again and again; each round at most halves the excess
  over the walk's own bound (Harvey and Samadi 2014), so a few rounds suffice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.order.balance import drift, reorder, walk
from headrace.types import State

ROUNDS = 10  # the drift has settled by then in every measurement; see benchmarks/bench_order_quality.py
BLOCK = 512


def greedy_order(vectors_nk: Tensor) -> Tensor:
    """The greedy order of the centred vectors; the first taken is the shortest."""
    centred = vectors_nk - vectors_nk.mean(0)
    lengths = centred.square().sum(1)
    prefix = torch.zeros_like(centred[0]) if len(centred) else centred.sum(0)
    taken = torch.zeros(len(centred), dtype=torch.bool, device=centred.device)
    order = []
    for _ in range(len(centred)):
        cost = (lengths + 2 * (centred @ prefix)).masked_fill(taken, float("inf"))
        best = cost.argmin()
        order.append(best)
        taken[best] = True
        prefix = prefix + centred[best]
    return torch.stack(order) if order else torch.empty(0, dtype=torch.int64)


def walk_all(vectors_nk: Tensor) -> Tensor:
    """Signs of a greedy walk over all vectors, block by block."""
    running = torch.zeros_like(vectors_nk[0])
    signs = []
    for block in vectors_nk.split(BLOCK):
        signs.append(walk(block @ running, block @ block.T))
        running = running + block.T @ signs[-1]
    return torch.cat(signs)


def herding_order(vectors_nk: Tensor, order: Tensor, rounds: int = ROUNDS) -> Tensor:
    """The best order found by balancing the centred vectors ``rounds`` times, beginning with ``order``."""
    centred = vectors_nk - vectors_nk.mean(0)
    best, lowest = order, drift(centred, order)
    for _ in range(rounds):
        order = reorder(order, walk_all(centred[order]))
        height = drift(centred, order)
        if height < lowest:
            best, lowest = order, height
    return best


class VectorStore:
    """The newest vector of every row, for the orders above."""

    def __init__(
        self, n: int, dim: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.vectors = torch.zeros(n, dim, device=device, dtype=dtype)

    def put(self, indices: Tensor, vectors_bk: Tensor) -> None:
        self.vectors[indices] = vectors_bk

    def next_order(self, kind: str, order: Tensor) -> Tensor:
        if kind == "greedy":
            return greedy_order(self.vectors)
        return herding_order(self.vectors, order.to(self.vectors.device))

    def end_epoch(self) -> None:
        """Nothing ends: a row that the next epoch leaves out keeps its vector."""

    def grow(self, n: int) -> None:
        kept = self.vectors[:n]
        self.vectors = torch.cat([kept, kept.new_zeros(n - len(kept), kept.shape[1])])

    def bytes(self) -> int:
        return self.vectors.nbytes

    def state_dict(self) -> State:
        return {"vectors": self.vectors.clone()}

    def load_state_dict(self, state: State) -> None:
        self.vectors.copy_(state["vectors"])
