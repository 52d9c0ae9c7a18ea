"""The parameters on the master's side, and the differences that wait to be merged.

A `Holder` may hold all parameters or one range of them (a shard). It decides nothing: `Apply` says which held
differences go in with which weight. Whoever gets `vector` gets a copy: later merges do not change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from headrace.cluster.compress import Packed
from headrace.cluster.machine import Apply, Key
from headrace.errors import OptionError


@dataclass
class Holder:
    """One range of the flat parameter vector."""

    values: Tensor
    statistics_from: int | None = None
    """From here on stand running statistics, which are averaged; None when there are none."""
    version: int = 0
    held: dict[Key, Packed] = field(default_factory=dict)

    def hold(self, key: Key, packed: Packed | None) -> None:
        """Keep a difference until it is applied or dropped."""
        assert packed is not None
        if packed.size != self.values.numel():
            raise OptionError(
                f"{key.worker} pushed {packed.size} numbers where {self.values.numel()} are held; its model "
                "differs from the master's"
            )
        self.held[key] = packed

    def drop(self, key: Key) -> None:
        self.held.pop(key, None)

    def apply(self, order: Apply) -> None:
        """Merge a group."""
        for key, weight in order.parts:
            packed = self.held.pop(key)
            split = self.statistics_from
            if split is None:
                packed.add_to(self.values, weight)
                continue
            packed.part(0, split).add_to(self.values[:split], weight)
            packed.part(split, packed.size).add_to(self.values[split:], order.share)
        self.version = order.version

    def restore(self, values: Tensor, version: int) -> None:
        """Go back to a checkpoint; what was held is sent again."""
        self.values.copy_(values)
        self.version = version
        self.held.clear()

    def vector(self) -> Tensor:
        """A copy of the values as they are now."""
        return self.values.clone()


def shard_bounds(entries: int, entry_bytes: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Ranges of at most ``shard_bytes`` that cover all entries, of sizes that differ by at most one."""
    count = max(1, -(-entries * entry_bytes // shard_bytes))
    edges = [entries * i // count for i in range(count + 1)]
    return list(pairwise(edges))
