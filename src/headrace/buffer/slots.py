"""The memory that buffers are read into: anonymous, page-aligned, optionally pinned, and gone when closed.

Anonymous maps rather than named shared memory: nothing is left behind when the process dies. Pinning
registers the map with CUDA, which lets copies to the device run at the link's full speed while the CPU does
something else.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.buffer.reads import SECTOR
from headrace.errors import BufferStarvedError
from headrace.types import Columns


@dataclass(frozen=True)
class Lane:
    """One column's place in every slot."""

    name: str
    dtype: torch.dtype
    """As stored."""
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Slot:
    """Memory for the rows of one buffer, column by column. Its owner decides who may touch it."""

    def __init__(self, lanes: tuple[Lane, ...], rows: int, *, pinned: bool = False) -> None:
        self.lanes = lanes
        self.capacity = rows
        self.memory: dict[str, mmap.mmap] = {}
        self._registered: list[int] = []
        for lane in lanes:
            # One sector more, so that a column can begin where direct reads want it to.
            size = -(-(rows * lane.row_bytes + SECTOR) // SECTOR) * SECTOR
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self.memory[lane.name] = memory
            if pinned:
                self._pin(memory, size)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, declared to the plan."""
        return sum(len(memory) for memory in self.memory.values())

    def address(self, name: str) -> int:
        """Where a column's memory begins."""
        return int(np.frombuffer(self.memory[name], dtype=np.uint8).ctypes.data)

    def tensors(self, rows: int, leads: dict[str, int]) -> Columns:
        """Views of the first rows; ``leads`` says how many bytes into its memory each column begins."""
        return {lane.name: self._view(lane, rows, leads[lane.name]) for lane in self.lanes}

    def _view(self, lane: Lane, rows: int, lead: int) -> Tensor:
        count = rows * math.prod(lane.shape)
        if count == 0:
            return torch.empty((rows, *lane.shape), dtype=lane.dtype)
        flat = torch.frombuffer(self.memory[lane.name], dtype=lane.dtype, count=count, offset=lead)
        return flat.view(rows, *lane.shape)

    def _pin(self, memory: mmap.mmap, size: int) -> None:
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        code = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(code) != 0:
            self.close()
            raise BufferStarvedError(
                f"pinning {size} bytes of host memory for a buffer failed ({code}); give a smaller buffer="
            )
        self._registered.append(address)

    def close(self) -> None:
        """Unpin; the memory itself goes when the last tensor over it does."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())
        self.memory.clear()
