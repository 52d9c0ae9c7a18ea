"""How much memory may be used, and how much each choice would use.

The budget covers what a fit allocates beside the caller's own arrays. Sizes are Python integers, so that n²
of any n is exact.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.errors import OptionError

DEFAULT_SHARE = 0.8
OVERHEAD_BYTES = 48 << 20
"""Workspace of the matrix libraries and of temporaries that are not counted one by one; measured, rounded
up.
"""
EIGEN_COPIES = 6
"""Matrices of s² that stand in memory together while the eigensystem is solved (LAPACK's syevd asks for
these).
"""

_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def available_bytes(device: torch.device) -> int:
    """What is free now: on the device, or for this process with its control group's limit respected."""
    if device.type == "cuda":
        # What torch keeps for reuse counts as free.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
        free = int(found.group(1)) * 1024 if found else free
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


def memory_budget(max_memory: object, device: torch.device) -> int:
    """``max_memory`` in bytes: "auto", a number of bytes, or a size such as "4GB"."""
    if max_memory is None or max_memory == "auto":
        return int(DEFAULT_SHARE * available_bytes(device))
    if isinstance(max_memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", max_memory)
        unit = found.group(2).lower().replace("ib", "b") if found else "?"
        if found is None or unit not in _UNITS:
            raise OptionError(
                f'max_memory={max_memory!r} is no size; give bytes, "auto" or a size such as "4GB"'
            )
        return int(float(found.group(1)) * _UNITS[unit])
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | float) or not max_memory > 0:
        raise OptionError(f'max_memory={max_memory!r} is no size; give bytes, "auto" or a size such as "4GB"')
    return int(max_memory)


def words(size: float) -> str:
    """A size for people."""
    for unit in ("bytes", "KB", "MB", "GB", "TB", "PB"):
        if size < 1024 or unit == "PB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        "allocate memory" in text or "out of memory" in text or "not enough memory" in text
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What has to be held."""

    rows: int
    features: int
    outputs: int
    itemsize: int
    scratch: bool = False
    """The kernel needs a second block."""
    dense_bytes: int | None = None
    """Bytes of the operand when it is not dense."""
    packed_bytes: int = 0
    """Bytes of the centres' copy for the fused kernels."""

    @property
    def operand_bytes(self) -> int:
        if self.dense_bytes is not None:
            return self.dense_bytes
        return self.rows * (self.features + 2) * self.itemsize + self.packed_bytes

    @property
    def state_bytes(self) -> int:
        """Targets, weights, the weights at the start of the epoch, momentum, row numbers and keys."""
        return self.rows * (self.outputs * 4 * self.itemsize + 40)

    def step_bytes(self, batch: int, samples: int, block: int) -> int:
        """One batch at work, and the eigensystem, which is gone by then but was as large."""
        passing = max(batch, 2048)
        step = passing * (3 * (self.features + 2) + 4 * self.outputs + 8) + 2 * batch * samples
        eigen = EIGEN_COPIES * samples * samples
        return self.itemsize * (max(step, eigen) + samples * samples + block * (2 if self.scratch else 1))

    def fixed_bytes(self) -> int:
        return OVERHEAD_BYTES + self.operand_bytes + self.state_bytes

    def cache_bytes(self, itemsize: int) -> int:
        return self.rows * self.rows * itemsize
