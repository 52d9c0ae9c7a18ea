"""The timeline of a run as Chrome trace events, which Perfetto and chrome://tracing open.

The file is a JSON array with one event per line and the comma before each line, so that everything up to any
moment is an array that lacks only its closing bracket, which the format allows to be missing. Times are
microseconds on the run's own clock.

Lanes become threads of one process. After `DETAILED_SPANS` spans, those that start in the same second on the
same lane with the same name become one span of their summed length (``count`` tells how many): a run of a
million steps stays a few megabytes, and the time that each part took stays exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import RunFolderError
from headrace.report.files import encode_row

DETAILED_SPANS = 20_000
"""About 2 MB of JSON: enough to see how the first seconds of a fast run interleave."""
WINDOW_S = 1.0
"""The resolution after that; a day of four lanes with three names is then 1 M events, about 100 MB."""


class Span(NamedTuple):
    lane: str
    name: str
    start_s: float
    end_s: float
    repeats: int = 1


class Counter(NamedTuple):
    name: str
    t_s: float
    value: float


class Instant(NamedTuple):
    name: str
    t_s: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """A timeline as read back."""

    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()
    instants: tuple[Instant, ...] = ()
    lanes: tuple[str, ...] = ()
    """In the order of their thread numbers."""
    note: str | None = None
    """A sentence about an event that was cut off."""

    @property
    def end_s(self) -> float:
        ends = [span.end_s for span in self.spans]
        return max([*ends, *(c.t_s for c in self.counters), *(i.t_s for i in self.instants)], default=0.0)


@dataclass
class TimelineEncoder:
    """Events in, lines out; does no input or output itself."""

    lanes: dict[str, int] = field(default_factory=dict)
    """Lane → thread number, in the order of first use."""
    detailed_left: int = DETAILED_SPANS
    _window: int = -1
    _summed: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(lane, name) → start of the first, summed seconds, count, within the window."""
    _heads: dict[tuple[str, str], str] = field(default_factory=dict)
    """(lane, name) → what all its spans' lines begin with."""

    def encode(self, events: Iterable[Span | Counter | Instant]) -> list[str]:
        lines: list[str] = []
        for event in events:
            if isinstance(event, Span):
                self._add_span(event, lines)
            elif isinstance(event, Counter):
                shown = {"name": event.name, "ph": "C", "ts": _us(event.t_s), "pid": 1}
                lines.append(encode_row({**shown, "args": {"value": event.value}}))
            else:
                shown = {"name": event.name, "ph": "i", "s": "g", "ts": _us(event.t_s), "pid": 1, "tid": 0}
                lines.append(encode_row({**shown, "args": {"text": event.text}}))
        return lines

    def finish(self) -> list[str]:
        """The window that is still open, its sums laid end to end so that a lane's spans never overlap."""
        lines = []
        free_from: dict[str, float] = {}
        for (lane, name), (start_s, total_s, count) in self._summed.items():
            start_s = max(start_s, free_from.get(lane, start_s))
            free_from[lane] = start_s + total_s
            lines.append(self._span_line(Span(lane, name, start_s, start_s + total_s, int(count))))
        self._summed.clear()
        return lines

    def _add_span(self, span: Span, lines: list[str]) -> None:
        if span.lane not in self.lanes:
            self.lanes[span.lane] = len(self.lanes) + 1
            lines.append(_lane_line(span.lane, self.lanes[span.lane]))
        length_s = span.end_s - span.start_s
        if self.detailed_left > 0 or length_s >= WINDOW_S:
            self.detailed_left -= 1
            lines.append(self._span_line(span))
            return
        window = int(span.start_s // WINDOW_S)
        if window != self._window:
            lines += self.finish()
            self._window = window
        summed = self._summed.setdefault((span.lane, span.name), [span.start_s, 0.0, 0.0])
        summed[1] += length_s
        summed[2] += span.repeats

    def _span_line(self, span: Span) -> str:
        # Written by hand, since spans are the one event that can come thousands of times a second.
        lane, name, start_s, end_s, repeats = span
        head = self._heads.get((lane, name))
        if head is None:
            head = f'{{"name":{json.dumps(name)},"ph":"X","pid":1,"tid":{self.lanes[lane]},"ts":'
            self._heads[lane, name] = head
        args = f',"args":{{"count":{repeats}}}' if repeats > 1 else ""
        return f'{head}{start_s * 1e6:.1f},"dur":{(end_s - start_s) * 1e6:.1f}{args}}}'


def opening() -> str:
    """How the file begins: with an event, so that every later one can bring its own comma."""
    event = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "headrace"}}
    return f"[\n{json.dumps(event)}\n"


def joined(lines: Iterable[str]) -> str:
    """Encoded events as they follow the opening or one another."""
    return "".join(f",{line}\n" for line in lines)


CLOSING = "]\n"


def reopen(path: Path) -> Timeline:
    """Make a file ready for more events: without its closing bracket or an event that was cut off."""
    timeline = read_timeline(path)
    with path.open("r+b") as file:
        data = file.read()
        whole = len(data) if data.endswith(b"\n") else data.rfind(b"\n") + 1
        file.truncate(whole - len(CLOSING) if data[:whole].endswith(b"\n]\n") else whole)
    return timeline


def read_timeline(path: Path) -> Timeline:
    """The events of a file that was closed, left open, or cut off by a kill."""
    if not path.exists():
        return Timeline()
    events, note = read_events(path)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return Timeline(
        spans=tuple(_span(e, lanes) for e in events if e["ph"] == "X"),
        counters=tuple(
            Counter(e["name"], e["ts"] / 1e6, e["args"]["value"]) for e in events if e["ph"] == "C"
        ),
        instants=tuple(
            Instant(e["name"], e["ts"] / 1e6, e["args"]["text"]) for e in events if e["ph"] == "i"
        ),
        lanes=tuple(lanes[number] for number in sorted(lanes)),
        note=note,
    )


def read_events(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The raw events, and a sentence about a last one that was cut off."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    bodies = [line.removeprefix(",") for line in lines if line not in ("", "[", "]")]
    events = []
    for number, body in enumerate(bodies, start=1):
        try:
            events.append(json.loads(body))
        except ValueError as error:
            if number == len(bodies):
                return events, f"the last event of {path.name} was cut off and is left out"
            raise RunFolderError(
                f"event {number} of {path} cannot be read ({error}); correct or delete that line"
            ) from error
    return events, None


def _span(event: Mapping[str, Any], lanes: Mapping[int, str]) -> Span:
    start_s = event["ts"] / 1e6
    count = event.get("args", {}).get("count", 1)
    return Span(lanes[event["tid"]], event["name"], start_s, start_s + event["dur"] / 1e6, count)


def _lane_line(lane: str, number: int) -> str:
    args = {"name": lane}
    return json.dumps({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": args})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
