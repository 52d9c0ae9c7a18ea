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
        for start in range(0, n, PREDICT_ROWS):
            right = self.operands.right(rows[start : start + PREDICT_ROWS])
            out[start : start + PREDICT_ROWS] = self.expansion.values(self.operands.left(right))
        return out
