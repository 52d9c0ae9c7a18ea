"""Memory that several processes read and write without a lock, and that leaves nothing behind.

A `SharedBlock` is an anonymous file in memory (memfd): it has no name, so nothing of it can stay in
/dev/shm when a process is killed, and it is not bound by the size of /dev/shm, which containers keep at
64 MB. It lives as long as a process that maps it. A block is sent to a child process while that is being
started, never later.

`Board` is a block of counters. Every worker writes its own row and reads the others'; nobody waits, and no
counter has two writers, so none is lost.
"""

from __future__ import annotations

import mmap
import os
import sys
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DeviceError

ALIGNMENT = 64
"""Bytes of a cache line: two tensors on one line would make their writers wait for one another."""


class SharedBlock:
    """``size`` bytes of memory, zero at first, that child processes can map too."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        if fd is None:
            if not hasattr(os, "memfd_create"):
                raise DeviceError(f"shared memory needs Linux, and this is {sys.platform}; use one worker")
            fd = os.memfd_create("headrace", os.MFD_CLOEXEC)
            os.ftruncate(fd, max(1, size))
        self.size = size
        self._fd = fd
        self._map = mmap.mmap(fd, max(1, size))

    def __del__(self) -> None:
        # The mapping is closed by the last array that uses it.
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def __reduce__(self) -> Any:
        return _reopen, (self.size, reduction.DupFd(self._fd))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> Tensor:
        """A tensor over the block. Each call makes a storage of its own, with its own version counter:
        threads that share one would wait for one another at every update in place."""
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def array(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype=np.int64, count=count).reshape(shape)


def _reopen(size: int, duplicate: Any) -> SharedBlock:
    return SharedBlock(size, duplicate.detach())


class SharedTensors:
    """Named tensors in one block, each at the start of a cache line.

    ``by_feature`` names matrices that are to lie column by column: the first layer's weights under CSR rows, of
    which a row touches a few columns.
    """

    def __init__(self, like: dict[str, Tensor], by_feature: frozenset[str] = frozenset()) -> None:
        self.by_feature = by_feature
        self.layout: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        offset = 0
        for name, tensor in like.items():
            self.layout[name] = (tensor.dtype, tuple(tensor.shape), offset)
            size = tensor.numel() * tensor.element_size()
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = offset
        self.block = SharedBlock(offset)
        for name, view in self.views().items():
            view.copy_(like[name].detach())

    def views(self) -> dict[str, Tensor]:
        """New tensors over the shared memory, by name."""
        return {name: self._view(name, *entry) for name, entry in self.layout.items()}

    def _view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        if name in self.by_feature:
            return self.block.tensor(dtype, shape[::-1], offset).t()
        return self.block.tensor(dtype, shape, offset)


def flat(tensor: Tensor) -> Tensor:
    """A tensor's numbers in the order in which they lie, without a copy."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.t().view(-1)


BUCKETS = 24
"""Buckets of the staleness histogram: 0, 1, 2–3, 4–7, ... updates."""

GRANT, ROWS, UPDATES, MERGES, BUSY_NS, BEAT, CANCEL, PULLED, STALENESS = range(9)
"""Columns of the board; the histogram begins at the last."""


class Board:
    """One row of counters per worker."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.block = SharedBlock(8 * workers * (STALENESS + BUCKETS))
        self._open()

    def _open(self) -> None:
        self.cells = self.block.array((self.workers, STALENESS + BUCKETS))

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self.workers, "block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def others_updates(self, worker: int) -> int:
        """Updates made so far by all workers but this one."""
        return int(self.cells[:, UPDATES].sum()) - int(self.cells[worker, UPDATES])

    def saw_staleness(self, worker: int, updates: int) -> None:
        """Count one write whose parameters were read ``updates`` updates of others earlier."""
        bucket = min(BUCKETS - 1, max(0, updates).bit_length())
        self.cells[worker, STALENESS + bucket] += 1


def staleness_labels() -> list[str]:
    """What the buckets of the histogram mean, in updates."""
    ranges = [(1 << (i - 1), (1 << i) - 1) for i in range(1, BUCKETS)]
    return ["0", *(f"{low}–{high}" if low < high else str(low) for low, high in ranges)]
