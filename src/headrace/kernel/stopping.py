"""Early stopping on rows held out: keep the weights of the best epoch, stop when it stays the best for a
while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernel.model import Model


class EarlyStopping:
    """Called after each epoch; answers True when training should end."""

    def __init__(
        self,
        rows: Any,
        targets_nc: Tensor,
        row_weights_n: NDArray[np.float64] | None,
        quality: Callable[[Tensor, Tensor], Tensor],
        patience: int,
    ) -> None:
        self.rows = rows
        self.targets_nc = targets_nc
        self.row_weights_n = None if row_weights_n is None else torch.from_numpy(row_weights_n)
        self.quality = quality
        self.patience = patience
        self.scores: list[float] = []
        self.best: list[Tensor] | None = None
        self.best_epoch = -1

    def __call__(self, model: Model, epoch: int) -> bool:
        each = self.quality(model.values(self.rows).double(), self.targets_nc)
        weights = self.row_weights_n
        # Held-out rows may all have weight zero; they are then counted equally.
        if weights is None or float(weights.sum()) == 0:
            score = float(each.mean())
        else:
            score = float((each * weights).sum() / weights.sum())
        if not self.scores or score > max(self.scores):
            self.best = [part.weights_pc.clone() for part in model.expansion.parts]
            self.best_epoch = len(self.scores)
        self.scores.append(score)
        return len(self.scores) - 1 - self.best_epoch >= self.patience

    def restore(self, model: Model) -> None:
        """Put the best epoch's weights back."""
        if self.best is not None:
            for part, weights in zip(model.expansion.parts, self.best, strict=True):
                part.weights_pc = weights
            model.plan = model.plan.with_(
                "epoch_kept", self.best_epoch + 1, "the best on the rows held out for early stopping"
            )
