"""What can be asked of a run over several workers, checked when it is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headrace.engine.hogbatch.adaptive import SCALINGS
from headrace.engine.hogbatch.coordinator import WorkerPlan
from headrace.engine.hogbatch.steppers import OptimiserSpec
from headrace.errors import DeviceError, OptionError, unknown

ALGORITHMS = ("hogwild", "minibatch", "hogbatch", "adaptive")


@dataclass(frozen=True, kw_only=True)
class HogbatchOptions:
    """One run: which workers, how they share work, and when it ends."""

    cpu: int = 1
    """CPU workers."""
    cuda: int = 0
    """CUDA workers, spread over the devices; more than one per device share it by streams."""
    standin: int = 0
    """Workers that take the CUDA worker's path on a CPU core: for tests, and for studies without a GPU."""
    standin_slowdown: float = 1.0
    """A stand-in rests so that each of its steps takes this many times as long."""
    algorithm: str = "hogbatch"
    """`hogwild` (CPU workers only), `minibatch` (device workers only), `hogbatch`, or `adaptive`."""
    batch_size: int = 64
    """A CPU worker's batch; the reference for step sizes; where `adaptive` starts CPU workers."""
    device_batch_size: int = 512
    """A device worker's batch; where `adaptive` starts device workers."""
    cpu_limits: tuple[int, int] = (1, 1024)
    """Smallest and largest batch of a CPU worker under `adaptive`."""
    device_limits: tuple[int, int] = (16, 8192)
    """Smallest and largest batch of a device worker under `adaptive`."""
    alpha: float = 2.0
    """How far `adaptive` may change a batch at once."""
    scaling: str = "sqrt"
    """How a step size follows its batch's ratio to ``batch_size``: `linear`, `sqrt` or `off`."""
    optimiser: OptimiserSpec = field(default_factory=OptimiserSpec)
    schedule: Callable[[int], float] | None = None
    """Epoch → factor of the step size."""
    processes: bool | str = "auto"
    """CPU workers as processes; `auto`: threads for chains, whose steps release the interpreter lock."""
    merge_every: int | str = "auto"
    """Local steps of a CPU worker between merges; 1 updates the shared parameters directly; `auto`: 16 for
    four or more workers with batches below 32, else 1."""
    compiled: bool | str = "auto"
    """CPU workers run whole grants in compiled code where the model allows it; `auto`: with several workers. One
    worker then equals the sequential engine bit for bit, which does not compile either."""
    device_local_steps: int = 8
    """Local steps of a device worker between merges."""
    staleness_bound: int | None = None
    """A replica is merged early when others have made this many updates since it was pulled."""
    pin: bool | str = "auto"
    """Keep each CPU worker on a core of its own; `auto`: when a core is left for the coordinator."""
    epochs: int = 1
    updates: int | None = None
    """End after this many updates of all workers together, counting those before a resume."""
    seconds: float | None = None
    """End after this much training time, not counting what came before a resume."""
    seed: int = 0
    hang_s: float = 60.0
    """A worker that makes no update for so long is replaced; it must exceed one step's time by far."""
    start_s: float = 120.0
    """How long a process may take to start and import torch."""
    grant_s: float = 0.05
    restarts: int = 3

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)
        if self.scaling not in SCALINGS:
            raise unknown("scaling", self.scaling, SCALINGS)
        self._check_numbers()
        for name in ("cpu", "cuda", "standin"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)}: a number of workers cannot be negative")
        if self.devices and self.algorithm == "hogwild":
            raise OptionError("hogwild runs CPU workers only; use algorithm='hogbatch' to add a device")
        if self.cpu and self.algorithm == "minibatch":
            raise OptionError("minibatch runs device workers only; use algorithm='hogbatch', or cpu=0")
        if not self.cpu + self.devices:
            raise OptionError("no worker was asked for; use cpu=2, or cuda=1")
        for name in ("batch_size", "device_batch_size", "epochs", "device_local_steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: it must be at least 1")
        for name in ("cpu_limits", "device_limits"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise OptionError(f"{name}={low, high}: needs 1 ≤ smallest ≤ largest")
        if self.staleness_bound is not None and self.staleness_bound < 1:
            raise OptionError(
                f"staleness_bound={self.staleness_bound}: use None, or a number of updates from 1 on"
            )
        if self.merge_every != "auto" and (isinstance(self.merge_every, str) or self.merge_every < 1):
            raise OptionError(f"merge_every={self.merge_every!r}: use 'auto' or a number of steps from 1 on")
        if not self.alpha > 1:
            raise OptionError(f"alpha={self.alpha}: a batch changes by a factor above 1; the paper uses 2")

    def _check_numbers(self) -> None:
        """Types first: what a dict or a command line holds may be anything."""
        whole = [
            "cpu",
            "cuda",
            "standin",
            "batch_size",
            "device_batch_size",
            "device_local_steps",
            "restarts",
        ]
        whole += [name for name in ("staleness_bound", "updates") if getattr(self, name) is not None]
        whole += [] if self.merge_every == "auto" else ["merge_every"]
        for name in whole:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise OptionError(f"{name}={value!r}: a whole number is needed")
        for name in ("alpha", "hang_s", "start_s", "grant_s", "standin_slowdown"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise OptionError(f"{name}={value!r}: a number above 0 is needed")
        for name in ("cpu_limits", "device_limits"):
            value = getattr(self, name)
            pair = isinstance(value, tuple | list) and len(value) == 2
            if not pair or not all(isinstance(v, int) for v in value):
                raise OptionError(
                    f"{name}={value!r}: a smallest and a largest batch are needed, such as (8, 512)"
                )

    @property
    def devices(self) -> int:
        return self.cuda + self.standin

    @property
    def workers(self) -> int:
        return self.cpu + self.devices

    def plans(self, rows: int) -> list[WorkerPlan]:
        """The workers as the coordinator sees them; batches above the data are an error."""
        adaptive = self.algorithm == "adaptive"
        plans = []
        for kind, count in (("cpu", self.cpu), ("cuda", self.cuda), ("standin", self.standin)):
            batch = self.batch_size if kind == "cpu" else self.device_batch_size
            low, high = self.cpu_limits if kind == "cpu" else self.device_limits
            if not adaptive:
                low = high = batch
            if count and min(low, batch) > rows:
                raise OptionError(
                    f"the batch of the {kind} worker is {batch} (from {low} to {high}) and the data has "
                    f"{rows} rows; choose batches of at most {rows}"
                )
            batch = min(max(batch, low), high)
            plans += [
                WorkerPlan(name=f"{kind}{n}", batch=batch, low=low, high=high, powers_of_two=kind == "cuda")
                for n in range(count)
            ]
        return plans


def check_machine(options: HogbatchOptions) -> list[str]:
    """Sentences about this machine and the workers asked for; an error for devices that are not there."""
    notes = []
    if options.cuda:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(
                f"cuda={options.cuda} was asked for and torch finds no CUDA device; use cpu workers, e.g. "
                f"algorithm='hogwild', cpu={cores()}"
            )
    if options.workers > cores():
        notes.append(
            f"{options.workers} workers share {cores()} cores: they take turns, and updates get staler"
        )
    return notes


def check_module(module: nn.Module, options: HogbatchOptions) -> list[str]:
    """Sentences about parts of a module that several unsynchronised workers do not serve well."""
    if options.workers < 2:
        return []
    normed = [
        name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]
    if not normed:
        return []
    return [
        f"{normed[0]} is a BatchNorm: each worker normalises by its own batch, and the running statistics "
        "mix all of them; GroupNorm or LayerNorm do not depend on the batch, or use one worker"
    ]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_for(options: HogbatchOptions, number: int) -> frozenset[int] | None:
    """Which cores worker ``number`` is kept on, if any: a CPU worker on one, device workers on what is left.

    A device's feeding thread and the thread that merges for it need a core each now and then; on one core they
    would wait for each other, on a CPU worker's for its steps.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    wanted = options.workers < len(allowed) if options.pin == "auto" else bool(options.pin)
    if not wanted or not allowed:
        return None
    # From the highest core down: the coordinator and the system's interrupts prefer the lowest.
    if number < options.cpu:
        return frozenset({allowed[-1 - number % len(allowed)]})
    return frozenset(allowed[: len(allowed) - options.cpu]) or None


def describe(options: HogbatchOptions) -> dict[str, Any]:
    """The choices as plain data, for a plan or a page."""
    return {
        "algorithm": options.algorithm,
        "cpu": options.cpu,
        "cuda": options.cuda,
        "standin": options.standin,
        "batch_size": options.batch_size,
        "device_batch_size": options.device_batch_size if options.devices else None,
        "merge_every": options.merge_every,
        "scaling": options.scaling,
    }
