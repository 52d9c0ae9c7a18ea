"""A source whose columns already lie in memory, or are memory maps of plain files.

Invariant: every column has the same number of rows. The source never writes to the memory it was given, and
never copies it unless a column is served in another dtype than it is stored in (see `columns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.source.columns import build_column, native
from headrace.source.options import OpenOptions, choose
from headrace.source.sparse import from_scipy, is_scipy, slice_rows, take_rows
from headrace.types import Column, Columns, Rows, Span


class ArraySource:
    """Columns of tensors. It is an `InMemory` source."""

    def __init__(
        self,
        columns: tuple[Column, ...],
        stored: Columns,
        *,
        origin: str,
        mapped: bool = False,
        spans: Mapping[str, tuple[Span, ...]] | None = None,
    ) -> None:
        lengths = {name: len_of(values) for name, values in stored.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name!r} has {count}" for name, count in lengths.items())
            raise DataError(f"{origin}: the columns must have equally many rows, but {found}")
        if next(iter(lengths.values())) == 0:
            raise DataError(f"{origin} has no rows")
        self.columns = columns
        self.origin = origin
        """Where the data came from, for messages."""
        self.mapped = mapped
        """True when the columns are memory maps of files: reading them may read the disk."""
        self.left_out: tuple[str, ...] = ()
        """What was missing when files were opened with on_error="skip", a sentence each."""
        self._stored = stored
        self._spans = dict(spans or {})
        self._served: Columns | None = None
        self._rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.origin}: {len(self)} rows, {describe(self.columns)})"

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given rows; views of the memory itself for a range of step 1 without ``out``."""
        found = {c.name: take(self._stored[c.name], rows).to(c.dtype) for c in self.columns}
        if out is None:
            return found
        for name, values in found.items():
            out[name].copy_(values)
        return out

    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Where in which files the columns lie that are memory maps."""
        return dict(self._spans)

    def stored(self) -> Columns:
        """The columns as they lie, before any change of dtype."""
        return dict(self._stored)

    def tensors(self) -> Columns:
        """All columns as they are served; those of another stored dtype are converted once and kept."""
        if self._served is None:
            self._served = {c.name: self._stored[c.name].to(c.dtype) for c in self.columns}
        return self._served


def take(values: Tensor, rows: Rows) -> Tensor:
    """The given rows of one column, dense or sparse."""
    if isinstance(rows, range):
        if rows.step == 1:
            if values.layout == torch.sparse_csr:
                return slice_rows(values, rows)
            return values[rows.start : rows.stop]
        rows = torch.arange(rows.start, rows.stop, rows.step)
    if values.layout == torch.sparse_csr:
        return take_rows(values, rows)
    return values.index_select(0, rows)


def len_of(values: Tensor) -> int:
    """Rows of a column."""
    return int(values.shape[0])


def describe(columns: tuple[Column, ...]) -> str:
    """The columns in a few words, for messages and plans."""

    def one(column: Column) -> str:
        shape = "×".join(map(str, column.shape)) or "scalar"
        kind = str(column.dtype).removeprefix("torch.")
        return f"{column.name} {shape} {'sparse ' if column.sparse else ''}{kind}"

    return ", ".join(one(column) for column in columns)


def from_mapping(
    values: Mapping[str, Any], options: OpenOptions, origin: str, *, mapped: bool = False
) -> ArraySource:
    """A source over named arrays; inputs first, in the order chosen, the target last."""
    roles = choose(list(values), options, origin)
    columns, stored, spans = [], {}, {}
    for name, role in [*((n, "input") for n in roles.inputs), (roles.target, "target")]:
        if name is None:
            continue
        value = from_scipy(values[name]) if is_scipy(values[name]) else values[name]
        column, tensor = build_column(name, value, role=role, classes=options.classes)
        columns.append(column)
        stored[name] = tensor
        span = span_of(values[name]) if mapped else None
        if span is not None and not column.classes:
            spans[name] = (span,)
    return ArraySource(tuple(columns), stored, origin=origin, mapped=mapped, spans=spans)


def span_of(values: Any) -> Span | None:
    """Where an array lies in its file; None when it is no map, or torch cannot use the bytes as they are."""
    if not isinstance(values, np.memmap) or not values.flags.c_contiguous or not values.dtype.isnative:
        return None
    if native(values) is not values or values.ndim == 0:
        return None
    path = str(values.filename)
    return Span(
        path=path,
        offset=int(values.offset),
        rows=len(values),
        row_bytes=values.nbytes // max(len(values), 1),
        file_bytes=Path(path).stat().st_size,
    )


def from_pair(inputs: Any, target: Any, options: OpenOptions, origin: str) -> ArraySource:
    """A source over (X, y), named ``x`` and ``y``."""
    return from_mapping({"x": inputs, "y": target}, OpenOptions(classes=options.classes), origin)
