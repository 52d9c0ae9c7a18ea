"""Orders that learn nothing, for comparison: each is a function from the order in force to the next one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, int, torch.Generator], Tensor]


def _shuffled(order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
    return order[torch.randperm(len(order), generator=generator).to(order.device)]


def _kept(order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
    return order


def _with_replacement(order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
    return torch.randint(len(order), (len(order),), generator=generator).to(order.device)


def _flip_flop(order: Tensor, epoch: int, generator: torch.Generator) -> Tensor:
    """Every second epoch runs the one before it backwards (Rajput, Lee, Papailiopoulos 2022)."""
    return order.flip(0) if epoch % 2 else _shuffled(order, epoch, generator)


PLAIN: dict[str, Step] = {
    "shuffled": _shuffled,
    "shuffle-once": _kept,
    "sequential": _kept,
    "with-replacement": _with_replacement,
    "flipflop": _flip_flop,
}
"""Name → next order; ``epoch`` is the number of the epoch that begins (the first order is drawn before)."""


def first_order(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """The order of the first epoch."""
    if kind == "sequential":
        return torch.arange(n)
    if kind == "with-replacement":
        return torch.randint(n, (n,), generator=generator)
    return torch.randperm(n, generator=generator)
