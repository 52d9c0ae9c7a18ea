"""Where the examples stay while training: on the device, in memory, or in buffers that pass through. Pure.

Invariant: what is planned fits. A share of what is free is left to the model, the system and other programs;
the shares are guesses that have served well, not measurements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace.errors import OptionError, unknown
from headrace.types import Plan

DEVICE_SHARE = 0.5
"""Of the free device memory, for data that stays there; the rest is the model's."""
MEMORY_SHARE = 0.6
"""Of the free host memory, for data that stays there; beyond it the page cache thrashes."""
BUFFER_SHARE = 0.125
"""Of the free memory, for each of the two buffers."""
MAX_BUFFER_BYTES = 2 << 30
"""Larger buffers mix no better in practice and make the first batch wait."""
MIN_BUFFER_BYTES = 1 << 20

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

Residence = Literal["device", "memory", "buffered"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be placed, and the room there is."""

    rows: int
    bytes_per_row: float
    in_memory: bool
    """The columns lie in memory already."""
    mapped: bool = False
    """The columns are memory maps of files, read through the page cache."""
    fresh: bool = False
    """Every read makes the examples anew, and may augment them, so nothing may be kept."""
    device: str = "cpu"
    """Kind of device that trains."""
    memory_free: int
    device_free: int = 0

    @property
    def bytes(self) -> int:
        return int(self.rows * self.bytes_per_row)


def place(work: Workload, buffer: str | int = "auto") -> Plan:
    """Decide the residence and the bytes of one buffer; ``buffer`` is what the user asked for."""
    kind, wanted = parse_buffer(buffer)
    if kind != "auto":
        asked = f"asked for with buffer={buffer!r}"
        residence, reason = possible(work, kind, asked), asked
    else:
        residence, reason = choose_residence(work)
    plan = Plan().with_("residence", residence, reason)
    if residence != "buffered":
        return plan
    return plan.with_("buffer_bytes", *buffer_bytes(work, wanted))


def choose_residence(work: Workload) -> tuple[Residence, str]:
    """The fastest residence that fits, and why."""
    size = show(work.bytes)
    if work.fresh:
        return (
            "buffered",
            "the dataset makes its examples anew, in case it augments; buffer='memory' keeps them",
        )
    if work.device != "cpu" and work.bytes <= DEVICE_SHARE * work.device_free:
        return "device", f"{size} of data fit in {show(work.device_free)} of free device memory: loaded once"
    if work.device != "cpu":
        return "buffered", f"{size} of data exceed half of the {show(work.device_free)} free on the device"
    if work.in_memory and not work.mapped:
        return "memory", f"{size} of data lie in memory already and are used where they lie"
    if work.bytes <= MEMORY_SHARE * work.memory_free:
        return "memory", f"{size} of data fit in {show(work.memory_free)} of free memory"
    return "buffered", f"{size} of data exceed 60 % of the {show(work.memory_free)} of free memory"


def possible(work: Workload, kind: Residence, asked: str) -> Residence:
    """The residence asked for, or the error that says why it cannot be."""
    if kind == "device" and work.device == "cpu":
        return "memory"
    if kind == "memory" and work.device != "cpu":
        return "device" if work.bytes <= DEVICE_SHARE * work.device_free else "buffered"
    if kind == "device" and work.bytes > work.device_free:
        raise OptionError(
            f"{asked}: {show(work.bytes)} of data do not fit in {show(work.device_free)} of free device "
            f"memory; "
            'leave buffer="auto"'
        )
    return kind


def buffer_bytes(work: Workload, wanted: int | None) -> tuple[int, str]:
    """How large one buffer is, and why."""
    if wanted is not None:
        if wanted < work.bytes_per_row:
            raise OptionError(f"buffer={wanted} bytes hold no row: one row has {work.bytes_per_row:g} bytes")
        return wanted, "as asked"
    free = work.memory_free if work.device == "cpu" else min(work.memory_free, work.device_free)
    room = int(BUFFER_SHARE * free)
    size = max(MIN_BUFFER_BYTES, min(room, MAX_BUFFER_BYTES), int(work.bytes_per_row))
    return size, f"an eighth of the {show(free)} free, at most {show(MAX_BUFFER_BYTES)}; two buffers are kept"


def parse_buffer(buffer: str | int) -> tuple[Residence | Literal["auto"], int | None]:
    """What the user asked for: a residence, or a size that implies buffering."""
    if isinstance(buffer, str):
        word = buffer.lower()
        if word == "auto":
            return "auto", None
        if word == "device":
            return "device", None
        if word == "memory":
            return "memory", None
        if word == "buffered":
            return "buffered", None
        return "buffered", parse_bytes(buffer)
    if buffer < 1:
        raise OptionError(f"buffer={buffer} bytes hold no row; give a size such as '2GiB', or 'auto'")
    return "buffered", int(buffer)


def parse_bytes(text: str) -> int:
    """``"2GiB"``, ``"500 MB"`` or a plain number as bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match.group(2) not in UNITS:
        raise unknown("buffer", text, ("auto", "device", "memory", "buffered", "2GiB", "500MB"))
    return int(float(match.group(1)) * UNITS[match.group(2)])


def show(size: float) -> str:
    """A number of bytes for a reader."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
