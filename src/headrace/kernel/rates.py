"""The batch that this device wants: the smallest one that runs products at nearly the full rate.

Measured once per process, device, precision and width, in about a tenth of a second. On CUDA no batch below 2048
is tried: launching a step takes Python longer than the device needs for it.
"""

from __future__ import annotations

import functools
import time

import torch

from headrace.kernel.products import CPU_BLOCK_VALUES

NEARLY_FULL = 0.93
"""Share of the best rate that counts as full; repeated measurements on one machine differ by less."""
MOST_WIDTH = 512
"""Wider products are no slower per operation, only longer to measure."""


def wanted_batch(device: torch.device, dtype: torch.dtype, features: int) -> int:
    """The smallest batch at the knee of the device's rate."""
    width = 1 << max(3, (min(features, MOST_WIDTH) - 1).bit_length())
    return knee(_measured(str(device), dtype, width))


def knee(rates: dict[int, float], share: float = NEARLY_FULL) -> int:
    """The smallest batch whose rate is at least ``share`` of the best."""
    best = max(rates.values())
    return min(batch for batch, rate in rates.items() if rate >= share * best)


@functools.cache
def _measured(device_name: str, dtype: torch.dtype, width: int) -> dict[int, float]:
    device = torch.device(device_name)
    on_cuda = device.type == "cuda"
    values = 1 << 26 if on_cuda else CPU_BLOCK_VALUES
    sizes = (2048, 4096, 8192, 16384) if on_cuda else (128, 256, 512, 1024)
    rates = {}
    generator = torch.Generator(device).manual_seed(0)
    for batch in sizes:
        # Not of zeros or ones: processors run faster on those than on data.
        left = torch.randn(batch, width, dtype=dtype, device=device, generator=generator)
        right = torch.randn(values // batch, width, dtype=dtype, device=device, generator=generator)
        out = torch.empty(batch, values // batch, dtype=dtype, device=device)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(left, right.T, out=out)
            if on_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        rates[batch] = 2.0 * values * width / min(seconds[1:])
    return rates
