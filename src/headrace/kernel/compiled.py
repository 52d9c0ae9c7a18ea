"""Distances into kernel values in one pass over a block, compiled by numba, on the CPU and in float32.

torch needs a pass for each operation, and its square root and exponential are slow ones: 0.7 to 1.3 ns a value on one
core where the matrix product of 54 features takes 1.1. Here a value is read and written once, 0.10 to 0.16 ns. The
exponential is 2^k·p(f) with a polynomial p of degree six: 1e-6 of a value is its error, and e^0 is exactly 1.

Importing numba and compiling (once on a machine) take about a second, so only fits with many kernel values ask for it.
Threads share the rows of a block; what they run holds no lock of the interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

LEAST_VALUES = 1 << 30
"""Kernel values of one pass over the data that are worth a second of preparation: they save about one."""
LEAST_PIECE = 1 << 17
"""Values for one thread; handing a piece over takes about as long as 100,000 of them."""


def decide_compiled(code: int, dtype: torch.dtype, values: int) -> tuple[bool, str]:
    """Whether a fit on the CPU with so many kernel values in a pass over the data uses the compiled pass, and why."""
    if code < 0 or dtype != torch.float32:
        return False, "the compiled pass is for radial kernels in float32"
    if values < LEAST_VALUES:
        return False, "too few kernel values to pay for a compiled pass"
    if importlib.util.find_spec("numba") is None:
        return False, "numba, which would make kernel values in one pass, is not installed"
    return True, "distances become kernel values in one compiled pass"


def apply_compiled(code: int, block: Tensor) -> bool:
    """Squared distances into kernel values, in place; False when this block is not for the compiled pass."""
    if not block.is_contiguous() or block.dtype != torch.float32:
        return False
    from headrace.kernel.passes import kernel_values

    flat = block.numpy().reshape(-1)
    pieces = min(torch.get_num_threads(), flat.size // LEAST_PIECE)
    if pieces < 2:
        kernel_values(flat, code)
        return True
    bounds = [flat.size * i // pieces for i in range(pieces + 1)]
    others = [
        _threads(os.getpid(), torch.get_num_threads()).submit(kernel_values, flat[low:high], code)
        for low, high in itertools.pairwise(bounds[1:])
    ]
    kernel_values(flat[: bounds[1]], code)
    for other in others:
        other.result()
    return True


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    # By process: threads do not live on in a fork.
    return ThreadPoolExecutor(count - 1, thread_name_prefix="headrace-kernel")
