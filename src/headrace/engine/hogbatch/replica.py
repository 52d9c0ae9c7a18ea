"""A worker's private copy of the parameters, merged with the shared ones without a lock.

Shared weights do not scale to several workers at small batches: every update makes the other cores fetch the
same cache lines again. A replica takes several local steps and then adds what they changed to the shared
parameters: ``shared += local - snapshot``. Overwriting them with the replica instead would undo whatever the
others added since the snapshot.

Two workers that add to one element at the same instant may leave one of the sums only; `lost` estimates how
often, by an element that every merge raises by one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.hogbatch.shared import flat

PIECE = 1 << 16
"""Elements merged at a time: three pieces of float32 stay in a core's second cache."""


class Replica:
    """Local parameters, and what the shared ones were when last seen."""

    def __init__(self, shared: dict[str, Tensor], canary: Tensor) -> None:
        self._shared = [flat(tensor) for tensor in shared.values()]
        self.parameters = {name: tensor.clone() for name, tensor in shared.items()}
        self._local = [flat(tensor) for tensor in self.parameters.values()]
        self._snapshot = [tensor.clone() for tensor in self._local]
        self._canary = canary
        self.merges = 0

    def merge(self) -> None:
        """Add the local changes to the shared parameters, and take over the sum."""
        for shared, local, snapshot in zip(self._shared, self._local, self._snapshot, strict=True):
            for start in range(0, shared.numel(), PIECE):
                piece = slice(start, start + PIECE)
                h, w, s = shared[piece], local[piece], snapshot[piece]
                h.add_(torch.sub(w, s, out=s))
                w.copy_(h)
                s.copy_(w)  # not h: another worker may have added to it since the line above
        self._canary += 1
        self.merges += 1

    def addresses(self) -> NDArray[np.int64]:
        """Shared, local and snapshot address and size of each parameter, for merging in compiled code."""
        parts = zip(self._shared, self._local, self._snapshot, strict=True)
        return np.array(
            [[h.data_ptr(), w.data_ptr(), s.data_ptr(), h.numel()] for h, w, s in parts], np.int64
        )

    def pull(self) -> None:
        """Forget local changes and take over the shared parameters."""
        for shared, local, snapshot in zip(self._shared, self._local, self._snapshot, strict=True):
            local.copy_(shared)
            snapshot.copy_(local)
