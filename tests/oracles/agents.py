"""Naive float64 versions of what the agents compute: loops over scalars, sharing no code with the library."""

from __future__ import annotations

import math
from typing import Any


def following(t: int, n: int, next_values: Any, terminated: Any) -> float:
    """The value of what follows step t: nothing follows a termination."""
    return 0.0 if terminated[t][n] else float(next_values[t][n])


def n_step_return(
    t: int, n: int, rewards: Any, next_values: Any, ended: Any, terminated: Any, gamma: float
) -> float:
    """Rewards from step t to the end of its episode or of the rollout, then the value of what follows."""
    total, discount = 0.0, 1.0
    for s in range(t, len(rewards)):
        total += discount * float(rewards[s][n])
        discount *= gamma
        if ended[s][n] or s == len(rewards) - 1:
            return total + discount * following(s, n, next_values, terminated)
    raise AssertionError("unreachable")


def gae_advantage(
    t: int,
    n: int,
    rewards: Any,
    values: Any,
    next_values: Any,
    ended: Any,
    terminated: Any,
    gamma: float,
    lam: float,
) -> float:
    """The sum of (gamma·lambda)^k times the one-step errors, up to the end of the episode."""
    total = 0.0
    for k, s in enumerate(range(t, len(rewards))):
        error = float(rewards[s][n]) + gamma * following(s, n, next_values, terminated) - float(values[s][n])
        total += (gamma * lam) ** k * error
        if ended[s][n]:
            break
    return total


def vtrace_target(
    t: int, n: int, rewards: Any, values: Any, next_values: Any, ended: Any, terminated: Any,
    log_ratios: Any, gamma: float, lam: float, rho_bar: float, c_bar: float,
) -> float:  # fmt: skip
    """Equation 1 of Espeholt et al. (2018), summed forwards as it is written."""
    total, product = float(values[t][n]), 1.0
    for k, s in enumerate(range(t, len(rewards))):
        ratio = math.exp(float(log_ratios[s][n]))
        error = float(rewards[s][n]) + gamma * following(s, n, next_values, terminated) - float(values[s][n])
        total += gamma**k * product * min(rho_bar, ratio) * error
        product *= lam * min(c_bar, ratio)
        if ended[s][n]:
            break
    return total


def vtrace_advantage(
    t: int, n: int, rewards: Any, values: Any, next_values: Any, ended: Any, terminated: Any,
    log_ratios: Any, gamma: float, lam: float, rho_bar: float, c_bar: float,
) -> float:  # fmt: skip
    """The clipped ratio times (r + gamma·next target − V), section 4.2 of the same paper."""
    if terminated[t][n]:
        after = 0.0
    elif ended[t][n] or t == len(rewards) - 1:
        after = float(next_values[t][n])
    else:
        after = vtrace_target(
            t + 1, n, rewards, values, next_values, ended, terminated, log_ratios, gamma, lam, rho_bar, c_bar
        )
    rho = min(rho_bar, math.exp(float(log_ratios[t][n])))
    return rho * (float(rewards[t][n]) + gamma * after - float(values[t][n]))


def plain_loss(
    parameters: dict[str, Any], x: Any, raw: Any, advantages: Any, targets: Any, mask: Any, *,
    sizes: tuple[int, ...], shared: bool, activation: str, value_coef: float, entropy_coef: float,
) -> Any:  # fmt: skip
    """The whole actor-critic loss as one would first write it, row by row, for autograd to differentiate."""
    import torch

    squash = torch.tanh if activation == "tanh" else torch.relu

    def through(body: str, row: Any) -> Any:
        layer = 0
        while f"{body}.{2 * layer}.weight" in parameters:
            name = f"{body}.{2 * layer}"
            row = squash(parameters[f"{name}.weight"] @ row + parameters[f"{name}.bias"])
            layer += 1
        return row

    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(len(x)):
        if not mask[i]:
            continue
        count += 1
        for_policy = through("body" if shared else "policy_body", x[i])
        for_value = through("body" if shared else "value_body", x[i])
        out = parameters["policy_head.weight"] @ for_policy + parameters["policy_head.bias"]
        value = (parameters["value_head.weight"] @ for_value + parameters["value_head.bias"])[0]
        if sizes:
            log_p, entropy, start = (
                torch.zeros((), dtype=torch.float64),
                torch.zeros((), dtype=torch.float64),
                0,
            )
            for part, size in enumerate(sizes):
                p = torch.softmax(out[start : start + size], 0)
                log_p = log_p + torch.log(p[int(raw[i][part])])
                entropy = entropy - (p * torch.log(p)).sum()
                start += size
        else:
            normal = torch.distributions.Normal(out, torch.exp(parameters["log_std"]))
            log_p, entropy = normal.log_prob(raw[i].double()).sum(), normal.entropy().sum()
        total = (
            total - advantages[i] * log_p + value_coef * (value - targets[i]) ** 2 - entropy_coef * entropy
        )
    return total / count
