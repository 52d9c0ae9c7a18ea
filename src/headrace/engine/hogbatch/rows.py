"""Rows of a column by number, dense or CSR, as dense batches in memory that is kept.

A CSR column travels as three plain tensors, so that it can lie in shared memory. Compiled steps read it as it is
(`compiled`); for all others its rows become dense batch by batch here, which is fine up to some thousands of
features and wasteful far above.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CSR = (".crow", ".col", ".values", ".width")


def to_parts(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain tensors that hold the columns, row behind row.

    A matrix that lies column by column, as some files and `numpy.load` leave it, is copied once: compiled steps
    cannot read it, and every gather would touch a cache line for each number.
    """
    parts = {}
    for name, column in columns.items():
        if column.layout == torch.sparse_csr:
            width = torch.tensor(column.shape[1])
            held = (column.crow_indices().long(), column.col_indices().long(), column.values(), width)
            parts.update({name + suffix: tensor for suffix, tensor in zip(CSR, held, strict=True)})
        else:
            parts[name] = column.contiguous()
    return parts


class Rows:
    """One column, from the parts that `to_parts` made."""

    def __init__(self, parts: dict[str, Tensor], name: str) -> None:
        self._dense = parts.get(name)
        self._kept = torch.empty(0)
        if self._dense is None:
            self._crow, self._col, self._values = (parts[name + suffix] for suffix in CSR[:3])
            self._width = int(parts[name + CSR[3]])

    def batches(self, rows: Tensor, batch: int) -> Iterator[Tensor]:
        """Dense batches of the rows named, each valid until the next call of `batches`, or, from a CSR
        column, until the next batch."""
        if self._dense is None:
            return (self._densified(piece, batch) for piece in rows.split(batch))
        if len(self._kept) < len(rows):
            self._kept = self._dense.new_empty(len(rows), *self._dense.shape[1:])
        out = self._kept[: len(rows)]
        return iter(torch.index_select(self._dense, 0, rows, out=out).split(batch))

    def _densified(self, rows: Tensor, batch: int) -> Tensor:
        if len(self._kept) < batch:
            self._kept = self._values.new_empty(batch, self._width)
        out = self._kept[: len(rows)].zero_()
        starts = self._crow[rows]
        counts = self._crow[rows + 1] - starts
        ends = counts.cumsum(0)
        at = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        within = torch.arange(len(at), device=rows.device) - (ends - counts)[at]
        places = starts[at] + within
        # Entries of one row that name a column twice add up, as everywhere else.
        out.view(-1).index_add_(0, at * self._width + self._col[places], self._values[places])
        return out
