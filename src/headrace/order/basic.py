"""Orders that learn nothing: shuffled anew every epoch, or as the rows lie.

Both are pure functions of (seed, epoch), so they have a method ``permutation(epoch)`` and their state is two
numbers. A permutation is made on the device where it is used; devices of different kinds give different ones
for the same seed, and a run resumed on the same kind of device continues with the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import DataError, OptionError
from headrace.types import Evidence, State

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers; nearby numbers give unrelated seeds."""
    words = np.random.SeedSequence([part & (2**64 - 1) for part in parts]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def permutation(n: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The permutation of n rows that belongs to (seed, epoch), made on ``device``."""
    import torch

    generator = torch.Generator(device=device).manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(n, generator=generator, device=device)


class PureOrder:
    """An order that depends on the epoch's number alone."""

    kind = "pure"

    def __init__(self, n: int, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if n < 1:
            raise OptionError(f"an order over {n} rows was asked for; it needs at least one")
        self.n = n
        self.seed = seed
        self.device = device
        self._epoch = 0

    def permutation(self, epoch: int) -> Tensor:
        """The order of the given epoch, as one tensor on the device."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Let the next call of `epoch` give this one."""
        self._epoch = epoch

    def epoch(self) -> Iterator[Tensor]:
        """The next epoch's permutation, in one piece."""
        order = self.permutation(self._epoch)
        self._epoch += 1
        yield order

    def observe(self, indices: Tensor, evidence: Evidence) -> None:
        """Learns nothing."""

    def state_dict(self) -> State:
        return {"kind": self.kind, "n": self.n, "seed": self.seed, "epoch": self._epoch}

    def load_state_dict(self, state: State) -> None:
        for name, mine in (("kind", self.kind), ("n", self.n)):
            if state.get(name) != mine:
                raise DataError(
                    f"the saved order has {name} {state.get(name)!r}, this one {mine!r}; "
                    "resume with the same data and order="
                )
        self.seed = int(state["seed"])
        self._epoch = int(state["epoch"])


class ShuffledOrder(PureOrder):
    """Every epoch a new uniformly random permutation."""

    kind = "shuffled"

    def permutation(self, epoch: int) -> Tensor:
        return permutation(self.n, self.seed, epoch, self.device)


class SequentialOrder(PureOrder):
    """Every epoch the rows as they lie."""

    kind = "sequential"

    def permutation(self, epoch: int) -> Tensor:
        import torch

        return torch.arange(self.n, device=self.device)
