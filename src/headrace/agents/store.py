"""Parameters that workers of one machine share, behind the two calls of `types.ParameterStore`.

The store is one flat float64 array in shared memory. ``push`` adds a difference, ``pull`` copies. Everything in it
is additive: parameters, the sums behind the normalisation, and the count of pushes, from which workers learn
how stale they were. Any store that adds differences in float64 can take its place.

Why float64 for float32 parameters: v + (u - v) is u again only if the difference is not rounded, and one worker alone
must compute what the synchronous mode computes.

Locking. One `flock` on a temporary file, held for the microseconds of an addition. The kernel releases it when its
holder dies, so a worker that is killed while it pushes leaves at worst half a difference, never a lock.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class SharedStore:
    """Implements `types.ParameterStore`; may be passed to a process when it is started.

    The process that made it calls `close`.
    """

    def __init__(self, context: Any, values: Mapping[str, Array]) -> None:
        self._layout: dict[str, tuple[int, int]] = {}
        start = 0
        for name, array in values.items():
            self._layout[name] = (start, start + array.size)
            start += array.size
        self._memory = context.RawArray("d", start)
        self._lock: int | None
        self._lock, self._path = tempfile.mkstemp(prefix="headrace-store-")
        for name, part in self._parts().items():
            part[:] = np.asarray(values[name], np.float64).reshape(-1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def _parts(self) -> dict[str, Array]:
        flat = np.frombuffer(self._memory, np.float64)
        return {name: flat[start:stop] for name, (start, stop) in self._layout.items()}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            # Opened anew in every process: a lock belongs to the open file, and must not be shared with a parent.
            self._lock = os.open(self._path, os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def pull(self) -> dict[str, Tensor]:
        with self._locked():
            return {name: torch.from_numpy(part.copy()) for name, part in self._parts().items()}

    def push(self, difference: Mapping[str, Tensor]) -> None:
        parts = self._parts()
        with self._locked():
            for name, change in difference.items():
                parts[name] += change.numpy()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        Path(self._path).unlink(missing_ok=True)
