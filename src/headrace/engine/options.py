"""What a run may be told: one frozen record, validated when it is made.

``"auto"`` is resolved once, in `headrace.engine.fit`, and the resolved value is written to the run's plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import OptionError, unknown

CAPTURES = ("auto", "graph", "compile", "chain", "eager")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Everything `headrace.fit` takes besides the model and the data."""

    loss: str | Callable[..., Any] = "auto"
    """A name (cross_entropy, mse, bce, l1, huber, nll), or a callable ``loss(output, target)`` that returns the
    mean over the batch. ``"auto"`` takes cross_entropy for integer targets and mse for floating ones."""
    optimizer: str | Callable[..., Any] = "sgd"
    """A name from torch.optim in lower case, an optimizer class, or a factory ``f(parameters, lr=...)``."""
    lr: float | None = None
    """Step size; the optimizer's usual one when None."""
    momentum: float | None = None
    """Passed to the optimizer when given."""
    weight_decay: float | None = None
    """Passed to the optimizer when given."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer."""
    schedule: str | Callable[[int], float] = "constant"
    """constant, step, cosine, onecycle, plateau, or a callable: step → factor on the step size."""
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as ``gamma`` or ``warmup``."""
    epochs: float | None = None
    """Stop after this many passes over the data."""
    steps: int | None = None
    """Stop after this many updates."""
    seconds: float | None = None
    """Stop after this much wall-clock time, earlier parts of a resumed run included."""
    target_loss: float | None = None
    """Stop when the loss (validation if there is any, else training) is at most this."""
    batch_size: int = 64
    """Examples per forward and backward."""
    accumulate: int = 1
    """Batches per update; the gradient is the mean over all their examples."""
    clip: float | None = None
    """Largest norm of the gradient of one update."""
    precision: str = "fp32"
    """fp32; tf32 for products of float32 on a CUDA device's tensor cores; bf16 for autocast."""
    validation: Any = None
    """Data to validate on: anything `open_source` takes, or a fraction of the rows to hold out."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Name → ``f(output, target)``, or an object with ``update``, ``compute`` and ``reset``."""
    early_stop: int | None = None
    """Stop after this many epochs without a better loss."""
    order: Any = "shuffled"
    """shuffled, sequential, balanced, or an Order."""
    buffer: Any = "auto"
    """Bytes of one buffer for data beyond memory."""
    rounds: Any = 1
    """Rounds on each buffer for data beyond memory."""
    on_error: Any = "raise"
    """``"skip"`` leaves out rows of buffers that cannot be read; they are counted in the plan."""
    transform: Callable[..., Any] | None = None
    """Applied to a batch's inputs on the device."""
    workers: Any = "auto"
    """``"auto"``, ``"single"``, or counts such as ``{"cpu": 2, "cuda": 1, "processes": True}``."""
    cluster: Any = None
    """None, ``"auto"``, a Ray address, or a number of local workers."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    capture: str = "auto"
    """How a step runs: graph, compile, chain, eager, or auto."""
    out: str | Path | None = None
    """Folder of the run; nothing is written when None."""
    resume: bool = False
    """Continue the run in ``out``."""
    overwrite: bool = False
    """Replace an earlier run in ``out``."""
    seed: int = 0
    """Seeds the order, the initial weights of models given by name, and dropout."""
    deterministic: bool = False
    """One worker, fixed kernels, bit-equal losses for equal seeds."""
    log_every: int | None = None
    """Updates between metric rows; a twentieth of an epoch when None."""
    checkpoint_s: float = 30.0
    """Seconds between checkpoints; stretched so that saving stays under 2 % of the time."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder when tensorboard is installed."""
    progress: bool = True
    """Show a progress bar."""
    input: str | None = None
    """Name of the input column of a folder or a table."""
    target: str | None = None
    """Name of the target column."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate"):
            _whole(name, getattr(self, name), at_least=1)
        for name in ("steps", "early_stop", "log_every"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), at_least=1)
        for name in ("epochs", "seconds", "lr", "clip"):
            _positive(name, getattr(self, name))
        _positive("checkpoint_s", self.checkpoint_s, or_zero=True)
        _positive("momentum", self.momentum, or_zero=True)
        _positive("weight_decay", self.weight_decay, or_zero=True)
        if self.capture not in CAPTURES:
            raise unknown("capture", self.capture, CAPTURES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.resume and self.out is None:
            raise OptionError("resume=True needs out=, the folder of the run to continue")
        if self.resume and self.overwrite:
            raise OptionError("resume=True and overwrite=True exclude each other")
        if not isinstance(self.metrics, Mapping):
            raise OptionError("metrics= takes names and functions, such as metrics={'accuracy': f}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise OptionError(f"seed={self.seed!r}: a whole number is needed")
        if not -(2**63) <= self.seed < 2**63:
            raise OptionError(f"seed={self.seed} does not fit 64 bits")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FitOptions:
        """Options from keywords; an unknown keyword is answered with the nearest one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("option", name, known)
        return cls(**values)

    @property
    def stops(self) -> bool:
        """True when at least one stop rule is given."""
        return any(v is not None for v in (self.epochs, self.steps, self.seconds, self.target_loss))

    def to_config(self) -> dict[str, Any]:
        """What a config file can hold: plain values as they are, objects by their description."""
        plain = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in ("resume", "overwrite", "out") or value is None:
                continue
            plain[f.name] = _plain(value)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    return describe_object(value)


def describe_object(value: Any) -> str:
    """A name for an object that a config file cannot hold."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"<{module}.{name}>"


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise OptionError(f"{name}={value!r}: a whole number of at least {at_least} is needed")


def _positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    if value is None:
        return
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value < 0 or (value == 0 and not or_zero):
        raise OptionError(f"{name}={value!r}: a {'non-negative' if or_zero else 'positive'} number is needed")
