"""Differences on the wire: in full, in bfloat16, or only the largest entries, with error feedback.

A task whose steps are λ ← (1 − ρ) λ + ρ λ̂ pushes an affine map instead, v ← decay × v + values: the sum of stale
differences could make λ negative, a map with decay in [0, 1] and values of at least 0 cannot.

What a compressed push leaves out is kept by its worker and added to the next difference, so that nothing is
forgotten, only late. Invariant: the sum of everything sent plus the remainder is the sum of all differences, up to
rounding. A worker that is killed takes its remainder with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import OptionError


@dataclass(frozen=True)
class Packed:
    """A difference as it travels."""

    size: int
    values: Tensor
    positions: Tensor | None = None
    """int32 places of the values in the vector; None when all places are there in order."""
    decay: float = 1.0
    """What the vector is multiplied by before the values are added; 1 for a difference."""
    correction: Packed | None = None
    """What rounding took from the difference, so that base + difference is the worker's result to the last bit."""

    @property
    def bytes(self) -> int:
        own = self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)
        return own + (0 if self.correction is None else self.correction.bytes)

    def add_to(self, vector: Tensor, weight: float) -> None:
        """``vector += weight × difference``, in place; a map goes ``weight`` of its way."""
        values = self.values.to(vector.dtype)
        if self.decay != 1.0:
            vector.mul_(1.0 - weight * (1.0 - self.decay))
        if self.positions is None:
            vector.add_(values, alpha=weight)
        else:
            vector.index_add_(0, self.positions.long(), values, alpha=weight)
        if self.correction is not None:
            self.correction.add_to(vector, weight)

    def part(self, start: int, stop: int) -> Packed:
        """The difference of the entries ``start`` to ``stop`` alone, numbered from 0."""
        if self.positions is None:
            correction = None if self.correction is None else self.correction.part(start, stop)
            return Packed(stop - start, self.values[start:stop], None, self.decay, correction)
        inside = (self.positions >= start) & (self.positions < stop)
        return Packed(stop - start, self.values[inside], self.positions[inside] - start, self.decay)


class Compressor:
    """``None`` sends everything, ``"bf16"`` halves float32, a number from 0 to 1 sends that share of entries."""

    def __init__(self, kind: str | float | None = None) -> None:
        number = isinstance(kind, int | float) and not isinstance(kind, bool)
        if not (kind in (None, "bf16") or (number and 0 < float(kind or 0) <= 1)):
            raise OptionError(
                f"compress={kind!r}: give None, 'bf16', or the share of entries to send, such as 0.01"
            )
        self.kind = kind
        self.remainder: Tensor | None = None

    def pack(self, base: Tensor, result: Tensor, decay: float = 1.0) -> Packed:
        """What to send for steps from ``base`` to ``result``; the rest is kept for the next time.

        With a decay, what is sent is result − decay × base, which lock-free threads and rounding may have left
        a little below zero: that is set to zero.
        """
        difference = result - base if decay == 1.0 else (result - decay * base).clamp_(min=0)
        size = difference.numel()
        if self.kind is None:
            exact = correction(base, difference, result) if decay == 1.0 else None
            return Packed(size, difference, None, decay, exact)
        if self.remainder is not None:
            difference = difference + self.remainder
        if self.kind == "bf16":
            sent = difference.to(torch.bfloat16)
            if decay != 1.0:
                sent = sent.clamp_(min=0)  # the remainder may be negative where rounding went up
            self.remainder = difference - sent.to(difference.dtype)
            return Packed(size, sent, None, decay)
        count = max(1, round(size * float(self.kind)))
        places = difference.abs().topk(count, sorted=False).indices.sort().values
        values = difference[places]
        self.remainder = difference.clone()
        self.remainder[places] = 0
        return Packed(size, values, places.to(torch.int32), decay)


def correction(base: Tensor, difference: Tensor, result: Tensor) -> Packed | None:
    """What ``base + difference`` misses of ``result``.

    ``result - base`` is rounded where the two differ much, as where a parameter crosses zero: few places, and one
    unit in the last place each. The miss itself is exact.
    """
    reached = base + difference
    if torch.equal(reached, result):  # usual, and quicker than looking for places
        return None
    miss = result - reached
    places = miss.nonzero().flatten()
    if not len(places):
        return None
    return Packed(difference.numel(), miss[places], places.to(torch.int32))
