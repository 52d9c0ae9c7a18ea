"""Which rows a batch holds: a strided slice, or row numbers on the device.

A slice is a view and costs nothing; numbers are read by the device when the step runs, so that one captured step
serves every batch of its size.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = slice | Tensor
"""A slice with a start, a stop and a step, or int64 row numbers."""


def numbers(rows: Rows, like: Tensor) -> Tensor:
    """Row numbers, on the device of ``like``."""
    if isinstance(rows, slice):
        return torch.arange(rows.start, rows.stop, rows.step, device=like.device)
    return rows


def taken(values: Tensor, rows: Rows) -> Tensor:
    """Those rows of ``values``."""
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)
