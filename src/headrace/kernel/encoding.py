"""Labels as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError


def encode_classes(y: NDArray[Any], classes: NDArray[Any], loss: object) -> NDArray[Any]:
    """Two classes: one column of ±1 (0 and 1 for the logistic loss). More: one indicator column each."""
    index = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    strange = classes[index] != y
    if np.any(strange):
        raise DataError(
            f"y holds the label {y[strange].tolist()[0]!r}, which is not among the classes "
            f"{classes.tolist()!r}"
        )
    if len(classes) == 2:
        column = index.astype(np.float64)[:, None]
        return column if loss == "logistic" else 2 * column - 1
    targets: NDArray[Any] = np.zeros((len(y), len(classes)), np.float32)
    targets[np.arange(len(y)), index] = 1
    return targets
