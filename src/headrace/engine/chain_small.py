"""Compiled loops for batches of one or two rows, where a step moves weights rather than multiplies them.

A matrix product reads every weight for the derivative and reads and writes it again for the update. Here one
pass over a row of weights does both, and rows whose derivative is zero (half of them behind a ReLU) are
skipped. From four rows on the processor's matrix products are faster again (see `benchmarks/bench_chain.py`).

Needs numba. The loops release the interpreter lock, reorder sums, and are compiled once per
machine: numba caches them beside this file, or in the user's cache folder when that cannot be written.
Loops are told nothing about NaN, so a diverging model shows its NaN as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

ROWS = 2
"""The largest batch for which these loops were faster than matrix products."""

_compiled: Callable[[Callable[..., None]], Callable[..., None]] = njit(
    fastmath={"reassoc", "contract", "nsz"}, nogil=True, cache=True
)


@_compiled
def forward(weight: Any, bias: Any, x: Any, out: Any) -> None:
    """``out = x weightᵀ + bias``."""
    for i in range(weight.shape[0]):
        for r in range(x.shape[0]):
            total = x[r, 0] * weight[i, 0]
            for j in range(1, weight.shape[1]):
                total += weight[i, j] * x[r, j]
            out[r, i] = total + bias[i]


@_compiled
def backward_and_update(weight: Any, bias: Any, delta: Any, taken: Any, below: Any, alpha: Any) -> None:
    """``below = delta weight``, then ``weight += alpha deltaᵀ taken`` and ``bias += alpha Σ delta``.

    A row of weights is read for ``below`` before it is updated.
    """
    below[:] = 0
    for i in range(weight.shape[0]):
        for r in range(delta.shape[0]):
            d = delta[r, i]
            if d != 0:
                for j in range(weight.shape[1]):
                    below[r, j] += d * weight[i, j]
        for r in range(delta.shape[0]):
            d = alpha * delta[r, i]
            if d != 0:
                for j in range(weight.shape[1]):
                    weight[i, j] += d * taken[r, j]
                bias[i] += d


@_compiled
def backward_and_update_one(weight: Any, bias: Any, delta: Any, taken: Any, below: Any, alpha: Any) -> None:
    """As `backward_and_update` for one row, in one pass over the weights."""
    below[:] = 0
    for i in range(weight.shape[0]):
        d = delta[0, i]
        if d != 0:
            e = alpha * d
            for j in range(weight.shape[1]):
                w = weight[i, j]
                below[0, j] += d * w
                weight[i, j] = w + e * taken[0, j]
            bias[i] += e


@_compiled
def update(weight: Any, bias: Any, delta: Any, taken: Any, alpha: Any) -> None:
    """``weight += alpha deltaᵀ taken`` and ``bias += alpha Σ delta``."""
    for i in range(weight.shape[0]):
        for r in range(delta.shape[0]):
            d = alpha * delta[r, i]
            if d != 0:
                for j in range(weight.shape[1]):
                    weight[i, j] += d * taken[r, j]
                bias[i] += d


def compile_for(dtype: str) -> None:
    """Compile, or load from the cache, all loops for ``"float32"`` or ``"float64"``."""
    for rows in (1, 2):
        matrix, vector = np.zeros((rows, rows), dtype), np.zeros(rows, dtype)
        alpha = vector.dtype.type(0)
        forward(matrix, vector, matrix, matrix.copy())
        backward_and_update(matrix, vector, matrix, matrix, matrix.copy(), alpha)
        backward_and_update_one(matrix, vector, matrix, matrix, matrix.copy(), alpha)
        update(matrix, vector, matrix, matrix, alpha)
