"""How many local steps and how many workers, from measured times; and what the theory says of them.

The paper's rate O(1/√T) with linear speed-up holds while cores inside a worker are at most T^{1/4} and workers at
most T^{1/2}, T being the number of steps of all workers together. Beyond that steps are still taken, but each
counts less.
"""

from __future__ import annotations

import math

from headrace.types import Decision

COMMUNICATION = 0.1
"""The share of a worker's time that pulling and pushing may take."""

PUSHES_OF_A_RUN = 64
"""Pushes of each worker at least, where there are no passes; a guess."""

UNSAID_STEPS = 1024
"""The length of a run that has no limit on its steps, where one is needed; a guess."""

BUSY = 0.7
"""The share of its time that the master may spend merging; a guess. In simulated runs of up to 64 workers with steps of
uneven length none waits long for a master that is busy this much."""


def plan_local_steps(
    step_s: float,
    exchange_s: float,
    *,
    share: float = COMMUNICATION,
    most: int | None = None,
    workers: int = 1,
    merge_s: float = 0.0,
) -> Decision:
    """B: the fewest local steps that keep an exchange within its share of a worker's time, and the pushes of all
    workers within what the master can merge. Fewer steps are fresher."""
    if step_s <= 0 or exchange_s <= 0:
        return Decision(name="local_steps", value=1, reason="an exchange costs nothing measurable")
    wanted = max(1, math.ceil(exchange_s * (1 - share) / (share * step_s)))
    why = (
        f"an exchange takes {exchange_s * 1e3:.3g} ms and a step {step_s * 1e3:.3g} ms: with so many steps "
        f"communication is {share:.0%} of the time"
    )
    served = math.ceil((workers * merge_s / BUSY - exchange_s) / step_s)
    if served > wanted:
        wanted = served
        why = (
            f"the master needs {merge_s * 1e3:.3g} ms for a push: with so many steps the pushes of {workers} "
            f"workers keep it busy for {BUSY:.0%} of the time"
        )
    if most is not None and wanted > most:
        taken = exchange_s / (exchange_s + most * step_s)
        why = (
            f"{wanted} steps would keep communication at {share:.0%}, but more than {most} of a worker's shard "
            f"between two pushes is too stale; communication takes {taken:.0%}"
        )
        wanted = most
    return Decision(name="local_steps", value=wanted, reason=why)


def plan_workers(
    available: int, *, step_s: float, exchange_s: float, merge_s: float, local_steps: int, total_steps: int
) -> Decision:
    """How many workers pay: no more than the master can serve, nor than the theory's √T."""
    turn_s = local_steps * step_s + exchange_s
    served = max(1, math.floor(turn_s / merge_s)) if merge_s > 0 else available
    theory = max(1, math.isqrt(total_steps))
    value = max(1, min(available, served, theory))
    reasons = {
        theory: f"√T of T = {total_steps:,} steps",
        served: f"the master needs {merge_s * 1e3:.3g} ms for a push and a worker's turn takes {turn_s * 1e3:.3g} ms",
        available: f"{available} can be had",
    }
    return Decision(name="workers", value=value, reason=reasons[value])


def most_local_steps(total_steps: int | None, passes: int | None, workers: int) -> int:
    """B at most: so that each worker pushes once in a pass over its shard, or often in a run that has no passes."""
    stretch = (total_steps or UNSAID_STEPS) // (passes or PUSHES_OF_A_RUN)
    return max(1, stretch // max(1, workers))


def plan_cluster(
    *,
    step_s: float,
    exchange_s: float,
    merge_s: float,
    available: int,
    may_choose: bool,
    local_steps: int | None,
    total_steps: int | None,
    passes: int | None,
) -> list[Decision]:
    """What is left to us of the number of workers (``may_choose``) and of B (``local_steps=None``)."""
    found, workers = [], available
    if may_choose:
        alone = most_local_steps(total_steps, passes, 1)
        steps = local_steps or plan_local_steps(step_s, exchange_s, most=alone).value
        decision = plan_workers(
            available,
            step_s=step_s,
            exchange_s=exchange_s,
            merge_s=merge_s,
            local_steps=steps,
            total_steps=total_steps or available**2,
        )
        found.append(decision)
        workers = decision.value
    if local_steps is None:
        most = most_local_steps(total_steps, passes, workers)
        found.append(plan_local_steps(step_s, exchange_s, most=most, workers=workers, merge_s=merge_s))
    return found


def warnings_for(total_steps: int, *, workers: int, cores: int = 1) -> list[str]:
    """What the bounds say of this run, in words; empty when it keeps within them."""
    found = []
    most_workers = math.isqrt(max(1, total_steps))
    most_cores = math.floor(max(1, total_steps) ** 0.25 + 1e-9)
    if workers > most_workers:
        found.append(
            f"{workers} workers share {total_steps:,} steps: the linear speed-up is proven up to √T = "
            f"{most_workers}; with more, stale steps count less. Train longer or take fewer workers"
        )
    if cores > most_cores:
        found.append(
            f"{cores} cores without locks inside a worker share {total_steps:,} steps: the linear speed-up is "
            f"proven up to T^(1/4) = {most_cores}; take larger batches or fewer cores"
        )
    return found
