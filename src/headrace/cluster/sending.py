"""What travels between machines: sources in memory, differences and vectors, as numpy arrays.

Ray keeps large arrays in memory that all processes of a node share: nothing is copied for a worker that only reads.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.cluster.compress import Packed
from headrace.engine.residence import take
from headrace.types import Column, Columns, InMemory, Rows, Source

Wire: TypeAlias = "tuple[int, NDArray[Any], bool, NDArray[Any] | None, float, Wire | None]"
"""A `Packed`: size, values, whether they are bfloat16, positions, decay, correction."""


class SentSource:
    """Columns in memory that come from another process. It is an `InMemory` source."""

    def __init__(self, columns: tuple[Column, ...], arrays: dict[str, NDArray[Any]], origin: str) -> None:
        self.columns = columns
        self.arrays = arrays
        self.origin = origin

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def tensors(self) -> Columns:
        return {name: shared_tensor(array) for name, array in self.arrays.items()}

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        if isinstance(rows, range):
            rows = torch.arange(rows.start, rows.stop, rows.step)
        found = {name: take(values, rows) for name, values in self.tensors().items()}
        for name, values in found.items() if out is not None else ():
            assert out is not None
            out[name].copy_(values)
        return found if out is None else out


def sendable(data: Any, source: Source) -> Any:
    """What to send so that a worker can open ``data``: a path as it is, rows in memory as arrays."""
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        return str(data)
    if isinstance(source, InMemory) and not any(column.sparse for column in source.columns):
        arrays = {name: values.numpy() for name, values in source.tensors().items()}
        return SentSource(source.columns, arrays, str(getattr(source, "origin", "arrays")))
    return source


def shared_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over an array that must not be written to."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; nothing here writes to what it pulled or was sent.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


def to_wire(packed: Packed | None) -> Wire | None:
    if packed is None:
        return None
    half = packed.values.dtype == torch.bfloat16
    values = packed.values.view(torch.int16) if half else packed.values
    positions = None if packed.positions is None else packed.positions.numpy()
    return packed.size, values.numpy(), half, positions, packed.decay, to_wire(packed.correction)


def from_wire(wire: Wire | None) -> Packed | None:
    if wire is None:
        return None
    size, values, half, positions, decay, correction = wire
    tensor = shared_tensor(values)
    places = None if positions is None else shared_tensor(positions)
    return Packed(size, tensor.view(torch.bfloat16) if half else tensor, places, decay, from_wire(correction))


def as_array(vector: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(vector.numpy())
