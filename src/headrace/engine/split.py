"""Some rows of a source as a source: what is held out for validation, and what is left."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.source.arrays import ArraySource
from headrace.types import Column, Columns, InMemory, Rows, Source


class SomeRows:
    """The rows of ``inner`` that ``rows`` names, in ascending order so that ranges stay nearly sequential."""

    def __init__(self, inner: Source, rows: Tensor) -> None:
        self.inner = inner
        self.rows = rows.sort().values

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.inner.columns

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        index = torch.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
        return self.inner.read(self.rows[index], out)


def hold_out(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Training rows and validation rows, drawn at random; data in memory stays data in memory."""
    held = round(share * len(source))
    if not 0 < held < len(source):
        raise DataError(
            f"validation={share}: a share of {len(source)} rows leaves {held} to validate on and "
            f"{len(source) - held} to train on; both need at least one"
        )
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
    parts = SomeRows(source, order[held:]), SomeRows(source, order[:held])
    if not isinstance(source, InMemory):
        return parts
    training, validation = (
        ArraySource(part.columns, source.read(part.rows), origin="a share of the data") for part in parts
    )
    return training, validation
