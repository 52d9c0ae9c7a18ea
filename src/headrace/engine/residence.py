"""Where a source's columns end up: measuring the room, loading them once, and taking rows out of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.engine.placement import MEMORY_SHARE, Workload, show
from headrace.errors import DeviceError
from headrace.source.sparse import take_rows
from headrace.types import Columns, Decision, InMemory, Source

CHUNK_BYTES = 64 << 20
LARGE_GATHER_BYTES = 4 << 20
"""About a millisecond of copying by one thread; a guess."""


def resolve_device(device: str | torch.device) -> torch.device:
    """The device asked for; ``"auto"`` is the accelerator if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is no device; say 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise DeviceError(f"{device} was asked for, but this machine has {count} CUDA devices")
    return found


def free_memory() -> int:
    """Host memory that can still be had, the container's limit respected."""
    free = 4 << 30
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        free = min(free, max(0, limit - used))
    return free


def row_bytes(source: Source) -> float:
    """Bytes of one row as served; for sparse columns the mean."""
    dense = sum(c.dtype.itemsize * torch.Size(c.shape).numel() for c in source.columns if not c.sparse)
    sparse = [c.name for c in source.columns if c.sparse]
    if not sparse or not isinstance(source, InMemory):
        return float(dense)
    tensors = source.tensors()
    return dense + sum(csr_bytes(tensors[name]) for name in sparse) / len(source)


def csr_bytes(matrix: Tensor) -> int:
    """Bytes of a CSR tensor's three parts."""
    return sum(part.nbytes for part in (matrix.crow_indices(), matrix.col_indices(), matrix.values()))


def workload(source: Source, device: torch.device) -> Workload:
    """What there is to place, and the room for it now."""
    return Workload(
        rows=len(source),
        bytes_per_row=row_bytes(source),
        in_memory=isinstance(source, InMemory),
        mapped=bool(getattr(source, "mapped", False)),
        fresh=bool(getattr(source, "fresh", False)),
        device=device.type,
        memory_free=free_memory(),
        device_free=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0,
    )


def load(source: Source, device: torch.device) -> Columns:
    """All columns on ``device``: the source's own memory where that is possible, else read once in ranges."""
    if isinstance(source, InMemory):
        apart = lie_apart(source, device)
        return {
            name: values.to(device).contiguous() if name in apart else values.to(device)
            for name, values in source.tensors().items()
        }
    columns = {
        c.name: torch.empty((len(source), *c.shape), dtype=c.dtype, device=device) for c in source.columns
    }
    step = max(1, int(CHUNK_BYTES // max(row_bytes(source), 1)))
    for start in range(0, len(source), step):
        rows = range(start, min(start + step, len(source)))
        for name, values in source.read(rows).items():
            columns[name][rows.start : rows.stop].copy_(values)
    return columns


def lie_apart(source: InMemory, device: torch.device) -> list[str]:
    """Columns to copy once, since the numbers of one row do not lie side by side in rows that follow each other.

    A table's `to_numpy()` and ``X = data[:, :-1]`` are such: a gather touches a cache line for each number, or moves
    the whole array. What memory has no room for is left where it lies.
    """
    found = {n: v for n, v in source.tensors().items() if v.layout == torch.strided and not _by_rows(v)}
    if not found or device.type != "cpu":
        return list(found)
    return list(found) if sum(v.nbytes for v in found.values()) <= MEMORY_SHARE * free_memory() else []


def copied(source: Source, device: torch.device) -> tuple[Decision, ...]:
    """What `load` copies, for the plan."""
    names = lie_apart(source, device) if isinstance(source, InMemory) else []
    if not names or not isinstance(source, InMemory):
        return ()
    size = sum(source.tensors()[name].nbytes for name in names)
    reason = f"{' and '.join(names)} do not lie row behind row; {show(size)} are copied once so that they do"
    return (Decision(name="copied", value=names, reason=reason),)


def _by_rows(values: Tensor) -> bool:
    return values.is_contiguous() or (
        values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
    )


def gather(columns: Columns, positions: Tensor) -> Columns:
    """The rows at these positions of every column, dense or sparse, on the columns' device."""
    return {name: take(values, positions) for name, values in columns.items()}


def take(values: Tensor, positions: Tensor) -> Tensor:
    """The rows at these positions of one column."""
    if values.layout == torch.sparse_csr:
        return take_rows(values, positions)
    # Of what is not contiguous NumPy would copy all rows to take some.
    by_torch = values.is_cuda or values.dtype == torch.bfloat16 or not values.is_contiguous()
    if by_torch or is_large(values, positions):
        return values.index_select(0, positions)
    # torch splits even a small gather over its threads, which on a busy machine costs milliseconds where the
    # copy takes microseconds (measured: 64 rows of 784 bytes, 3.8 ms against 0.07 ms on two loaded cores).
    return torch.from_numpy(np.take(values.numpy(), positions.numpy(), axis=0))


def is_large(values: Tensor, positions: Tensor) -> bool:
    """Whether several threads are worth waking for this gather."""
    return len(positions) * values[:1].nbytes > LARGE_GATHER_BYTES


def left_out_of(source: Source) -> tuple[Decision, ...]:
    """What of the data was missing when they were opened with on_error="skip"."""
    sentences: tuple[str, ...] = getattr(source, "left_out", ())
    if not sentences:
        return ()
    shown = "; ".join(sentences[:5]) + ("; ..." if len(sentences) > 5 else "")
    return (Decision(name="left_out", value=len(sentences), reason=f"on_error='skip': {shown}"),)
