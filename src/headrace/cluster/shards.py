"""Parameters too large for one actor: ranges of the vector in actors of their own, the decisions still in one.

A worker sends each shard its piece of a push and then tells the master, which orders all shards to merge and answers
when they have. A pull takes the shards one by one: while others push, its ranges may be of different versions, at
most those that were merged meanwhile. A shard that is lost ends the run; it goes on from the checkpoint with
``resume=True``.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.cluster.compress import Packed
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Apply, Key
from headrace.cluster.sending import Wire, as_array, from_wire, shared_tensor, to_wire

Bounds = list[tuple[int, int]]


class ShardActor:
    """One range of the parameters."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.holder = Holder(torch.empty(0))
        self.merged: dict[str, tuple[Key, Packed]] = {}
        """The newest merged piece of each worker. Nobody knows here whether its worker was answered: when the master
        dies in between, the push comes again, and this is the only copy of its piece."""

    def begin(self, values: NDArray[Any], statistics_from: int | None, version: int) -> None:
        """Start from these values. Pieces that are held stay, and merged ones are held again: their workers may wait
        for a master that came back."""
        held = {**self.holder.held, **dict(self.merged.values())}
        self.merged = {}
        self.holder = Holder(shared_tensor(values).clone(), statistics_from, version, held)

    def hold(self, key: Key, wire: Wire) -> None:
        packed = from_wire(wire)
        assert packed is not None
        # The next push tells that the one before was answered.
        self.merged.pop(key.worker, None)
        for old in [k for k in self.holder.held if k.worker == key.worker and k < key]:
            self.holder.drop(old)
        self.holder.hold(key, packed)

    def apply(self, order: Apply) -> None:
        for key, _ in order.parts:
            self.merged[key.worker] = (key, self.holder.held[key])
        self.holder.apply(order)

    def drop(self, key: Key) -> None:
        self.holder.drop(key)

    def forget(self, worker: str, life: int) -> None:
        """A life is over: drop what of it never reached the master."""
        self.merged.pop(worker, None)
        for key in [k for k in self.holder.held if k.worker == worker and k.life <= life]:
            self.holder.drop(key)

    def vector(self) -> NDArray[Any]:
        return as_array(self.holder.vector())


class ShardedHolder(Holder):
    """The master's side: the same calls, carried out by the shards. ``held`` has the keys alone."""

    def __init__(
        self, ray: Any, shards: list[Any], bounds: Bounds, values: Tensor, statistics_from: int | None
    ) -> None:
        super().__init__(torch.empty(0), statistics_from)
        self.ray, self.shards, self.bounds = ray, shards, bounds
        self.begin(values)

    def begin(self, values: Tensor) -> None:
        """Set all shards to these values."""
        parts = [
            shard.begin.remote(as_array(values[start:stop]), self._split(start, stop), self.version)
            for shard, (start, stop) in zip(self.shards, self.bounds, strict=True)
        ]
        self.ray.get(parts)

    def _split(self, start: int, stop: int) -> int | None:
        """Where running statistics begin within one shard."""
        if self.statistics_from is None or self.statistics_from >= stop:
            return None
        return max(0, self.statistics_from - start)

    def hold(self, key: Key, packed: Packed | None) -> None:
        self.held[key] = Packed(0, torch.empty(0))  # the pieces went to the shards before

    def drop(self, key: Key) -> None:
        super().drop(key)
        for shard in self.shards:
            shard.drop.remote(key)

    def apply(self, order: Apply) -> None:
        self.ray.get([shard.apply.remote(order) for shard in self.shards])
        for key, _ in order.parts:
            self.held.pop(key)
        self.version = order.version

    def forget(self, worker: str, life: int) -> None:
        for shard in self.shards:
            shard.forget.remote(worker, life)

    def vector(self) -> Tensor:
        return fetch(self.ray, self.shards)

    def restore(self, values: Tensor, version: int) -> None:
        self.version = version
        self.held.clear()
        self.begin(values)


def fetch(ray: Any, shards: list[Any]) -> Tensor:
    """The whole vector from its shards."""
    return torch.cat([shared_tensor(part) for part in ray.get([s.vector.remote() for s in shards])])


def send_pieces(ray: Any, shards: list[Any], bounds: Bounds, key: Key, packed: Packed) -> None:
    """Give each shard its part of a push; returns when all have it."""
    pieces = [
        shard.hold.remote(key, to_wire(packed.part(start, stop)))
        for shard, (start, stop) in zip(shards, bounds, strict=True)
    ]
    ray.get(pieces)
