"""How often CPU workers merge: measured where the run is long enough, else a rule.

Cores that update one copy of the weights wait for each other's cache lines; how long depends on the processor,
on how many cores take part, and on how long a step is. Replicas avoid that and see the others' work later. So the
fewest local steps are taken whose throughput is near the best.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from headrace.engine.hogbatch.observer import HogbatchResult
from headrace.engine.hogbatch.options import HogbatchOptions
from headrace.plan import GUESSED_CORE_FLOPS

CHOICES = (1, 16, 64)
TRIAL_S = 0.15
"""For each choice, in each of two turns: a grant takes a third of it."""
WORTH_S = 20.0
"""A run shorter than this is not worth a second of measuring."""
NEAR = 0.95

MERGE_FROM, LOCAL_STEPS = 4, 16
"""Without a measurement: replicas from so many workers on, merged every so many steps. Every further core adds
traffic to a direct update and none to a local step; two and three are left to direct updates."""


def by_rule(options: HogbatchOptions) -> tuple[int, str | None]:
    """Local steps without a measurement, and a sentence when they are more than one."""
    if options.cpu < MERGE_FROM:
        return 1, None
    return (
        LOCAL_STEPS,
        f"each CPU worker merges a private copy every {LOCAL_STEPS} steps: {options.cpu} cores that update one "
        "copy would wait for each other's cache lines",
    )


def row_s(numbers: int, cores: int) -> float:
    """About how long a chain with so many parameters takes for a row, to tell a short run from a long one."""
    return 6.0 * numbers / (GUESSED_CORE_FLOPS * max(1, cores))


def expected_s(options: HogbatchOptions, numbers: int, rows: int) -> float:
    """About how long the run will take, for a chain with so many parameters."""
    per_row = row_s(numbers, options.cpu)
    limits = [rows * options.epochs * per_row]
    if options.updates is not None:
        limits.append(options.updates * options.batch_size * per_row)
    if options.seconds is not None:
        limits.append(options.seconds)
    return min(limits)


def choose(rates: dict[int, float]) -> int:
    """The fewest local steps whose rate is near the best."""
    best = max(rates.values())
    return min(steps for steps, rate in rates.items() if rate >= NEAR * best)


def by_measurement(
    module: nn.Module,
    columns: dict[str, Tensor],
    loss: Callable[..., Tensor],
    options: HogbatchOptions,
    train: Callable[..., HogbatchResult],
) -> tuple[int, str]:
    """Local steps by rows per second of all CPU workers, each choice on copies of the module."""
    rates = dict.fromkeys(CHOICES, 0.0)
    for turn in range(2):
        for steps in CHOICES if turn == 0 else reversed(CHOICES):
            changes: dict[str, Any] = {"cuda": 0, "standin": 0, "algorithm": "hogwild", "merge_every": steps}
            changes |= {"processes": False, "seconds": TRIAL_S, "updates": None, "epochs": 1_000_000}
            short = dataclasses.replace(options, grant_s=TRIAL_S / 3, **changes)
            result = train(copy.deepcopy(module), columns, loss, short)
            rates[steps] = max(rates[steps], result.rows / max(result.seconds, 1e-9))
    chosen = choose(rates)
    listed = ", ".join(f"{steps}: {rate:,.0f}" for steps, rate in rates.items())
    way = "update the shared parameters directly" if chosen == 1 else f"merge every {chosen} steps"
    return chosen, f"{options.cpu} CPU workers {way}: measured rows per second by local steps {listed}"
