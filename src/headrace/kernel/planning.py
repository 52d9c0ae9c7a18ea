"""Everything automatic, decided in pure functions: workload and budget in, decisions with reasons out.

The order of decisions is the paper's: the batch that the device wants (m_G), the subsample that this batch
needs (s), then, once the eigenvalues are known, how many directions to flatten (q), the batch that the
flattened kernel can use (m) and its step (η).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import OptionError
from headrace.kernel.formulas import (
    STABLE_BATCH_PER_SAMPLE,
    Momentum,
    critical_batch,
    momentum,
    step_size,
)
from headrace.kernel.memory import Workload, words
from headrace.kernel.precondition import Preconditioner
from headrace.types import Plan

WHOLE_ROWS_CPU = 2500
WHOLE_ROWS_CUDA = 5000
"""Up to so many rows the whole eigensystem is solved (below two seconds) and a batch holds all rows."""
LEAST_BATCH_CUDA = 2048
BATCHES_CUDA = 32
"""A batch on CUDA is at most this part of the rows: its subsample's eigensystem would outlast epochs otherwise."""
LEAST_SAMPLES = 2000
MOST_SAMPLES_CUDA = 12_000
MOMENTUM_BELOW = 0.02
"""Momentum pays when the smallest eigenvalue of K_SS is below this share of β (docs/log.md has the runs)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is decided before the eigenvalues are known."""

    batch: int
    samples: int
    whole: bool
    """All rows are in S and in every batch."""
    cached: bool
    block_values: int
    plan: Plan


def lay_out(
    work: Workload,
    budget: int,
    *,
    wanted_batch: int,
    on_cuda: bool,
    block_values: int,
    cache_itemsize: int,
    cacheable: bool = True,
    fixed_batch: int | None = None,
) -> Layout:
    """Batch, subsample, cache and block within the budget."""
    n, plan = work.rows, Plan()
    limit = WHOLE_ROWS_CUDA if on_cuda else WHOLE_ROWS_CPU
    whole = n <= limit and (fixed_batch is None or fixed_batch >= n)
    free = budget - work.fixed_bytes()
    block = block_values
    if whole and work.step_bytes(n, n, block) > free:
        whole = False
    if whole:
        plan = plan.with_("batch_wanted", n, f"{n} rows are few enough to use all of them in every step")
        plan = plan.with_("samples", n, "the whole eigensystem is solved, so the steps are nearly exact")
        batch, samples = n, n
    else:
        batch, why = _batch(n, wanted_batch, fixed_batch, on_cuda)
        samples = min(n, max(LEAST_SAMPLES, math.ceil(batch / STABLE_BATCH_PER_SAMPLE)))
        if on_cuda and fixed_batch is None:
            samples = min(samples, MOST_SAMPLES_CUDA)
        asked = (batch, samples)
        while work.step_bytes(batch, samples, block) > free and max(batch, samples, block >> 14) > 32:
            block = max(1 << 14, block // 2)
            if block == 1 << 14 or samples * samples > block:
                batch, samples = max(min(n, 32), batch // 2), max(min(n, 32), samples // 2)
        if (batch, samples) != asked:
            why = f"the device wants {asked[0]}, memory allows this"
        plan = plan.with_("batch_wanted", batch, why)
        plan = plan.with_("samples", samples, f"batches above {STABLE_BATCH_PER_SAMPLE:g}·s can diverge")
    need = work.fixed_bytes() + work.step_bytes(batch, samples, block)
    if need > budget:
        raise OptionError(
            f"max_memory allows {words(budget)}, and {n} rows of {work.features} features with "
            f"{work.outputs} "
            f"outputs need at least {words(need)}; raise max_memory, or choose fewer centres with centers="
            f"{max(1, int(n * budget / need / 2))}"
        )
    cache = work.cache_bytes(cache_itemsize)
    # Not for the whole case: there a product costs less than the eigensystem anyway, but the cache is cheap
    # too.
    cached = cacheable and need + cache <= budget and n > 1
    plan = plan.with_(
        "cached",
        cached,
        f"the kernel matrix takes {words(cache)} of {words(budget)} allowed"
        if cached
        else f"the kernel matrix would take {words(cache)}, {words(max(0, budget - need))} are left"
        if cacheable
        else "centres lie on several devices, or memory ran out before",
    )
    return Layout(batch=batch, samples=samples, whole=whole, cached=cached, block_values=block, plan=plan)


def _batch(n: int, wanted: int, fixed: int | None, on_cuda: bool) -> tuple[int, str]:
    """The batch before memory has its say, and why."""
    if fixed:
        return min(n, fixed), "given"
    most = max(LEAST_BATCH_CUDA, n // BATCHES_CUDA)
    if on_cuda and wanted > most:
        return min(
            n, most
        ), f"larger ones than a {BATCHES_CUDA}th of the rows cost more eigenvectors than they save"
    return min(n, wanted), "the smallest batch at which this device's products run at full rate"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What follows from the eigenvalues."""

    batch: int
    step: float
    momentum: Momentum | None
    plan: Plan


def set_pace(
    layout: Layout, preconditioner: Preconditioner, *, rows: int, ridge: float, wants_momentum: object
) -> Pace:
    """q, m, η and momentum, with reasons, added to the layout's plan."""
    pre, plan = preconditioner, layout.plan
    original = critical_batch(float(pre.eigenvalues[0]) + ridge / rows, pre.first_peak)
    limit = critical_batch(pre.top, pre.peak)
    batch = rows if layout.whole else min(layout.batch, max(1, limit), rows)
    step = step_size(batch, peak=pre.peak, top=pre.top, rows=rows)
    plan = plan.with_(
        "directions",
        pre.directions,
        f"flattening to the {pre.directions}th eigenvalue moves the useful batch from {original} to {limit}",
    )
    plan = plan.with_(
        "peak", pre.peak, f"largest diagonal of the flattened kernel; it was {pre.first_peak:.4g}"
    )
    plan = plan.with_(
        "batch",
        batch,
        "all rows"
        if batch == rows
        else f"the smaller of the device's {layout.batch} and the kernel's {limit}",
    )
    plan = plan.with_("step", step, "the largest stable step for this batch and spectrum")
    bottom = max(float(pre.eigenvalues[-1]) * pre.samples, 0.0) + ridge
    share = bottom / pre.first_peak
    use = (not layout.whole and share < MOMENTUM_BELOW) if wants_momentum == "auto" else bool(wants_momentum)
    chosen = None
    if use:
        smallest = max(bottom, 1e-6 * pre.first_peak)
        chosen = momentum(batch, rows, peak=pre.peak, top=pre.top, bottom=smallest)
    plan = plan.with_(
        "momentum",
        use,
        f"the smallest eigenvalue seen is {share:.3g} of the largest diagonal; momentum pays below "
        f"{MOMENTUM_BELOW:g}",
    )
    return Pace(batch=batch, step=step, momentum=chosen, plan=plan)
