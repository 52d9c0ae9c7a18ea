"""``bandwidth="auto"``: the median distance as a start, then the leave-one-out error on a subsample.

Leaving one row out of a kernel interpolant (or ridge regression) needs no refitting: its error is
α_i/(K⁻¹)_ii. So each candidate costs one small inverse in float64, and the choice depends neither on splits
nor on the order of rows. The candidates are the median times powers of two, then the neighbours of the best
by √2.

Known shortcoming: the best bandwidth for all rows is somewhat smaller than for the subsample. Accuracy is
flat there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError, OptionError
from headrace.kernel.operands import Operands

SEARCH_ROWS = 1000
COARSE = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0)
JITTER = 1e-9


def check_bandwidth(bandwidth: object) -> float | None:
    """The given bandwidth, or None for "auto"."""
    if isinstance(bandwidth, str):
        if bandwidth != "auto":
            raise OptionError(f'bandwidth={bandwidth!r}: give "auto" or a number above 0')
        return None
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float | np.number):
        raise OptionError(f'bandwidth={bandwidth!r}: give "auto" or a number above 0')
    if not (bandwidth > 0 and math.isfinite(bandwidth)):
        raise OptionError(f"bandwidth={bandwidth} must be above 0 and finite; it divides distances")
    return float(bandwidth)


def median_bandwidth(operands: Operands, rows: Any) -> float:
    """The median distance of pairs (radial kernels), or the median norm (dot-product kernels)."""
    unit = replace(operands, bandwidth=1.0, dtype=torch.float64, device=torch.device("cpu"))
    right = unit.right(rows)
    dense = right.to_dense() if right.layout == torch.sparse_csr else right
    if operands.kernel.family == "dot":
        # The constant feature has the scaled row's own length in its last column when rows are normalised.
        last = dense[:, -1]
        norms = (dense[:, :-1] / last[:, None]).norm(dim=1)
        return positive_median(norms)
    squares = torch.mm(unit.left(dense), dense.T)
    upper = torch.triu_indices(len(dense), len(dense), offset=1)
    distances = squares[upper[0], upper[1]].clamp_(min=0).sqrt_() / operands.kernel.row_scale
    return positive_median(distances)


def positive_median(values: Tensor) -> float:
    if bool(values.isnan().any()):
        return math.nan
    positive = values[values > 0]
    return float(positive.median()) if len(positive) else 1.0


def leave_one_out_error(
    operands: Operands, rows: Any, targets_sc: Tensor, ridge: float, row_weights_s: Tensor | None
) -> float:
    """The weighted mean squared leave-one-out error of kernel ridge regression on those rows."""
    right = operands.right(rows)
    s = right.shape[0]
    kernel = torch.empty(s, s, dtype=operands.dtype, device=operands.device)
    operands.evaluate(operands.left(right), right, kernel)
    weights = torch.ones(s, dtype=torch.float64) if row_weights_s is None else row_weights_s
    jitter = JITTER * float(kernel.diagonal().max())
    kernel.diagonal().add_(jitter + ridge / weights)
    factor, failed = torch.linalg.cholesky_ex(kernel)
    if int(failed):
        return math.inf
    inverse = torch.cholesky_inverse(factor)
    errors = (inverse @ targets_sc) / inverse.diagonal()[:, None]
    return float((errors.square().sum(dim=1) * weights).sum() / weights.sum())


def choose_bandwidth(
    operands: Operands,
    rows: Any,
    targets_sc: Tensor,
    *,
    ridge: float = 0.0,
    row_weights_s: Tensor | None = None,
) -> tuple[float, str]:
    """(bandwidth, why) from at most `SEARCH_ROWS` rows."""
    if operands.kernel.family == "callable":
        return 1.0, "the kernel function has its own"
    start = median_bandwidth(operands, rows)
    if not math.isfinite(start):
        raise DataError(
            "squared distances of the rows of X overflow float64; scale X, for example by StandardScaler"
        )
    if rows.shape[0] < 3:
        return start, "the distance of the rows; there are too few to search"
    exact = replace(operands, dtype=torch.float64, device=torch.device("cpu"), exact_norms=False)
    errors: dict[float, float] = {}

    def score(power: float) -> float:
        if power not in errors:
            candidate = replace(exact, bandwidth=start * 2.0**power)
            errors[power] = leave_one_out_error(candidate, rows, targets_sc, ridge, row_weights_s)
        return errors[power]

    best = min(COARSE, key=score)
    best = min((best, best - 0.5, best + 0.5), key=score)
    chosen = start * 2.0**best
    return chosen, (
        f"least leave-one-out error on {rows.shape[0]} rows ({score(best):.4g}; {score(0.0):.4g} at the "
        "median "
        f"distance {start:.4g})"
    )
