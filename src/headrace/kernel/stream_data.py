"""Rows and targets in chunks: from memory, or from a `headrace.types.Source` that may exceed it.

A source is read through the buffered loader (`headrace.engine.loader`): it fills a buffer in large sequential reads
while training uses the one before, shuffles within it, and puts the rows on the device. Input columns are flattened
and joined; the column with the role "target" (or the last one) is the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.kernel.resident import all_finite

Targets = Callable[[dict[str, Any]], NDArray[np.float64]]
SCAN_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows with what belongs to them."""

    rows: Any
    targets_nc: NDArray[np.float64]
    row_weights_n: NDArray[np.float64] | None


class SourceRows:
    """The rows of a source, with the little of an array's interface that sampling needs."""

    def __init__(self, source: Any) -> None:
        self.source = source
        if len(source) < 1:
            raise DataError("the source holds no rows")
        self.target = target_name(source)
        first = self.read(range(0, 1))[0]
        self.shape = (len(source), first.shape[1])

    def read(self, rows: range | torch.Tensor) -> tuple[NDArray[Any], dict[str, Any]]:
        """(the input columns side by side, all columns)."""
        columns = self.source.read(rows)
        return self.join(columns, _named(rows)).numpy(), columns

    def join(self, columns: dict[str, Any], where: str) -> torch.Tensor:
        """The input columns side by side, on the device that they are on."""
        inputs = [column for name, column in columns.items() if name != self.target]
        dense = [c.to_dense() if c.layout != torch.strided else c for c in inputs]
        flat = torch.cat([column.reshape(len(column), -1) for column in dense], dim=1)
        if not all_finite(flat):
            raise DataError(f"the source holds NaN or infinity in rows {where}")
        return flat

    @property
    def row_bytes(self) -> int:
        return sum(int(np.prod(c.shape, dtype=np.int64)) * c.dtype.itemsize for c in self.source.columns)

    def load(self, targets: Targets) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Everything, for training with every row as a centre."""
        array, columns = self.read(range(len(self.source)))
        return array, targets(columns)


def _named(rows: range | torch.Tensor) -> str:
    return f"{rows.start} to {rows.stop - 1}" if isinstance(rows, range) else "chosen at random"


def target_name(source: Any) -> str:
    columns = source.columns
    targets = [column.name for column in columns if column.role == "target"]
    if targets:
        return str(targets[0])
    if len(columns) < 2:
        raise DataError(
            f"the source has the single column {columns[0].name!r}; a target column is needed beside the "
            "inputs"
        )
    return str(columns[-1].name)


class NumberReader:
    """The target column as numbers."""

    def __init__(self, source: Any) -> None:
        self.target = target_name(source)
        shape = next(column.shape for column in source.columns if column.name == self.target)
        self.one_column = not shape
        self.outputs = int(np.prod(shape)) if shape else 1

    def __call__(self, columns: dict[str, Any]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = columns[self.target].reshape(-1, self.outputs).double().numpy()
        return values


class ClassReader:
    """The target column as indicators of classes, which the source names or one pass finds."""

    def __init__(self, source: Any, loss: str) -> None:
        self.target = target_name(source)
        self.loss = loss
        column = next(column for column in source.columns if column.name == self.target)
        if column.classes:
            self.classes: NDArray[Any] = np.arange(len(column.classes))
        else:
            found: set[Any] = set()
            for start in range(0, len(source), SCAN_ROWS):
                part = source.read(range(start, min(len(source), start + SCAN_ROWS)))[self.target]
                found |= set(part.unique().tolist())
            self.classes = np.array(sorted(found))
        self.outputs = 1 if len(self.classes) == 2 else len(self.classes)

    def __call__(self, columns: dict[str, Any]) -> NDArray[np.float64]:
        from headrace.kernel.encoding import encode_classes

        return encode_classes(columns[self.target].reshape(-1).numpy(), self.classes, self.loss)


class MemoryChunks:
    """Rows in memory, in a new random order each epoch."""

    def __init__(
        self, rows: Any, targets_nc: NDArray[np.float64], row_weights_n: NDArray[np.float64] | None
    ) -> None:
        self.rows, self.targets_nc, self.row_weights_n = rows, targets_nc, row_weights_n
        self.shape = rows.shape

    def sample(self, index: NDArray[np.int64]) -> Chunk:
        weights = self.row_weights_n
        return Chunk(
            rows=self.rows[index],
            targets_nc=self.targets_nc[index],
            row_weights_n=None if weights is None else weights[index],
        )

    def epoch(self, chunk_rows: int, random: np.random.RandomState, device: torch.device) -> Iterator[Chunk]:
        order = random.permutation(self.shape[0])
        for start in range(0, len(order), chunk_rows):
            yield self.sample(order[start : start + chunk_rows])


class SourceChunks:
    """Rows of a source, through the buffered loader."""

    def __init__(self, rows: SourceRows, targets: Targets) -> None:
        self.rows, self.targets = rows, targets
        self.shape = rows.shape

    def sample(self, index: NDArray[np.int64]) -> Chunk:
        array, columns = self.rows.read(torch.from_numpy(np.sort(index)))
        return Chunk(rows=array, targets_nc=self.targets(columns), row_weights_n=None)

    def epoch(self, chunk_rows: int, random: np.random.RandomState, device: torch.device) -> Iterator[Chunk]:
        from headrace.engine.loader import Loader

        loader = Loader(
            self.rows.source,
            batch_size=chunk_rows,
            order="shuffled",
            buffer=max(1, 2 * chunk_rows * self.rows.row_bytes),
            device=device,
            seed=int(random.randint(2**31 - 1)),
        )
        with loader:
            names = [column.name for column in loader.columns]
            for batch in loader:
                columns = dict(zip(names, batch, strict=True))
                rows = self.rows.join(columns, "of a chunk")
                target = {self.rows.target: columns[self.rows.target].cpu()}
                yield Chunk(rows=rows, targets_nc=self.targets(target), row_weights_n=None)
