"""What the stages share: a handful of Protocols and frozen records, and nothing that runs.

Shape suffixes of tensors that travel: n rows, b batch, d features, c outputs, k sketch.

Who owns what: a `Source` owns its files; a `Buffer`'s columns belong to the loader that published it and
are valid until the next buffer is asked for; a `Plan` and a `Hardware` are plain data that can be saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Columns: TypeAlias = "dict[str, Tensor]"
"""Column name → values with the examples along the first dimension; inputs first, the target last."""

Rows: TypeAlias = "range | Tensor"
"""Which rows to read: a range is read sequentially; an int64 tensor names rows one by one."""

State: TypeAlias = "dict[str, Any]"
"""A component's state: nested dicts and lists of numbers, strings and tensors. Never pickled."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a source."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """The shape of one example; () for a scalar."""
    sparse: bool = False
    """True for a column that is read as a sparse CSR tensor of width ``shape[0]``."""
    role: str = "input"
    """``"input"`` or ``"target"``."""
    classes: tuple[str, ...] = ()
    """The names behind an integer target, where the format knows them."""
    features: tuple[str, ...] = ()
    """The names of the components, where a table's columns were put side by side."""


@runtime_checkable
class Source(Protocol):
    """Where examples live."""

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def __len__(self) -> int: ...

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given rows, in the order given; into ``out`` (dense columns of the same length) when passed."""
        ...


@runtime_checkable
class InMemory(Protocol):
    """A source whose columns already lie in memory, or are memory maps of plain files."""

    def tensors(self) -> Columns:
        """All columns, without a copy where possible."""
        ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows of one column that lie one after another in one file, all of the same size."""

    path: str
    """A local path, or one within ``filesystem``."""
    offset: int
    """Where the first row begins."""
    rows: int
    row_bytes: int
    file_bytes: int
    """The file's size when it was opened; another size later means that somebody writes to it."""
    filesystem: Any = None
    """An fsspec filesystem, or None for this machine's own."""


@runtime_checkable
class Spanned(Protocol):
    """A source of which some columns can be read as ranges of files, without the page cache if need be."""

    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Column name → its spans, in the order of the rows. Columns that have none are read through
        `Source.read`."""
        ...

    def stored(self) -> Columns:
        """The columns as they lie in files or memory, before any change of dtype."""
        ...


@runtime_checkable
class Order(Protocol):
    """Which example comes next."""

    def epoch(self) -> Iterator[Tensor]:
        """The next epoch's permutation of the row numbers, in pieces."""
        ...

    def observe(self, indices: Tensor, evidence: Evidence) -> None:
        """What training told us about those examples."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one step tells about the examples it used. All tensors stay on the device of the step."""

    loss: Tensor
    """The mean loss of the batch; read it only when a value is needed, since reading waits for the device."""
    count: int
    """Examples in the batch."""
    signals_bk: Tensor | None = None
    """One row per example: a gradient or a sketch of it, for orders that learn."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Rows that lie on the device, and the order in which to take them.

    Data that fits on the device is one buffer per epoch. Data beyond memory is a sequence of them.
    """

    columns: Columns
    order: Tensor
    """int64 positions into the columns, on the same device, in the order of use."""
    row_ids: Tensor | None = None
    """Position → row of the source; None when the position is the row."""
    cursor: int = 0
    """How many positions of ``order`` were already used (after a resume)."""
    index: int = 0
    """Which buffer of its pass this is."""
    round: int = 0
    """Which round on this buffer this is, from 0."""
    rounds: int = 1
    """How many rounds this buffer is planned for."""
    pass_index: int = 0
    """Which pass over the source this is."""
    wait_s: float = 0.0
    """How long the consumer waited for this buffer."""


class Task(Protocol):
    """What one step does. A module with a loss, a topic model and an actor-critic are Tasks."""

    def parameters(self) -> dict[str, Tensor]: ...

    def step(self, batch: Columns, state: State) -> Evidence:
        """Update the parameters in place from one batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a machine of a cluster did with the steps it was granted."""

    vector: Tensor
    """All that is shared, after these steps."""
    steps: int
    rows: int
    loss: float
    decay: float = 1.0
    """For steps λ ← (1 − ρ) λ + ρ λ̂: Π (1 − ρ), and an affine map is pushed instead of a difference."""
    place: Any = None
    """Where a later life of the machine goes on."""
    finished: bool = False
    """The machine's share is used up."""


class ParameterStore(Protocol):
    """Parameters that workers pull and push differences to: shared memory, or an actor far away."""

    def pull(self) -> dict[str, Tensor]: ...

    def push(self, difference: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One CUDA device as measured."""

    name: str
    memory_bytes: int
    free_bytes: int
    gemm_fp32_flops: float
    gemm_tf32_flops: float
    gemm_bf16_flops: float
    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    launch_s: float
    """Host time to launch one small kernel."""
    copy_bytes_per_s: float
    """Device memory to device memory, counting bytes read and written."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This machine as measured; rates are per second, sizes in bytes."""

    cores: int
    """Cores this process may use (affinity and cgroup limits respected)."""
    memory_bytes: int
    available_bytes: int
    gemm_core_flops: float
    """fp32 matrix product on one core."""
    gemm_all_flops: float
    """fp32 matrix product on all cores together."""
    memory_copy_bytes_per_s: float
    disk_path: str
    disk_sequential_bytes_per_s: float
    disk_random_reads_per_s: float
    """4 KiB reads at random offsets, one at a time per thread."""
    accelerators: tuple[Accelerator, ...] = ()
    compiler: str | None = None
    """The C++ compiler that torch.compile would use, or None."""
    torch_version: str = ""
    measured_at: str = ""
    """UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        accelerators = tuple(Accelerator(**a) for a in values.get("accelerators", ()))
        return cls(**{**values, "accelerators": accelerators})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice of a plan."""

    name: str
    value: Any
    reason: str
    """Why, in a sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done, and why: an ordered list of decisions."""

    decisions: tuple[Decision, ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        for decision in self.decisions:
            if decision.name == name:
                return decision.value
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(decision.name == name for decision in self.decisions)

    def with_(self, name: str, value: Any, reason: str) -> Plan:
        """A plan in which ``name`` is decided as given, replacing an earlier decision of that name."""
        kept = tuple(d for d in self.decisions if d.name != name)
        return Plan(decisions=(*kept, Decision(name=name, value=value, reason=reason)))

    def to_dict(self) -> dict[str, Any]:
        return {d.name: {"value": d.value, "reason": d.reason} for d in self.decisions}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        return cls(
            decisions=tuple(
                Decision(name=name, value=entry["value"], reason=entry["reason"])
                for name, entry in values.items()
            )
        )

    def __str__(self) -> str:
        return "\n".join(f"{d.name} = {d.value}: {d.reason}" for d in self.decisions)
