"""A trained kernel expansion: what `fit` returns and what predictions need. Plain data, so it can be
saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernel.expansion import Expansion
from headrace.kernel.losses import Loss
from headrace.kernel.operands import Operands
from headrace.types import Plan

PREDICT_ROWS = 1024
PREDICT_ROWS_CUDA = 8192


@dataclass(kw_only=True)
class Model:
    """f and how it came about."""

    expansion: Expansion
    loss: Loss
    plan: Plan
    keys: NDArray[np.uint64]
    """Keys of the centres, to recognise rows when training goes on."""
    targets_nc: Tensor | None = None
    """Targets of the centres, where they are training rows."""
    row_weights_n: Tensor | None = None
    residuals: list[float] = field(default_factory=list)
    halvings: int = 0
    stream: Any = None
    """State of training from a stream, so that it can go on."""

    @property
    def operands(self) -> Operands:
        return self.expansion.first.product.operands

    @property
    def outputs(self) -> int:
        return self.loss.outputs

    def values(self, rows: Any) -> Tensor:
        """f of those rows, on the CPU."""
        n = rows.shape[0]
        out = torch.zeros(n, self.outputs, dtype=self.operands.dtype)
        piece = PREDICT_ROWS_CUDA if self.operands.device.type == "cuda" else PREDICT_ROWS
        for start in range(0, n, piece):
            right = self.operands.right(rows[start : start + piece])
            out[start : start + piece] = self.expansion.values(self.operands.left(right))
        return out
