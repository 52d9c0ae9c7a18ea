"""Parquet files, decoded one row group at a time, so that tables beyond memory can be trained on.

A row group is the least that can be decoded, so it is also the block that passes shuffle. The target is read
once when the files are opened, since names of classes must be known for all rows.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.source.arrays import ArraySource, describe
from headrace.source.columns import build_column
from headrace.source.options import OpenOptions, choose
from headrace.source.tables import arrow, arrow_values, from_arrow
from headrace.types import Column, Columns, Rows

KEPT_GROUPS = 2
"""Decoded row groups that are kept: one that a read ends in is often where the next begins."""


class ParquetSource:
    """The rows of Parquet files with equal columns, one file after the other. It is `InMemory` when asked."""

    mapped = True
    """Reading reads the disk."""

    def __init__(self, files: Sequence[Any], options: OpenOptions, origin: str) -> None:
        self.origin = origin
        files, self._parts, self.left_out = open_shards(files, options)
        schema = self._parts[0].schema_arrow
        for file, part in zip(files, self._parts, strict=True):
            if part.schema_arrow.names != schema.names:
                raise DataError(
                    f"{file} has the columns {part.schema_arrow.names}, {files[0]} has {schema.names}"
                )
        self._groups = [(part, k) for part in self._parts for k in range(part.num_row_groups)]
        sizes = [part.metadata.row_group(k).num_rows for part, k in self._groups]
        self._ends = np.cumsum(sizes)
        if not sizes or self._ends[-1] == 0:
            raise DataError(f"{origin} has no rows")
        self.block_rows = max(sizes)
        roles = choose(schema.names, options, origin)
        self._options = dataclasses.replace(options, target=False)
        self._inputs = list(roles.inputs)
        self._cache: OrderedDict[int, ArraySource] = OrderedDict()
        self._lock = threading.Lock()
        self._all: Columns | None = None
        first = self._group(0)
        # From now on every group is read with the same inputs, whatever text columns were left out of the
        # first.
        self._target: tuple[Column, Tensor] | None = None
        if roles.target is not None:
            self._target = self._read_target(roles.target, options, first.columns)
        self.columns = (*first.columns, *((self._target[0],) if self._target else ()))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"ParquetSource({self.origin}: {len(self)} rows, {describe(self.columns)})"

    def _read_target(
        self, name: str, options: OpenOptions, inputs: tuple[Column, ...]
    ) -> tuple[Column, Tensor]:
        values = np.concatenate(
            [np.asarray(arrow_values(part.read(columns=[name]).column(name), name)) for part in self._parts]
        )
        served = "y" if all(column.name != "y" for column in inputs) else name
        column, stored = build_column(served, values, role="target", classes=options.classes)
        return column, stored.to(column.dtype)

    def _group(self, index: int) -> ArraySource:
        """One decoded row group, without the target."""
        with self._lock:
            if index in self._cache:
                self._cache.move_to_end(index)
                return self._cache[index]
        part, k = self._groups[index]
        try:
            table = part.read_row_group(k, columns=self._inputs)
        except OSError as error:
            raise DataError(f"{self.origin}: row group {k} could not be decoded: {error}") from error
        decoded = from_arrow(table, self._options, self.origin)
        with self._lock:
            self._cache[index] = decoded
            while len(self._cache) > KEPT_GROUPS:
                self._cache.popitem(last=False)
        return decoded

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given rows; every row group that holds one of them is decoded once."""
        if isinstance(rows, range):
            rows = torch.arange(rows.start, rows.stop, rows.step)
        numbers = rows.numpy()
        if out is None:
            out = {c.name: torch.empty((len(rows), *c.shape), dtype=c.dtype) for c in self.columns}
        groups = np.searchsorted(self._ends, numbers, side="right")
        for group in np.unique(groups):
            at = torch.from_numpy(np.flatnonzero(groups == group))
            decoded = self._group(int(group))
            first = int(self._ends[group]) - len(decoded)
            for name, values in decoded.read(rows[at] - first).items():
                out[name][at] = values
        if self._target is not None:
            out[self._target[0].name].copy_(self._target[1][rows])
        return out

    def tensors(self) -> Columns:
        """All rows, decoded once and kept."""
        if self._all is None:
            self._all = self.read(range(len(self)))
        return self._all


def open_shards(files: Sequence[Any], options: OpenOptions) -> tuple[list[Any], list[Any], tuple[str, ...]]:
    """The files that can be read, their footers, and a sentence for each that is left out."""
    kept: list[Any] = []
    parts: list[Any] = []
    left_out: list[str] = []
    for file in files:
        try:
            part = open_parquet(file)
        except DataError as error:
            if options.on_error == "raise" or len(files) == len(left_out) + 1:
                raise
            left_out.append(str(error))
            continue
        kept.append(file)
        parts.append(part)
    return kept, parts, tuple(left_out)


def open_parquet(file: Any) -> Any:
    """The footer of one Parquet file: a path, or an open file from elsewhere."""
    pa = arrow(f"reading {file}")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(
            str(file) if isinstance(file, Path) else file, memory_map=isinstance(file, Path)
        )
    except (pa.ArrowInvalid, OSError) as error:
        where = (
            f" (it ends at byte {file.stat().st_size})" if isinstance(file, Path) and file.is_file() else ""
        )
        raise DataError(f"{file}{where} could not be read as Parquet: {error}") from error
