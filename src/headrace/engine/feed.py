"""What fills the loader's buffers: the whole data at once, or one part of it after another.

A `Feed` gives, for each pass, filled buffers in turn. `ResidentFeed` has one, which never changes.
`BufferedFeed` reads the rows of each buffer when its turn comes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headrace.buffer.passes import PassShape, pass_ranges, row_numbers
from headrace.engine.residence import load, row_bytes
from headrace.order.basic import SequentialOrder
from headrace.types import Columns, Order, Plan, Source, State

if TYPE_CHECKING:
    from headrace.engine.loader import LoaderOptions


@dataclass(frozen=True)
class Filled:
    """Rows on the device, before an order is laid over them."""

    columns: Columns
    rows: int
    index: int
    row_ids: Tensor | None


class Feed(Protocol):
    """Where a loader's rows come from."""

    shape: PassShape
    plan: Plan
    rounds: int
    """The rounds that the next buffer will be used for."""

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        """The buffers of a pass, from the given one on; closing the generator stops all that it started."""
        ...

    def rounds_for(self, buffer: int, *, resumed: bool) -> int:
        """For how many rounds this buffer is used."""
        ...

    def state_dict(self) -> State: ...

    def resumed(self, shape: PassShape, state: State) -> Feed:
        """The feed that goes on as the one that was saved."""
        ...


class ResidentFeed:
    """All rows on the device, or in memory where the device is the CPU."""

    def __init__(
        self, source: Source, device: torch.device, plan: Plan, shape: PassShape, rounds: int
    ) -> None:
        self.source, self.device, self.shape, self.rounds = source, device, shape, rounds
        self.plan = plan.with_("rounds", rounds, "all rows stay, so a round is a pass")
        self._columns: Columns | None = None

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        if self._columns is None:
            self._columns = load(self.source, self.device)
        if first == 0:
            yield Filled(self._columns, self.shape.rows, 0, None)

    def rounds_for(self, buffer: int, *, resumed: bool) -> int:
        return self.rounds

    def state_dict(self) -> State:
        return {"residence": "resident", "rounds": self.rounds}

    def resumed(self, shape: PassShape, state: State) -> Feed:
        if state["residence"] == "resident":
            feed = ResidentFeed(self.source, self.device, self.plan, shape, state["rounds"])
            feed._columns = self._columns
            return feed
        plan = self.plan.with_("residence", "buffered", "the run that is resumed was buffered")
        return BufferedFeed(self.source, self.device, plan, shape, state["rounds"])


class BufferedFeed:
    """One part of the rows after another."""

    def __init__(
        self, source: Source, device: torch.device, plan: Plan, shape: PassShape, rounds: int
    ) -> None:
        self.source, self.device, self.shape, self.rounds = source, device, shape, rounds
        self.plan = plan.with_("rounds", rounds, "as asked")

    def open(self, pass_index: int, first: int) -> Generator[Filled]:
        buffers = pass_ranges(self.shape, pass_index)
        for index in range(first, len(buffers)):
            rows = torch.from_numpy(row_numbers(buffers[index]))
            columns = {name: values.to(self.device) for name, values in self.source.read(rows).items()}
            yield Filled(columns, len(rows), index, rows.to(self.device))

    def rounds_for(self, buffer: int, *, resumed: bool) -> int:
        return self.rounds

    def state_dict(self) -> State:
        return {"residence": "buffered", "rounds": self.rounds}

    def resumed(self, shape: PassShape, state: State) -> Feed:
        if state["residence"] == "resident":
            plan = self.plan.with_("residence", "memory", "the run that is resumed had all rows at hand")
            return ResidentFeed(self.source, self.device, plan, shape, state["rounds"])
        return BufferedFeed(self.source, self.device, self.plan, shape, state["rounds"])


def make_feed(source: Source, device: torch.device, plan: Plan, options: LoaderOptions, order: Order) -> Feed:
    """The feed that the plan asks for."""
    rounds = 1 if isinstance(options.rounds, str) else options.rounds
    shape = PassShape(
        rows=len(source), batch_size=options.batch_size, seed=options.seed, rank=options.rank,
        world_size=options.world_size, drop_last=options.drop_last,
    )  # fmt: skip
    if plan["residence"] != "buffered":
        return ResidentFeed(source, device, plan, shape, rounds)
    per_row = row_bytes(source)
    block, why = choose_block(source, options, order)
    shape = replace(shape, block=block, buffer_rows=max(1, int(plan["buffer_bytes"] // per_row)))
    return BufferedFeed(source, device, plan.with_("block", block, why), shape, rounds)


def choose_block(source: Source, options: LoaderOptions, order: Order) -> tuple[int, str]:
    """Rows in a block, and why."""
    if isinstance(order, SequentialOrder):
        return 0, "rows are taken as they lie"
    if not isinstance(options.block, str):
        return options.block, "as asked"
    if getattr(source, "fresh", False):
        return 1, "the dataset is asked for single rows, so single rows are shuffled"
    return 64, "64 rows and more are read at the disk's full speed, and small blocks mix best"
