"""What a user may choose for an agent, checked once, and what "auto" was resolved to.

Invariant: a `Config` that exists is valid. Everything in it is plain data, so that it can be saved as JSON and
sent to a worker; the environment itself and a user's own module travel beside it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from headrace.errors import OptionError, unknown

MODES = ("synchronous", "asynchronous", "hybrid")
POLICIES = ("mlp", "cnn", "lstm")
OPTIMIZERS = ("rmsprop", "adam", "sgd")
SCHEDULES = ("linear", "constant", "cosine")
CORRECTIONS = ("none", "vtrace")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The numbers and names behind one agent."""

    n_envs: int = 8
    """Environments that one worker steps together."""
    n_steps: int = 5
    """Environment steps between two updates."""
    gamma: float = 0.99
    gae_lambda: float = 1.0
    """1 gives n-step returns; smaller trusts the value function more."""
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    optimizer: str = "rmsprop"
    lr: float = 1e-3
    schedule: str = "linear"
    """How the rate falls until the last step of `learn`; "linear" and "cosine" end at 0."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are scaled down to it; 0 turns it off."""
    policy: str = "mlp"
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the mlp policy, and of the layer after a cnn is always 512 ("nature") or 256 ("small")."""
    activation: str = "tanh"
    shared: bool = False
    """True lets policy and value share the mlp's hidden layers."""
    cnn: str = "nature"
    lstm_size: int = 128
    squash: bool = False
    """Box actions: True maps a Gaussian through tanh into the bounds, False clips it at the bounds."""
    normalize_observations: bool = False
    normalize_rewards: bool = False
    clip_rewards: float = 0.0
    """Rewards are clipped to ±this for learning (never for reporting); 0 turns it off."""
    mode: str = "synchronous"
    workers: int = 1
    push_every: int = 1
    """Updates that a worker makes between a pull and a push."""
    push_scale: float = 1.0
    """The store adds this times a worker's difference."""
    max_staleness: int = 0
    """Pushes that are staler than this are scaled by max_staleness/staleness; 0 turns it off."""
    correction: str = "none"
    """"vtrace" corrects for acting with older parameters than learning."""
    rho_bar: float = 1.0
    c_bar: float = 1.0
    overlap: bool = False
    """Act on the next rollout while learning from the last, one update behind."""
    precision: str = "float32"
    compiled: bool | str = False
    """How the torch learner's update runs: False one operation at a time, "graph" as one CUDA graph, True fused by
    torch.compile first (and on CUDA captured then)."""
    max_restarts: int = 5
    """Restarts of workers, all together, before the run gives up."""
    hang_s: float = 60.0
    """A worker that shows no step for this long is restarted."""
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, options in _NAMES.items():
            if getattr(self, name) not in options:
                raise unknown(name, getattr(self, name), options)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
                raise OptionError(f"{name}={value!r} is outside {low:g} to {high:g}")
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise OptionError(f"{name}={value!r} must be a whole number")
        if self.compiled not in (False, True, "graph"):
            raise unknown("compiled", str(self.compiled), ("auto", "graph", "True", "False"))
        if self.compiled == "graph" and not self.device.startswith("cuda"):
            raise OptionError(
                f'compiled="graph" needs a CUDA device, and device is {self.device!r}; leave "auto"'
            )
        if not self.hidden and self.policy == "mlp":
            raise OptionError(
                "hidden=() leaves no layer; give at least one width, for example hidden=(64, 64)"
            )
        if any(not isinstance(width, int) or width < 1 for width in self.hidden):
            raise OptionError(f"hidden={self.hidden!r} must be whole numbers of at least 1")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("option", name, known)
        if "hidden" in values:
            values = {**values, "hidden": tuple(values["hidden"])}
        return cls(**values)


_NAMES = {
    "policy": (*POLICIES, "module"),
    "optimizer": (*OPTIMIZERS, "own"),
    "schedule": SCHEDULES,
    "mode": MODES,
    "correction": CORRECTIONS,
    "precision": PRECISIONS,
    "activation": ("tanh", "relu"),
    "cnn": ("nature", "small"),
}
_COUNTS = ("n_envs", "n_steps", "workers", "push_every", "lstm_size", "max_staleness", "max_restarts", "seed")
_RANGES = {
    "n_envs": (1, 65536),
    "n_steps": (1, 65536),
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "value_coef": (0.0, 1e6),
    "entropy_coef": (0.0, 1e6),
    "lr": (0.0, 1e3),
    "max_grad_norm": (0.0, 1e9),
    "clip_rewards": (0.0, 1e9),
    "workers": (1, 1024),
    "push_every": (1, 65536),
    "push_scale": (0.0, 1.0),
    "max_staleness": (0, 1 << 30),
    "rho_bar": (0.0, 1e6),
    "c_bar": (0.0, 1e6),
    "lstm_size": (1, 65536),
    "max_restarts": (0, 1 << 20),
    "hang_s": (0.1, 1e6),
    "seed": (0, 1 << 62),
}


def scheduled(schedule: str, lr: float, progress: float) -> float:
    """The learning rate after the share ``progress`` (0 to 1) of the run.

    It stays above a thousandth of ``lr``, so that the last updates are not exact zeros.
    """
    progress = min(max(progress, 0.0), 1.0)
    if schedule == "linear":
        return lr * max(1.0 - progress, 1e-3)
    if schedule == "cosine":
        return lr * max(0.5 * (1.0 + math.cos(math.pi * progress)), 1e-3)
    return lr
