"""Does each buffer hold a fair sample of the labels? Data sorted by label and read in blocks may not. Pure.

Two buffers' label shares are compared by their total variation distance: 0 when equal, 1 when no label is in
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.2
"""Distance beyond chance from which training notices; a guess."""


def label_shares(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """The share of each class."""
    return np.bincount(labels, minlength=classes) / max(len(labels), 1)


def widest_distance(shares: Sequence[NDArray[np.float64]]) -> float:
    """The largest total variation distance between two buffers."""
    width = max(len(share) for share in shares)
    padded = [np.pad(share, (0, width - len(share))) for share in shares]
    return max(
        (0.5 * float(np.abs(a - b).sum()) for k, a in enumerate(padded) for b in padded[k + 1 :]), default=0.0
    )


def warning(shares: Sequence[NDArray[np.float64]], rows: int) -> str | None:
    """What to tell the user when buffers differ in their labels by more than chance, else None."""
    classes = max(len(share) for share in shares)
    # Two fair samples of n rows and C classes differ by about sqrt(C / (π n)); three times that is no chance.
    chance = 3 * math.sqrt(classes / (math.pi * max(rows, 1)))
    distance = widest_distance(shares)
    if distance < MARGIN + chance:
        return None
    return (
        f"the labels of the first buffers differ by {distance:.2f} (0 is alike, 1 has no label in common): "
        f"the data "
        "seem sorted by label. Give a smaller block= or a larger buffer=, or shuffle the files once"
    )
