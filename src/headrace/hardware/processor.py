"""How fast the cores multiply matrices and copy memory.

The best repetition counts, not the mean: on a shared machine the others were disturbed, and a plan should
rest on what the machine can do. torch's number of threads is put back afterwards, also when something
fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GEMM_SIZE = 1024
"""Three 4 MiB matrices: too large for a core's own cache, and 2.1 GFLOP is 20 to 100 ms on one core."""
COPY_BYTES = 128 * 2**20
"""Well above the last-level caches of ordinary machines, so that memory is measured."""
MAX_REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    gemm_core_flops: float
    gemm_all_flops: float
    memory_copy_bytes_per_s: float
    """All cores together, counting bytes read and bytes written."""


def rates(cores: int, available_bytes: int, budget_s: float) -> Rates:
    """Time fp32 matrix products on one core and on all, and copies on all, in a third of the budget each."""
    import torch

    with _threads_restored():
        torch.set_num_threads(1)
        one = _gemm_rate(budget_s / 3)
        torch.set_num_threads(cores)
        every = _gemm_rate(budget_s / 3) if cores > 1 else one
        copy = _copy_rate(min(COPY_BYTES, available_bytes // 8), budget_s / 3)
    # A noisy neighbour can make two cores look slower than one, which no plan could use.
    return Rates(gemm_core_flops=one, gemm_all_flops=max(one, every), memory_copy_bytes_per_s=copy)


def best_time(
    work: Callable[[], object],
    budget_s: float,
    repeats: int = MAX_REPEATS,
    clock: Callable[[], float] | None = None,
) -> float:
    """Seconds of the quickest of 1 to ``repeats`` runs, after one that warms up."""
    clock = clock or time.perf_counter
    start = clock()
    work()
    best = float("inf")
    for _ in range(repeats):
        before = clock()
        work()
        after = clock()
        best = min(best, after - before)
        if after - start >= budget_s:
            break
    return max(best, 1e-9)  # a clock too coarse for the work must not divide by zero


def _gemm_rate(budget_s: float) -> float:
    import torch

    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cpu") for _ in range(2))
    out = torch.empty_like(left)
    with torch.inference_mode():
        seconds = best_time(lambda: torch.mm(left, right, out=out), budget_s)
    return float(2 * GEMM_SIZE**3 / seconds)


def _copy_rate(size: int, budget_s: float) -> float:
    import torch

    source = torch.ones(max(1, size), dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    return 2 * source.numel() / best_time(lambda: target.copy_(source), budget_s)


@contextmanager
def _threads_restored() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
