"""What "auto" means, decided once from the spaces and the machine, each choice with its reason. Pure."""

from __future__ import annotations

from typing import Any

from headrace.agents.config import Config
from headrace.agents.spaces import Observations
from headrace.errors import OptionError
from headrace.types import Plan

DEFAULTS: dict[str, Any] = {
    "n_envs": "auto",
    "lr": "auto",
    "gae_lambda": "auto",
    "entropy_coef": "auto",
    "clip_rewards": "auto",
    "policy": "auto",
    "mode": "auto",
    "workers": "auto",
    "device": "auto",
    "compiled": "auto",
}
"""Options that may be "auto", and are unless they are given."""


def resolve(
    asked: dict[str, Any],
    observations: Observations,
    *,
    fixed_n: int | None,
    cuda: bool,
    cluster: bool = False,
) -> tuple[Config, Plan]:
    """A complete configuration, and why each "auto" became what it is.

    ``fixed_n`` is the number of rows of a vector environment that was passed in; ``cuda`` says whether there is one;
    ``cluster`` says that machines are to learn together.
    """
    chosen = {**DEFAULTS, **asked}
    images = any(leaf.kind == "image" for leaf in observations.leaves)
    plan = Plan()

    def decide(name: str, value: Any, reason: str) -> None:
        nonlocal plan
        if chosen[name] == "auto":
            chosen[name] = value
            plan = plan.with_(name, value, reason)
        else:
            plan = plan.with_(name, chosen[name], "asked for")

    if fixed_n is not None:
        chosen["n_envs"] = fixed_n
        plan = plan.with_("n_envs", fixed_n, "the rows of the vector environment that was passed in")
    elif images:
        decide("n_envs", 16, "image networks are the bottleneck, and larger batches use them better")
    else:
        decide("n_envs", 8, "enough to make one forward pass worth its overhead; CartPole was tuned with it")
    if images:
        decide("policy", "cnn", "an observation is an image")
        decide("lr", 7e-4, "the rate that A2C's Atari results use")
        decide("gae_lambda", 1.0, "n-step returns, as A2C's Atari results use")
        decide("entropy_coef", 0.01, "games need exploration; the value that A2C's Atari results use")
        decide(
            "clip_rewards", 1.0, "games score in units from 1 to thousands; reported returns stay unclipped"
        )
    else:
        decide("policy", "mlp", "observations are vectors")
        decide("lr", 2e-3, "solves CartPole in every seed tried, see docs/agents.md")
        decide("gae_lambda", 0.95, "solves CartPole sooner than 1")
        decide("entropy_coef", 0.0, "small control tasks explore enough by sampling")
        decide("clip_rewards", 0.0, "rewards are used as they are")
    workers = _workers(chosen, decide)
    _mode(chosen, workers, cluster, decide)
    small = chosen["policy"] == "mlp"
    if cuda and not small:
        decide("device", "cuda", "a CUDA device is there and the network is large enough to use it")
    else:
        decide("device", "cpu", "small networks act faster on the CPU" if cuda else "no CUDA device")
    if str(chosen["device"]).startswith("cuda"):
        decide(
            "compiled",
            "graph",
            "an update is one launch; compiled=True fuses it first: 5 to 17 s once, for 0.1 to 0.2 ms "
            "less an update, which pays after some 100,000 of them",
        )
    else:
        decide("compiled", False, "on cores torch.compile gains nothing that its start would be worth")
    return Config.from_dict(chosen), plan


def _workers(chosen: dict[str, Any], decide: Any) -> int:
    if isinstance(chosen["workers"], dict):
        chosen["workers"] = int(chosen["workers"].get("processes") or chosen["workers"].get("cpu", 1))
    elif chosen["workers"] == "single":
        chosen["workers"] = 1
    decide(
        "workers",
        1,
        "one learner is exactly reproducible and never later at a target return; ask for more to scale",
    )
    workers = chosen["workers"]
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise OptionError(f'workers={workers!r} must be "auto", "single" or a whole number')
    return workers


def _mode(chosen: dict[str, Any], workers: int, cluster: bool, decide: Any) -> None:
    if cluster:
        decide("mode", "hybrid", "synchronous inside each machine, asynchronous between them")
    elif workers == 1:
        decide("mode", "synchronous", "one worker")
    else:
        decide("mode", "hybrid", "synchronous inside each worker, asynchronous between them")
    if chosen["mode"] == "synchronous" and (cluster or workers > 1):
        several = "cluster=" if cluster else f"workers={workers}"
        raise OptionError(
            f'mode="synchronous" is one learner, and {several} asks for several; raise n_envs instead, '
            'or choose mode="hybrid"'
        )
