"""Advantages and value targets of one rollout: generalised advantage estimation and V-trace.

Shapes: t steps, n environments; every array is (t, n). All are vectorised over environments; the loop is over
steps only, which are few.

What ends an episode decides what follows it. ``terminated`` means that nothing follows: the value after it is 0.
``truncated`` means that the clock ran out: the value of the final observation follows. In both cases the next
row belongs to another episode, so nothing is carried back over it. ``next_values`` therefore holds the value of
the observation *that the action led to*, which at a truncation is the final observation and not the first of
the next episode; who steps the environment sees to that. Rows that are not transitions at all (the reset step of
Gymnasium's NEXT_STEP mode) follow an ended row, so nothing flows out of them; the learner leaves them out of the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gae(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    gamma: float,
    lambda_: float,
) -> tuple[Array, Array]:
    """Advantages and value targets; with ``lambda_=1`` the targets are n-step returns (Schulman et al. 2016)."""
    follows = np.logical_not(terminated) * np.float32(gamma)
    goes_on = np.logical_not(np.logical_or(terminated, truncated)) * np.float32(gamma * lambda_)
    advantages: Array = follows * next_values
    advantages += rewards
    advantages -= values
    for t in range(len(rewards) - 2, -1, -1):
        advantages[t] += goes_on[t] * advantages[t + 1]
    return advantages, advantages + values


def vtrace(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    log_ratios: Array,
    gamma: float,
    lambda_: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Array, Array]:
    """Policy-gradient advantages and value targets when an older policy acted (Espeholt et al. 2018).

    ``log_ratios`` is the log probability of each action now, minus the one it was sampled with. The advantages
    carry the clipped ratio already. With ratios of 1 this is `gae` with ``lambda_`` for the targets, and one-step
    advantages against them.
    """
    ratios = np.exp(log_ratios)
    rho = np.minimum(ratios, np.float32(rho_bar))
    c = np.minimum(ratios, np.float32(c_bar)) * np.float32(lambda_)
    follows = np.logical_not(terminated) * np.float32(gamma)
    goes_on = np.logical_not(np.logical_or(terminated, truncated))
    corrections: Array = rho * (rewards + follows * next_values - values)  # vs - V, backwards
    for t in range(len(rewards) - 2, -1, -1):
        corrections[t] += goes_on[t] * follows[t] * c[t] * corrections[t + 1]
    targets = values + corrections
    next_targets = next_values.copy()
    # Inside an episode the next target is better than the next value; at its end there is only the value.
    next_targets[:-1] = np.where(goes_on[:-1], targets[1:], next_values[:-1])
    return rho * (rewards + follows * next_targets - values), targets
