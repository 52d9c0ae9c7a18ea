"""The preconditioner of EigenPro 2.0: what is subtracted from a batch's gradient, expressed on the subsample
S.

The gradient of a batch B is Σ_B g_b k(x_b, ·). Removing the part along the leading eigenfunctions of S adds
(1/s) V D Vᵀ K(S, B) g to the weights of S, where V = W½U holds the eigenvectors of W½ K_SS W½/s scaled by
the roots of the sample weights (W = 1 without weights). The solution does not move: where all g vanish, so
does the correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ModelError
from headrace.kernel.eigensystem import leading_eigenpairs
from headrace.kernel.formulas import (
    EXPONENT,
    critical_batch,
    damped_top,
    damping,
    directions_for_batch,
    directions_for_precision,
)
from headrace.kernel.operands import slice_rows
from headrace.kernel.products import KernelProduct, times

PEAK_ROWS = 20_000
"""Rows on which the largest deflated diagonal is looked for; they are a random subset, since rows are
permuted.
"""

PRECISION_UNITS = 1000
"""Eigenvalues below this many units of rounding of the largest are noise, and are not used to flatten by."""

NEGATIVE_TOLERANCE = 1e-3
"""A kernel matrix whose most negative eigenvalue exceeds this share of its largest is no rounding error."""


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """Flattens the kernel's leading directions."""

    vectors_sk: Tensor
    coefficients_k: Tensor
    """D/s."""
    eigenvalues: NDArray[np.float64]
    """All that were computed, descending, without the ridge."""
    directions: int
    """q; q − 1 directions are damped to the level of the q-th."""
    exponent: float
    top: float
    """λ̃ with the ridge's share, of the flattened kernel over n."""
    peak: float
    """β with the ridge, of the flattened kernel."""
    first_peak: float
    """β of the kernel as it was, with the ridge."""

    @property
    def samples(self) -> int:
        return int(self.vectors_sk.shape[0])

    def correction(self, kernel_ms: Tensor, gradient_mc: Tensor) -> Tensor:
        """(1/s) V D Vᵀ K(S, B) g: what is added to the weights of S per unit of step."""
        inner = times(self.vectors_sk.T, times(kernel_ms.T, gradient_mc))
        return times(self.vectors_sk, inner.mul_(self.coefficients_k[:, None]))


def build_preconditioner(
    product: KernelProduct,
    samples: int,
    batch: int,
    *,
    rows: int,
    ridge: float = 0.0,
    row_weights_n: Tensor | None = None,
    deterministic: bool = False,
    seed: int = 0,
) -> Preconditioner:
    """The preconditioner from the first ``samples`` centres, for batches of ``batch`` out of ``rows``.

    ``deterministic`` says that a batch holds all rows and S all of them too: no sampling noise limits q
    then, only the precision of the eigenvalues, and the damping is exact.
    """
    operands = product.operands
    head = slice_rows(product.right_pk, 0, samples)
    matrix = torch.empty(samples, samples, dtype=operands.dtype, device=operands.device)
    product.evaluate(operands.left(head), 0, samples, matrix)
    matrix = (matrix + matrix.T).div_(2)
    root_s = None if row_weights_n is None else row_weights_n[:samples].sqrt()
    if root_s is not None:
        matrix.mul_(root_s[:, None]).mul_(root_s)
    diagonal_n = operands.diagonal(slice_rows(product.right_pk, 0, min(PEAK_ROWS, product.rows)))
    if row_weights_n is not None:
        diagonal_n = diagonal_n * row_weights_n[: len(diagonal_n)]
    first_peak = float(diagonal_n.max())
    shift, exponent = ridge / rows, 1.0 if deterministic else EXPONENT
    wanted = samples if deterministic else count_for_batch(samples, batch)

    def enough(found: Tensor) -> bool:
        """Whether the last eigenvalue is one that a batch of this size need not have flattened."""
        known = found.cpu().numpy() / samples
        return directions_for_batch(known, batch, peak=first_peak, exponent=exponent, shift=shift) < len(
            known
        )

    values, vectors = leading_eigenpairs(matrix, wanted, enough=None if deterministic else enough, seed=seed)
    eigenvalues: NDArray[np.float64] = values.cpu().numpy() / samples
    check_positive(eigenvalues, operands.kernel.name)
    if operands.kernel.family == "callable" and len(eigenvalues) < samples:
        part = torch.linalg.eigvalsh(matrix[:1000, :1000]).flip(0)
        check_positive(part.double().cpu().numpy(), operands.kernel.name)
    precision = PRECISION_UNITS * torch.finfo(operands.dtype).eps
    q = directions_for_precision(eigenvalues, precision)
    if not deterministic:
        q = min(q, wanted_directions(eigenvalues, batch, peak=first_peak, shift=shift))
    q = min(q, vectors.shape[1])
    factors = damping(eigenvalues, q, exponent=exponent, shift=shift)
    vectors = vectors[:, : q - 1]
    if root_s is not None:
        vectors = vectors * root_s[:, None]
    vectors = vectors.contiguous()
    coefficients = torch.from_numpy(factors / samples).to(vectors)
    return Preconditioner(
        vectors_sk=vectors,
        coefficients_k=coefficients,
        eigenvalues=eigenvalues,
        directions=q,
        exponent=exponent,
        top=damped_top(eigenvalues, q, exponent=exponent, shift=shift),
        peak=deflated_peak(product, vectors, coefficients, diagonal_n, row_weights_n) + ridge,
        first_peak=first_peak + ridge,
    )


def wanted_directions(
    eigenvalues: NDArray[np.float64], batch: int, *, peak: float, shift: float = 0.0
) -> int:
    """The paper's q; one more where the spectrum falls so steeply that q leaves half of the batch unused.

    One eigenvalue of 0.1 above many of 1e-4 has q = 1 for any batch below thousands: nothing would be flattened, and
    batches of 8 would do. Flattening it to the next one is as safe: the batch stays what the subsample bears.
    """
    q = directions_for_batch(eigenvalues, batch, peak=peak, shift=shift)
    reached = critical_batch(damped_top(eigenvalues, q, shift=shift), peak)
    return q + 1 if 2 * reached < batch and q < len(eigenvalues) else q


def count_for_batch(samples: int, batch: int) -> int:
    """How many eigenpairs to ask for when not all are wanted: no batch needs more directions than
    examples.
    """
    return min(samples, max(batch, 64))


def deflated_peak(
    product: KernelProduct,
    vectors_sk: Tensor,
    coefficients_k: Tensor,
    diagonal_n: Tensor,
    row_weights_n: Tensor | None,
) -> float:
    """β: the largest w(x)·[k(x, x) − (1/s) Σ D_j (K(x, S) v_j)²] over the first rows."""
    if vectors_sk.shape[1] == 0:
        return float(diagonal_n.max())
    scaled = vectors_sk * coefficients_k.sqrt()
    best = torch.full((), -math.inf, dtype=diagonal_n.dtype, device=diagonal_n.device)
    for start in range(0, len(diagonal_n), 2048):
        stop = min(len(diagonal_n), start + 2048)
        left = product.operands.left(slice_rows(product.right_pk, start, stop))
        removed = product.multiply_head(left, scaled).square_().sum(dim=1)
        if row_weights_n is not None:
            removed = removed * row_weights_n[start:stop]
        best = torch.maximum(best, (diagonal_n[start:stop] - removed).max())
    # Rounding can leave a fully flattened diagonal at or below zero; the step needs a positive one.
    floor = float(diagonal_n.max()) * torch.finfo(diagonal_n.dtype).eps
    return max(float(best), floor)


def check_positive(eigenvalues: NDArray[np.float64], name: str) -> None:
    """A kernel must be positive semidefinite, or no step size is safe."""
    top, bottom = float(eigenvalues[0]), float(eigenvalues[-1])
    if not top > 0:
        raise ModelError(
            f"kernel {name} has no positive eigenvalue on the training rows (largest {top:.3g}); "
            "a kernel must be positive semidefinite"
        )
    if bottom < -NEGATIVE_TOLERANCE * top:
        raise ModelError(
            f"kernel {name} is not positive: on {len(eigenvalues)} rows its eigenvalues run from "
            f"{bottom:.3g} to "
            f"{top:.3g}; a kernel must be positive semidefinite, k(x, z) = ⟨φ(x), φ(z)⟩"
        )
