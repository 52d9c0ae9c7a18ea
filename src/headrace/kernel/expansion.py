"""f = Σ k(·, z_i) a_i: the centres and their weights, on one device or split over several.

Each part holds a contiguous range of the centres. Values are the sum of the parts' products; a batch's left
operand (small) travels to every device, the weights (large) never travel. The subsample S lies in the first
part. Batches are strided slices ``slice(j, None, batches)`` of the centres, so that updating them needs no
index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernel.products import KernelProduct
from headrace.kernel.rows import Rows


@dataclass(kw_only=True)
class Part:
    """A range of the centres on one device."""

    product: KernelProduct
    weights_pc: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.product.rows


class Expansion:
    """The function that is being learned."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)

    @property
    def first(self) -> Part:
        return self.parts[0]

    @property
    def centers(self) -> int:
        return self.parts[-1].stop

    def values(self, left_mk: Tensor, keep_ms: Tensor | None = None) -> Tensor:
        """f of a batch, on the first device."""
        # The others first: their products run while the first device works.
        others = [
            part.product.multiply(left_mk.to(part.product.operands.device), part.weights_pc)
            for part in self.parts[1:]
        ]
        total = self.first.product.multiply(left_mk, self.first.weights_pc, keep_ms)
        for values in others:
            total += values.to(total.device)
        return total

    def add(self, rows: Rows, delta_mc: Tensor, scale: float) -> None:
        """weights[rows] += scale·delta; row numbers instead of a slice are for a single part."""
        if not isinstance(rows, slice):
            self.first.weights_pc.index_add_(0, rows, delta_mc, alpha=scale)
            return
        for part in self.parts:
            mine, positions = rows_within(rows, part.start, part.stop)
            part.weights_pc[mine].add_(delta_mc[positions].to(part.weights_pc.device), alpha=scale)

    def add_head(self, delta_sc: Tensor, scale: float) -> None:
        """weights[:s] += scale·delta."""
        self.first.weights_pc[: delta_sc.shape[0]].add_(delta_sc, alpha=scale)

    def rows_of(self, rows: Rows) -> Tensor:
        """The weights of those rows, on the first device."""
        if not isinstance(rows, slice):
            return self.first.weights_pc.index_select(0, rows)
        pieces = []
        for part in self.parts:
            mine, _ = rows_within(rows, part.start, part.stop)
            pieces.append(part.weights_pc[mine].to(self.first.weights_pc.device))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def weights(self) -> list[Tensor]:
        return [part.weights_pc for part in self.parts]

    def gather(self) -> Tensor:
        """All weights, on the CPU."""
        return torch.cat([part.weights_pc.cpu() for part in self.parts])


def rows_within(rows: slice, start: int, stop: int) -> tuple[slice, slice]:
    """Which rows of the range [start, stop) a strided slice holds: (slice inside the range, slice of the
    batch).
    """
    first, step = rows.start, rows.step
    low = max(0, -(-(start - first) // step))
    high = max(low, -(-(stop - first) // step))
    inside = first + low * step - start
    return slice(inside, stop - start, step), slice(low, high)
