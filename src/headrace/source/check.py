"""Numbers that would spoil training: NaN and infinity, found before the first step.

``check_finite`` reads the source once, in chunks, so that data beyond memory can be checked too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.types import Column, Columns, Source

CHUNK_BYTES = 16 << 20


def check_finite(source: Source, *, max_rows: int | None = None) -> None:
    """Raise `DataError` naming each column with NaN or infinite values, how many, and where the first one is.

    ``max_rows`` bounds the work: only so many rows, from the start, are looked at.
    """
    floating = [column for column in source.columns if column.dtype.is_floating_point]
    if not floating:
        return
    bad: dict[str, tuple[int, int]] = {}
    for start, columns in chunks(source, max_rows):
        for column in floating:
            if not count_bad(columns[column.name])[0]:
                continue
            for name, values in parts(column, columns[column.name]):
                count, first = count_bad(values)
                if count:
                    seen, where = bad.get(name, (0, start + first))
                    bad[name] = (seen + count, where)
    if bad:
        found = "; ".join(
            f"column {name!r} has {count}, the first in row {row}" for name, (count, row) in bad.items()
        )
        raise DataError(
            f"NaN or infinite values in the data: {found}. Fill or drop those rows before training"
        )


def parts(column: Column, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The column under the names that the user knows: those of a table's columns where they were put together."""
    if not column.features:
        yield column.name, values
        return
    for k, name in enumerate(column.features):
        yield name, values[:, k]


def chunks(source: Source, max_rows: int | None) -> Iterator[tuple[int, Columns]]:
    """The source's rows in ranges of about `CHUNK_BYTES`."""
    rows = len(source) if max_rows is None else min(max_rows, len(source))
    per_row = sum(
        c.dtype.itemsize * max(1, torch.Size(c.shape).numel()) for c in source.columns if not c.sparse
    )
    step = max(1, min(rows, CHUNK_BYTES // max(per_row, 64)))
    for start in range(0, rows, step):
        yield start, source.read(range(start, min(start + step, rows)))


def count_bad(values: Tensor) -> tuple[int, int]:
    """How many values are not finite, and the first row with one."""
    if values.layout == torch.sparse_csr:
        wrong = ~torch.isfinite(values.values())
        if not wrong.any():
            return 0, 0
        entry = int(wrong.nonzero()[0])
        return int(wrong.sum()), int((values.crow_indices() <= entry).sum()) - 1
    # One sum tells whether anything is wrong at all, without a mask as large as the data.
    if torch.isfinite(values.sum(dtype=torch.float64)):
        return 0, 0
    wrong = ~torch.isfinite(values.reshape(len(values), -1))
    rows = wrong.any(1)
    return int(wrong.sum()), int(rows.nonzero()[0]) if rows.any() else 0
