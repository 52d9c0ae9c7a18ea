"""Batches of any source, on the device, for anyone's loop; and the buffers from which they are gathered.

``for x, y in loader`` is written over `Loader.buffers`, the contract with the training engine: each `Buffer`
is a set of columns on the device and an order over them. Whoever takes buffers cuts them with
`Loader.bounds` and calls `Loader.consumed` after using positions, so that `Loader.state_dict` is exact in
the middle of an epoch.

Invariant: the position (pass, buffer, round, cursor) moves before a batch is handed out, so a state taken
while the caller works on a batch counts that batch as used. Only one iteration of a loader is alive;
starting another ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.buffer.passes import PassShape
from headrace.engine.feed import Feed, FeedStatistics, Filled, ResidentFeed
from headrace.engine.placement import place
from headrace.engine.residence import gather, left_out_of, resolve_device, workload
from headrace.engine.wiring import LoaderOptions, make_feed, resume_feed
from headrace.errors import DataError, OptionError, WorkerError, unknown
from headrace.order.balanced import BalancedOrder
from headrace.order.basic import SequentialOrder, ShuffledOrder, mixed_seed, permutation
from headrace.source import open_source
from headrace.types import Buffer, Column, Columns, Order, Plan, Source, State

ORDERS = ("shuffled", "sequential", "balanced")
STATE_VERSION = 1

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Position:
    """How far the loader is: everything before it has been used."""

    pass_index: int = 0
    buffer: int = 0
    round: int = 0
    cursor: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the pass has been used."""
        return self.buffer == self.round == self.cursor == 0


class Loader:
    """An iterable of batches, each a tuple of tensors on the device in the order of ``columns``."""

    def __init__(
        self,
        source: Any,
        batch_size: int = 64,
        order: str | Order = "shuffled",
        buffer: str | int = "auto",
        rounds: int | Literal["auto"] = 1,
        device: str | torch.device = "auto",
        seed: int = 0,
        *,
        drop_last: bool = False,
        transform: Transform | Mapping[str, Transform] | None = None,
        rank: int = 0,
        world_size: int = 1,
        block: int | Literal["auto"] = "auto",
        direct: bool | Literal["auto"] = "auto",
        threads: int = 8,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        """
        ``source`` is a source or anything `open_source` opens. ``transform`` is applied to the first column
        of every batch, on the device; a mapping gives one for each column it names.
        """
        self.options = LoaderOptions(
            batch_size=batch_size, rounds=rounds, block=block, seed=seed, drop_last=drop_last, rank=rank,
            world_size=world_size, direct=direct, threads=threads, on_error=on_error,
        )  # fmt: skip
        self.source: Source = open_source(source, on_error=on_error)
        self.device = resolve_device(device)
        self.order = make_order(order, len(self.source), seed, self.device)
        self.transforms = self._check_transforms(transform)
        self.plan: Plan = place(workload(self.source, self.device), buffer)
        self._feed: Feed = make_feed(self.source, self.device, self.plan, self.options, self.order)
        self.plan = self._feed.plan
        self._tell_left_out()
        self._at = Position()
        self._continue = False
        self._permutation: Tensor | None = None
        self._alive = 0
        self.waited_s = 0.0
        """Seconds that the consumer waited for buffers; near zero is good, near the run's time means a slow
        disk."""

    def _tell_left_out(self) -> None:
        """What was missing when the source was opened stands with what cannot be read later."""
        for d in left_out_of(self.source):
            self.plan = self.plan.with_(d.name, d.value, d.reason)
            self._feed.statistics.failures.append(d.reason)

    # ------------------------------------------------------------------ what it is

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a batch: inputs first, the target last."""
        return self.source.columns

    @property
    def batch_size(self) -> int:
        return self.options.batch_size

    @property
    def shape(self) -> PassShape:
        """How a pass is cut into buffers and batches."""
        return self._feed.shape

    @property
    def epoch(self) -> int:
        """The pass that is under way, or comes next."""
        return self._at.pass_index

    def __len__(self) -> int:
        """Batches in an epoch, on this rank, with the rounds as they are now."""
        return sum(self.shape.steps()) * self._feed.reuse.current

    def __repr__(self) -> str:
        return (
            f"Loader({self.source!r}, batch_size={self.batch_size}, {self.plan['residence']} on "
            f"{self.device})"
        )

    # ------------------------------------------------------------------ what it did

    @property
    def rounds_history(self) -> list[dict[str, Any]]:
        """Every change of the rounds: pass, buffer, rounds and why."""
        return self._feed.reuse.history

    def reuse_values(self) -> dict[str, int]:
        """The rounds of the buffer in use, for a row of metrics; nothing where all rows stay."""
        return {} if isinstance(self._feed, ResidentFeed) else {"rounds": self._feed.reuse.current}

    @property
    def statistics(self) -> FeedStatistics:
        """What reading cost, and what was skipped."""
        return self._feed.statistics

    def set_step_size(self, step_size: float) -> None:
        """Tell the optimiser's step size, so that ``rounds="auto"`` reuses less as it falls."""
        self._feed.reuse.set_step_size(step_size)

    def close(self) -> None:
        """End the readers and give their memory back; iterating again starts them anew."""
        self._alive += 1
        self._feed.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for buffer in self.buffers():
            for start, stop in self.bounds(buffer):
                batch = self.batch(buffer, start, stop)
                self.consumed(stop - start)
                if isinstance(self.order, BalancedOrder):
                    positions = buffer.order[start:stop]
                    self.order.begin_batch(positions if buffer.row_ids is None else buffer.row_ids[positions])
                yield tuple(batch.values())

    def batch(self, buffer: Buffer, start: int, stop: int) -> Columns:
        """The rows at positions ``start`` to ``stop`` of the buffer's order, transformed."""
        positions = buffer.order[start:stop]
        gathered = gather(buffer.columns, positions)
        try:
            return self.transform(gathered)
        except Exception as error:
            rows = positions if buffer.row_ids is None else buffer.row_ids[positions]
            raise WorkerError(
                f"a transform failed on the batch of rows {shown(rows)} of {origin_of(self.source)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def bounds(self, buffer: Buffer) -> list[tuple[int, int]]:
        """The batches that are left of a buffer, as ranges of positions in its order."""
        count = len(buffer.order)
        bounds = ((start, min(stop, count)) for start, stop in self.shape.bounds(buffer.index))
        return [(start, stop) for start, stop in bounds if start >= buffer.cursor and start < count]

    def transform(self, batch: Columns) -> Columns:
        """The batch after the transforms; whoever gathers rows without `batch` calls this."""
        for name, function in self.transforms.items():
            batch[name] = function(batch[name])
        return batch

    def buffers(self) -> Generator[Buffer]:
        """The rest of the current pass as buffers on the device, each valid until the next is asked for.

        Asking for the next buffer says that the last one was used up; `consumed` says how far it was before
        that.
        """
        self._begin()
        alive, start = self._alive, self._at
        with contextlib.closing(self._feed.open(start.pass_index, start.buffer)) as filled_buffers:
            asked_s = time.perf_counter()
            for filled in filled_buffers:
                wait_s = time.perf_counter() - asked_s
                self.waited_s += wait_s
                for buffer in self._rounds_of(filled, wait_s):
                    yield buffer
                    if alive != self._alive:
                        raise OptionError("this loader was iterated anew before the old iteration ended")
                self._at = Position(self._at.pass_index, filled.index + 1)
                asked_s = time.perf_counter()
        self._at = Position(self._at.pass_index + 1)
        self._permutation = None

    def _rounds_of(self, filled: Filled, wait_s: float) -> Iterator[Buffer]:
        """One buffer, once for each of the rounds that are left."""
        reuse, under_way = self._feed.reuse, self._at.round > 0 or self._at.cursor > 0
        rounds = reuse.current if under_way else reuse.choose(self._at.pass_index, filled.index)
        for k in range(self._at.round, rounds):
            reuse.round_begins()
            yield Buffer(
                columns=filled.columns,
                order=self._local_order(filled, k),
                row_ids=filled.row_ids,
                cursor=self._at.cursor,
                index=filled.index,
                round=k,
                rounds=rounds,
                pass_index=self._at.pass_index,
                wait_s=wait_s,
            )
            wait_s = 0.0
            reuse.round_ends()
            self._at = Position(self._at.pass_index, filled.index, k + 1)

    def consumed(self, positions: int) -> None:
        """Count so many more positions of the current buffer's order as used."""
        self._at = dataclasses.replace(self._at, cursor=self._at.cursor + positions)

    def set_epoch(self, epoch: int) -> None:
        """Start the given epoch next. After `load_state_dict`, naming the saved epoch goes on within it."""
        if self._continue and epoch == self._at.pass_index:
            return
        self._at = Position(epoch)
        self._continue = True
        self._permutation = None

    def _begin(self) -> None:
        """Settle where the next iteration starts: where a state says, else at the beginning of a pass."""
        self._alive += 1
        if not self._continue and not self._at.is_fresh:
            self._at = Position(self._at.pass_index + 1)
            self._permutation = None
        self._continue = False

    # ------------------------------------------------------------------ the order within a buffer

    def _local_order(self, filled: Filled, round_index: int) -> Tensor:
        """In which order the rows of a filled buffer are used in this round."""
        order = self._whole_order(filled, round_index)
        if not filled.bad:
            return order
        good = torch.ones(filled.rows, dtype=torch.bool, device=self.device)
        for first, last in filled.bad:
            good[first:last] = False
        return order[good[order]]

    def _whole_order(self, filled: Filled, round_index: int) -> Tensor:
        """The order before rows that could not be read are left out."""
        count, at = filled.rows, self._at.pass_index
        if isinstance(self.order, SequentialOrder):
            return self._share(torch.arange(count, device=self.device), filled)
        if isinstance(self.order, ShuffledOrder):
            whole = filled.index == 0 and round_index == 0 and filled.row_ids is None
            seed = self.order.seed if whole else mixed_seed(self.order.seed, filled.index, round_index)
            return self._share(permutation(count, seed, at, self.device), filled)
        return self._share(self._learned_order(filled, round_index), filled)

    def _learned_order(self, filled: Filled, round_index: int) -> Tensor:
        """The rows of this buffer in the order in which they stand in the learned order of all rows."""
        if self._permutation is None or (round_index > 0 and self._at.cursor == 0 and filled.row_ids is None):
            self._permutation = torch.cat(list(self.order.epoch())).to(self.device)
        if filled.row_ids is None:
            return self._permutation
        places = torch.empty_like(self._permutation)
        places[self._permutation] = torch.arange(len(places), device=self.device)
        return torch.argsort(places[filled.row_ids])

    def _share(self, order: Tensor, filled: Filled) -> Tensor:
        """This rank's part of an order over all rows; a buffer that was read for this rank is all its own."""
        if filled.row_ids is not None:
            return order
        start, stop = self.shape.part
        return order[start:stop]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> State:
        """Where the loader is, down to the batch. Tensors and plain values only."""
        pure = isinstance(self.order, (ShuffledOrder, SequentialOrder))
        return {
            "version": STATE_VERSION,
            "position": dataclasses.asdict(self._at),
            "shape": dataclasses.asdict(self.shape),
            "residence": "resident" if isinstance(self._feed, ResidentFeed) else "buffered",
            "reuse": self._feed.reuse.state_dict(),
            "order": self.order.state_dict(),
            "permutation": None if pure or self._permutation is None else self._permutation.cpu(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state`` was taken, bit for bit, even if the plan would now be another."""
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"the loader's state has version {state.get('version')!r}, this one reads {STATE_VERSION}"
            )
        saved = state["shape"]
        for name, mine in (("rows", len(self.source)), ("batch_size", self.batch_size),
                           ("rank", self.options.rank), ("world_size", self.options.world_size)):  # fmt: skip
            if saved[name] != mine:
                raise DataError(
                    f"the state was saved with {name}={saved[name]}, this loader has {mine}; resume with "
                    f"the same"
                )
        self.order.load_state_dict(state["order"])
        self._feed = resume_feed(self._feed, self.device, state, self.options)
        self.plan = self._feed.plan
        self._tell_left_out()
        self._at = Position(**state["position"])
        self._permutation = None if state["permutation"] is None else state["permutation"].to(self.device)
        self._continue = True

    # ------------------------------------------------------------------ checks

    def _check_transforms(
        self, transform: Transform | Mapping[str, Transform] | None
    ) -> dict[str, Transform]:
        if transform is None:
            return {}
        names = [column.name for column in self.source.columns]
        if not isinstance(transform, Mapping):
            return {names[0]: transform}
        for name in transform:
            if name not in names:
                raise unknown("column in transform=", name, names)
        return dict(transform)


def shown(rows: Tensor) -> str:
    """Some row numbers for a message."""
    first = ", ".join(str(int(row)) for row in rows[:5])
    return first + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


def origin_of(source: Source) -> str:
    """Where a source's rows came from, in words."""
    return str(getattr(source, "origin", type(source).__name__))


def make_order(order: str | Order, rows: int, seed: int, device: torch.device) -> Order:
    """The order asked for by name, or the one given."""
    if order == "shuffled":
        return ShuffledOrder(rows, seed, device)
    if order == "sequential":
        return SequentialOrder(rows, seed, device)
    if order == "balanced":
        return BalancedOrder(rows, seed=seed, device=device)
    if isinstance(order, str):
        raise unknown("order", order, ORDERS)
    if not isinstance(order, Order):
        raise OptionError(
            f"order={order!r} is neither a name ({', '.join(ORDERS)}) nor an object with epoch(), "
            f"observe() and a state"
        )
    return order
