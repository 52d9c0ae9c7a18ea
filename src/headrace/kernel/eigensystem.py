"""Leading eigenvalues and eigenvectors of a symmetric positive matrix, on its own device.

Up to `DENSE_LIMIT` rows the whole system is solved (``eigh``). Beyond, a randomised block Krylov space of
depth `DEPTH` is built in the matrix's own precision and the Rayleigh–Ritz step, which decides how good the
values are, is done in float64. Not LOBPCG: it was 64 of 65 seconds of the authors' own code on MNIST.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DENSE_LIMIT = 5000
DEPTH = 3
OVERSAMPLING = 16
LEAST_ASKED = 128
SMALLEST_PART = 24
"""Of a large matrix one eigenvector in so many is asked for first."""


def leading_eigenpairs(
    matrix_ss: Tensor, count: int, *, enough: Callable[[Tensor], bool] | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Eigenvalues (float64, descending) and the vectors of the ``count`` largest (matrix's precision).

    All eigenvalues are returned where all were computed, otherwise those asked for. With ``enough``, which is
    shown eigenvalues in descending order, a large matrix is asked for few first and for twice as many until it
    is content or ``count`` is reached.
    """
    s = matrix_ss.shape[0]
    count = min(count, s)
    asked = count if enough is None else min(count, max(LEAST_ASKED, s // SMALLEST_PART))
    while s > DENSE_LIMIT and 2 * DEPTH * (asked + OVERSAMPLING) < s:
        values, vectors = _block_krylov(matrix_ss, asked, seed)
        if asked == count or (enough is not None and enough(values)):
            return values.double(), vectors.to(matrix_ss.dtype).contiguous()
        asked = min(count, 2 * asked)
    values, vectors = torch.linalg.eigh(matrix_ss)
    values, vectors = values.flip(0), vectors.flip(1)[:, :count]
    return values.double(), vectors.to(matrix_ss.dtype).contiguous()


def _block_krylov(matrix_ss: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    s, width = matrix_ss.shape[0], count + OVERSAMPLING
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(s, width, generator=generator).to(matrix_ss)
    blocks = []
    for _ in range(DEPTH):
        # Orthonormal blocks: plain powers of the matrix all lean towards the first eigenvector.
        block = torch.linalg.qr(matrix_ss @ block).Q
        blocks.append(block)
    basis = torch.linalg.qr(torch.cat(blocks, dim=1).double()).Q
    small = basis.T @ (matrix_ss @ basis.to(matrix_ss.dtype)).double()
    values, rotation = torch.linalg.eigh((small + small.T) / 2)
    values, rotation = values.flip(0)[:count], rotation.flip(1)[:, :count]
    return values, basis @ rotation
