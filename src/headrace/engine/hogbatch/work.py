"""What a worker is given to begin with, and what it says about a grant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from headrace.engine.hogbatch.shared import Board, SharedTensors
from headrace.engine.hogbatch.steppers import OptimiserSpec


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a CPU worker needs to begin; plain enough to be sent to a process."""

    name: str
    number: int
    """The worker's row of the board: each life of a worker has its own."""
    module: nn.Module
    """Used for its structure; its parameters are taken from ``parameters``."""
    loss: Callable[..., Tensor]
    optimiser: OptimiserSpec
    parameters: SharedTensors
    buffers: SharedTensors
    canary: SharedTensors
    data: SharedTensors | None
    """The columns and the epoch's order in shared memory, for a process."""
    board: Board
    merge_every: int
    staleness_bound: int | None
    fused: bool
    """Whether a chain's steps go through compiled loops where they can."""
    cores: frozenset[int] | None
    seed: int


@dataclass(frozen=True)
class Report:
    """What a worker says about a grant it is through with."""

    worker: str
    number: int
    rows: int
    loss_sum: float
    start_s: float
    stop_s: float
