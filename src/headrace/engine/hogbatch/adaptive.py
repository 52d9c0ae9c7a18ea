"""Whose batch grows, and how a worker's step size follows its batch. Pure.

Adaptive Hogbatch (Ma and Rusu, 2020) halves the batch of a worker that makes fewer updates than all others
and doubles that of one that makes more, so that no device's updates drown the others'. Acting on cumulative
counts, it swings between two sizes for ever. Here the measured updates per second since the last change
decide: each batch moves towards the size at which all workers update equally often, by at most a factor
``alpha`` at a time (the paper's two), and rests while all rates lie within a dead band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

DEAD_BAND = 1.1
"""Rates this near to their geometric mean count as equal: a guess, above the noise of short spans."""

SCALINGS = ("linear", "sqrt", "off")


def adapt(
    batches: Mapping[str, int],
    rates: Mapping[str, float],
    limits: Mapping[str, tuple[int, int]],
    powers_of_two: Sequence[str] = (),
    alpha: float = 2.0,
) -> dict[str, int]:
    """New batch sizes from updates per second; ``powers_of_two`` names workers that take only such sizes."""
    mean = math.exp(sum(math.log(rate) for rate in rates.values()) / len(rates))
    chosen = {}
    for name, batch in batches.items():
        ratio = rates[name] / mean
        if 1 / DEAD_BAND <= ratio <= DEAD_BAND:
            chosen[name] = batch
            continue
        wanted = batch * min(alpha, max(1 / alpha, ratio))
        low, high = limits[name]
        size = nearest_power_of_two(wanted) if name in powers_of_two else round(wanted)
        chosen[name] = min(high, max(low, size, 1))
    return chosen


def nearest_power_of_two(size: float) -> int:
    return int(2 ** round(math.log2(max(1.0, size))))


def step_scale(batch: int, reference: int, scaling: str) -> float:
    """By what a worker's step size is multiplied when its batch is not the reference batch."""
    if scaling == "linear":
        return batch / reference
    if scaling == "sqrt":
        return math.sqrt(batch / reference)
    return 1.0
