"""What each CUDA device can do, timed with the device synchronised on both sides.

The device's work is timed in batches of calls, so that the host's launches hide behind it, except where
launching is what is measured. torch's float32 precision and current device are put back afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.hardware.processor import best_time
from headrace.types import Accelerator

if TYPE_CHECKING:
    import torch

GEMM_SIZE = 8192
"""1.1 TFLOP a product: about 20 ms in fp32 and 1.5 ms in bf16 on an H200."""
TRANSFER_BYTES = 256 * 2**20
LAUNCHES = 300
"""Kernels queued at once, twice in a row; the driver blocks the host when about a thousand wait."""
MEASUREMENTS = 7


def accelerators(budget_s: float) -> tuple[Accelerator, ...]:
    """Every visible CUDA device; with a budget of 0 the names and sizes only, all rates 0.0."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns where a driver is found but too old; doctor says so instead
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return ()
    return tuple(_accelerator(torch.device("cuda", index), budget_s / count) for index in range(count))


def _accelerator(device: torch.device, budget_s: float) -> Accelerator:
    import torch

    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    rates = _rates(device, free_bytes, budget_s) if budget_s > 0 else (0.0,) * MEASUREMENTS
    fp32, tf32, bf16, pinned, pageable, launch_s, copy = rates
    return Accelerator(
        name=name,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        gemm_fp32_flops=fp32,
        gemm_tf32_flops=tf32,
        gemm_bf16_flops=bf16,
        pinned_bytes_per_s=pinned,
        pageable_bytes_per_s=pageable,
        launch_s=launch_s,
        copy_bytes_per_s=copy,
    )


def _rates(device: torch.device, free_bytes: int, budget_s: float) -> tuple[float, ...]:
    import torch

    size = GEMM_SIZE if free_bytes > 4 * 2**30 else 1024
    moved = min(TRANSFER_BYTES, free_bytes // 8)
    each = budget_s / MEASUREMENTS
    with torch.cuda.device(device), torch.inference_mode(), _precision_restored():
        measured = (
            _gemm(device, size, torch.float32, "highest", each),
            _gemm(device, size, torch.float32, "high", each),
            _gemm(device, size, torch.bfloat16, "highest", each),
            _transfer(device, moved, each, pinned=True),
            _transfer(device, moved, each, pinned=False),
            _launch(device, each),
            _copy(device, moved, each),
        )
        torch.cuda.empty_cache()
    return measured


def _timed(device: torch.device, work: Callable[[], object], budget_s: float, calls: int = 1) -> float:
    """Seconds of one call of ``work``, from ``calls`` of them queued together."""
    import torch

    def batch() -> None:
        for _ in range(calls):
            work()
        torch.cuda.synchronize(device)

    torch.cuda.synchronize(device)
    return best_time(batch, budget_s) / calls


def _gemm(device: torch.device, size: int, dtype: torch.dtype, precision: str, budget_s: float) -> float:
    import torch

    torch.set_float32_matmul_precision(precision)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return float(2 * size**3 / _timed(device, lambda: torch.mm(left, right, out=out), budget_s, calls=5))


def _transfer(device: torch.device, size: int, budget_s: float, *, pinned: bool) -> float:
    import torch

    host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _timed(device, lambda: target.copy_(host, non_blocking=pinned), budget_s)


def _copy(device: torch.device, size: int, budget_s: float) -> float:
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _timed(device, lambda: target.copy_(source), budget_s, calls=10)


def _launch(device: torch.device, budget_s: float) -> float:
    """Host seconds per launch of the smallest kernel: the queue is emptied outside the timed part."""
    import torch

    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        best = min(best, best_time(launches, 0.0, repeats=1))
    return best / LAUNCHES


@contextmanager
def _precision_restored() -> Iterator[None]:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
