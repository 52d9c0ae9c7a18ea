"""From a source, a plan and options to the feed that gives a loader its rows; and back to it after a
resume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from headrace.buffer.cook import KEPT_BYTES
from headrace.buffer.passes import PassShape
from headrace.buffer.pipeline import OnError
from headrace.buffer.reads import JOB_BYTES
from headrace.engine.feed import BufferedFeed, Feed, Reading, ResidentFeed
from headrace.engine.placement import MEMORY_SHARE, show
from headrace.engine.residence import free_memory, row_bytes
from headrace.engine.reuse import Reuse
from headrace.errors import OptionError, unknown
from headrace.order.basic import SequentialOrder
from headrace.types import Order, Plan, Source, Spanned, State

BLOCK_BYTES = 3 << 20
"""Larger blocks read no faster: measured on two quiet cores, blocks of 768 kB, 3 MB and 12 MB came at 3.1, 3.8 and 3.8
GB/s and at 0.33, 0.18 and 0.17 µs of CPU for a row of 3 kB."""
BLOCKS_IN_BUFFER = 256
"""At least so many blocks make up a buffer, however small it is; fewer would mix badly. A guess."""
SECTOR = 512
ORDER_BYTES = 8 * 2 + 8 * 7
"""For each row of a buffer on a device: the row numbers of two slots, two orders, and what drawing one takes."""
ROUNDING_BYTES = 8 << 20
"""torch's allocator leaves up to 1 MB unused behind each large tensor, and there are eight. With 2 GiB buffers an H200
held 2.3 MB more than the sum of their sizes."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What a caller may choose about a loader."""

    batch_size: int
    rounds: int | Literal["auto"] = 1
    """How often each buffer is used before the next; "auto" as often as loading makes it free."""
    block: int | Literal["auto"] = "auto"
    """Neighbouring rows that are read, and shuffled, as one."""
    seed: int = 0
    drop_last: bool = False
    """Leave out the short batch at the end of an epoch."""
    rank: int = 0
    world_size: int = 1
    direct: bool | Literal["auto"] = "auto"
    """Read past the page cache; "auto" does so when the files exceed memory."""
    threads: int = 8
    """Threads that read files; they wait for the disk, so more than cores are well used."""
    on_error: OnError = "raise"
    """"skip" leaves out rows that cannot be read, and counts them."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionError(f"batch_size={self.batch_size}; a batch needs at least one row")
        check_auto("rounds", self.rounds, "every buffer is used at least once")
        check_auto("block", self.block, "a block needs at least one row")
        if self.threads < 1:
            raise OptionError(f"threads={self.threads}; at least one thread must read")
        if self.on_error not in ("raise", "skip"):
            raise unknown("on_error", self.on_error, ("raise", "skip"))
        if self.direct not in (True, False, "auto"):
            raise unknown("direct", self.direct, ("auto", "True", "False"))


def check_auto(name: str, value: Any, why: str) -> None:
    """A positive number, or "auto"."""
    if isinstance(value, str):
        if value != "auto":
            raise unknown(name, value, ("auto", "1", "4", "64"))
    elif value < 1:
        raise OptionError(f"{name}={value}; {why}")


def make_feed(source: Source, device: torch.device, plan: Plan, options: LoaderOptions, order: Order) -> Feed:
    """The feed that the plan asks for."""
    shape = PassShape(
        rows=len(source), batch_size=options.batch_size, seed=options.seed, rank=options.rank,
        world_size=options.world_size, drop_last=options.drop_last,
    )  # fmt: skip
    reuse = Reuse(options.rounds, device, options.world_size)
    if plan["residence"] != "buffered":
        return ResidentFeed(source, device, plan, shape, reuse)
    per_row = stored_row_bytes(source)
    block, why = choose_block(source, per_row, int(plan["buffer_bytes"]), options, order)
    rows = max(1, int(plan["buffer_bytes"] // row_bytes(source)))
    natural = getattr(source, "block_rows", None) is not None
    shape = replace(shape, block=block, buffer_rows=rows, shift=not natural)
    plan = plan.with_("block", block, why)
    plan = plan.with_("buffers", shape.buffers, f"of at most {rows} rows each make up a pass")
    return buffered(source, device, plan, shape, reuse, options)


def buffered(
    source: Source, device: torch.device, plan: Plan, shape: PassShape, reuse: Reuse, options: LoaderOptions
) -> BufferedFeed:
    """A feed that reads part after part."""
    direct, why = choose_direct(source, options)
    plan = plan.with_("direct_io", direct, why)
    plan = declare_memory(plan, source, device, shape, options.threads)
    reading = Reading(threads=options.threads, direct=direct, on_error=options.on_error)
    return BufferedFeed(source, device, plan, shape, reuse, reading)


def declare_memory(plan: Plan, source: Source, device: torch.device, shape: PassShape, threads: int) -> Plan:
    """What the buffers take at most, before anything is reserved; tests measure it."""
    slots = int(2 * shape.largest * row_bytes(source))
    host = slots + 2 * KEPT_BYTES + (threads + 1) * 2 * JOB_BYTES
    plan = plan.with_("host_bytes", host, "two slots, what the readers need, and narrow columns kept whole")
    if device.type == "cpu":
        return plan
    drawn = shape.largest * ORDER_BYTES + min(ROUNDING_BYTES, slots // 256)
    return plan.with_(
        "device_bytes", slots + drawn, "two slots, the numbers of their rows, and orders over them"
    )


def resume_feed(feed: Feed, device: torch.device, saved: State, options: LoaderOptions) -> Feed:
    """The feed that goes on as the one that was saved, even where the plan would now be another."""
    source: Source = feed.source  # type: ignore[attr-defined]
    shape = PassShape(**saved["shape"])
    reuse = Reuse(options.rounds, device, options.world_size)
    reuse.load_state_dict(saved["reuse"])
    feed.close()
    if saved["residence"] == "buffered":
        plan = feed.plan.with_("residence", "buffered", "the run that goes on was buffered")
        return buffered(source, device, plan, shape, reuse, options)
    kept = feed.plan["residence"]
    plan = feed.plan if kept != "buffered" else feed.plan.with_("residence", "memory", "as in the saved run")
    return ResidentFeed(source, device, plan, shape, reuse)


def stored_row_bytes(source: Source) -> float:
    """Bytes of one row as they lie in files."""
    if isinstance(source, Spanned) and not any(column.sparse for column in source.columns):
        return sum(t.dtype.itemsize * math.prod(t.shape[1:]) for t in source.stored().values())
    return row_bytes(source)


def choose_block(
    source: Source, per_row: float, buffer_bytes: int, options: LoaderOptions, order: Order
) -> tuple[int, str]:
    """Rows in a block, and why."""
    if isinstance(order, SequentialOrder):
        return 0, "rows are taken as they lie"
    if not isinstance(options.block, str):
        return options.block, "as asked"
    if getattr(source, "fresh", False):
        return 1, "the dataset is asked for single rows, so single rows are shuffled"
    natural = getattr(source, "block_rows", None)
    if natural is not None:
        return int(natural), "so many rows lie together in the files and are decoded together"
    size = min(BLOCK_BYTES, buffer_bytes // BLOCKS_IN_BUFFER)
    block = max(1, round(size / max(per_row, 1)))
    # Blocks that end on a sector need no copy on their way from the disk.
    step = SECTOR // math.gcd(SECTOR, max(int(per_row), 1))
    if block >= step:
        block -= block % step
    return block, f"about {show(size)}: larger blocks read little faster, smaller ones mix better"


def choose_direct(source: Source, options: LoaderOptions) -> tuple[bool, str]:
    """Whether files are read past the page cache, and why."""
    if not isinstance(options.direct, str):
        return options.direct, "as asked"
    if not isinstance(source, Spanned) or not source.spans():
        return False, "the rows are not ranges of files"
    size = sum(span.rows * span.row_bytes for spans in source.spans().values() for span in spans)
    free = free_memory()
    if size > MEMORY_SHARE * free:
        return (
            True,
            f"{show(size)} of files would push everything else out of the {show(free)} of free memory",
        )
    return False, f"{show(size)} of files may stay in the page cache for the next pass"
