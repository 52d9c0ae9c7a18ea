"""The numbers of EigenPro 2.0, as pure functions of eigenvalues (Ma & Belkin, MLSys 2019).

Symbols of the paper beside our words: β ``peak`` (largest value of the kernel's diagonal), λ ``eigenvalues``
of K_SS/s in descending order, q ``directions``, m ``batch``, η ``step``, a ``exponent``. ``shift`` is
ridge/n: a ridge adds it to every eigenvalue, and everything below holds for the shifted spectrum.

Why it works: a batch larger than β/λ₁ + 1 makes no more progress per batch. Flattening the top of the
spectrum to λ_q moves that limit to about β/λ_q without moving the solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXPONENT = 0.95
"""a: below 1, because eigenvalues of a subsample overestimate how much may be removed."""

STABLE_BATCH_PER_SAMPLE = 0.8
"""Largest batch per subsampled row. Measured: 6000 on 2000 rows diverges, 6000 on 5000 does not."""


def critical_batch(top: float, peak: float = 1.0) -> int:
    """The batch size beyond which a larger batch gains nothing: β/λ₁ + 1."""
    return math.floor(peak / top) + 1


def directions_for_batch(
    eigenvalues: Sequence[float] | NDArray[np.float64],
    batch: int,
    *,
    peak: float = 1.0,
    exponent: float = EXPONENT,
    shift: float = 0.0,
) -> int:
    """q: the largest number with (β/λ_q)^a ≤ batch; 1 leaves the spectrum as it is."""
    shifted = np.maximum(np.asarray(eigenvalues, dtype=np.float64), 0.0) + shift
    with np.errstate(divide="ignore"):
        wanted = (peak / shifted) ** exponent
    return max(1, int(np.count_nonzero(wanted <= batch)))


def directions_for_precision(eigenvalues: NDArray[np.float64], relative: float) -> int:
    """The largest q whose eigenvalue is still known: λ_q ≥ relative·λ₁."""
    return max(1, int(np.count_nonzero(eigenvalues >= relative * eigenvalues[0])))


def damping(
    eigenvalues: NDArray[np.float64], directions: int, *, exponent: float = EXPONENT, shift: float = 0.0
) -> NDArray[np.float64]:
    """D_i = (1 − ((λ_q+ρ)/(λ_i+ρ))^a)/λ_i for i < q: what each leading direction's gradient is reduced by."""
    leading = np.asarray(eigenvalues[: directions - 1], dtype=np.float64)
    last = float(eigenvalues[directions - 1])
    result: NDArray[np.float64] = (1.0 - ((last + shift) / (leading + shift)) ** exponent) / leading
    return result


def damped_top(
    eigenvalues: NDArray[np.float64], directions: int, *, exponent: float = EXPONENT, shift: float = 0.0
) -> float:
    """λ̃: the largest eigenvalue that is left, λ₁(λ_q/λ₁)^a."""
    first, last = float(eigenvalues[0]) + shift, float(eigenvalues[directions - 1]) + shift
    return float(first * (last / first) ** exponent)


def step_size(batch: int, *, peak: float, top: float, rows: int | None = None) -> float:
    """η for batches of ``batch``, where ``peak`` and ``top`` are those of the flattened kernel.

    A batch that holds all ``rows`` has no sampling noise, so its step is that of plain gradient descent,
    1/λ̃.
    """
    if rows is not None and batch >= rows:
        return 1.0 / top
    if batch < peak / top + 1:
        return batch / peak
    return 0.99 * 2 * batch / (peak + (batch - 1) * top)


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """AxlePro's constants: Nesterov's acceleration for the flattened kernel."""

    step: float
    """η₁, per example of the batch."""
    carry: float
    """γ."""
    correction: float
    """η₂, per example of the batch."""


def momentum(batch: int, rows: int, *, peak: float, top: float, bottom: float) -> Momentum:
    """AxlePro's constants; ``bottom`` is the smallest eigenvalue of the kernel matrix (μ = bottom/n)."""
    smoothness = (peak + (batch - 1) * top) / batch
    strength = bottom / rows
    spread = rows / batch + (batch - 1) / batch
    t = max(1.0, math.sqrt(spread * smoothness / strength))
    step = 1.0 / smoothness
    return Momentum(
        step=step / batch,
        carry=(t - 1) / (t + 1),
        correction=step * t / (t + 1) * (1 - 1 / spread) / batch,
    )
