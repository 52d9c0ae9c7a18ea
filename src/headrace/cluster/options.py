"""What ``cluster=`` may be: a number of local workers, an address, or both with everything else in a mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.cluster.compress import Compressor
from headrace.cluster.machine import MasterOptions
from headrace.errors import OptionError, unknown


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A cluster and how it trains."""

    workers: int | Literal["auto"] = "auto"
    """Worker actors, each with a CPU and a shard of its own; "auto" is one for each CPU of the cluster."""
    address: str | None = None
    """None starts workers on this machine; "auto" finds the cluster that this machine belongs to;
    "ray://host:port" or "host:port" names one."""
    cores: int = 1
    """CPUs of each worker, for tasks whose steps are taken by threads without locks."""
    local_steps: int | Literal["auto"] = "auto"
    """B, steps between two pushes; "auto" keeps communication at a tenth of the time."""
    accept: int = 1
    merge: str = "sum"
    decay: float = 0.6
    decay_after: float = 100.0
    staleness: int | None = None
    stale: str = "scale"
    checkpoint_every: int = 100
    compress: Any = None
    """None, "bf16", or the share of entries to send, such as 0.01."""
    restarts: int = 10
    """How often a worker may be lost before the run is given up."""
    connect_s: float = 15.0
    """How long an address may take to answer."""
    shard_bytes: int = 64 << 20
    """Parameters beyond this are spread over several actors of at most so many bytes."""
    gpus: float = 0.0
    """GPUs for each worker. (Written for, and not yet run on, machines that have some.)"""

    def __post_init__(self) -> None:
        if self.workers != "auto" and (not _whole(self.workers) or self.workers < 1):
            raise OptionError(f"cluster workers={self.workers!r}: a whole number of at least 1, or 'auto'")
        if not _whole(self.cores) or self.cores < 1:
            raise OptionError(f"cores={self.cores!r}: each worker needs a whole number of at least 1")
        if self.local_steps != "auto" and (not _whole(self.local_steps) or self.local_steps < 1):
            raise OptionError(f"local_steps={self.local_steps!r}: a whole number of at least 1, or 'auto'")
        if self.address is None and self.workers == "auto":
            raise OptionError("a cluster on this machine needs a number of workers, such as cluster=3")
        Compressor(self.compress)
        self.master(steps=None)

    @classmethod
    def of(cls, value: Any) -> ClusterOptions:
        """From what the user gave as ``cluster=``."""
        if isinstance(value, ClusterOptions):
            return value
        given, known = as_mapping(value), [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise unknown("option in cluster=", name, known)
        return cls(**given)

    def master(self, *, steps: int | None) -> MasterOptions:
        """The master's part."""
        names = {f.name for f in dataclasses.fields(MasterOptions)} & {
            f.name for f in dataclasses.fields(self)
        }
        given = {name: getattr(self, name) for name in names - {"local_steps"}}
        first = FIRST_LOCAL_STEPS if self.local_steps == "auto" else self.local_steps
        return MasterOptions(**given, local_steps=first, steps=steps)


FIRST_LOCAL_STEPS = 16
"""B before anything is measured; a guess."""


def as_mapping(value: Any) -> dict[str, Any]:
    """What the user gave as ``cluster=``, as names of `ClusterOptions` with their values."""
    if isinstance(value, Mapping):
        return dict(value)
    if _whole(value) or str(value).isdigit():
        return {"workers": int(value)}
    if isinstance(value, str) and (value == "auto" or ":" in value):
        return {"address": value}
    raise OptionError(
        f"cluster={value!r}: give a number of workers on this machine, 'auto', an address such as "
        "'ray://host:10001', or a mapping such as {'workers': 3, 'accept': 2}"
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
