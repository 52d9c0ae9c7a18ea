"""The service of balanced orders as an actor: workers send sketches and do not wait; they wait for a permutation.

The service decides nothing about parameters and keeps nothing on a disk. When it is lost Ray starts a new one, which
knows the permutations again as workers come back to it; the signs of the pass under way are lost.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.cluster.sending import as_array, shared_tensor
from headrace.engine.served import order_service


class OrderActor:
    """An `OrderService`, one call after the other."""

    def __init__(self, rows: int, world_size: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.service = order_service(rows, world_size, seed)

    def observe(self, worker: int, indices: NDArray[Any], vectors: NDArray[Any]) -> None:
        self.service.observe(worker, shared_tensor(indices), shared_tensor(vectors))

    def next_epoch(self, worker: int) -> NDArray[Any]:
        return as_array(self.service.next_epoch(worker))

    def go_on(self, worker: int, order: NDArray[Any]) -> None:
        self.service.go_on(worker, shared_tensor(order))


class RayOrders:
    """`Orders` of a worker; calls of one worker arrive in order."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def observe(self, worker: int, indices: Tensor, vectors_bk: Tensor) -> None:
        self.actor.observe.remote(worker, as_array(indices), as_array(vectors_bk))

    def next_epoch(self, worker: int) -> Tensor:
        import ray

        return shared_tensor(ray.get(self.actor.next_epoch.remote(worker))).clone()

    def go_on(self, worker: int, order: Tensor) -> None:
        self.actor.go_on.remote(worker, as_array(order))
