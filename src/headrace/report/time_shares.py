"""Where the time went: sums over a timeline's spans. Pure functions on plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.report.curves import Curve, Floats
from headrace.report.timeline import Span, Timeline

INTERVALS = 60
"""Of the plot of waiting over time."""


def lane_shares(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Lane → what it did → share of the run's time, greatest first. Spans inside spans count twice."""
    length_s = extent_s(timeline)
    shares: dict[str, dict[str, float]] = {}
    for span in timeline.spans:
        lane = shares.setdefault(span.lane, {})
        lane[span.name] = lane.get(span.name, 0.0) + (span.end_s - span.start_s) / length_s
    return {lane: dict(sorted(parts.items(), key=lambda part: -part[1])) for lane, parts in shares.items()}


def extent_s(timeline: Timeline) -> float:
    """From the first span's start to the last one's end; never 0, so that it can divide."""
    if not timeline.spans:
        return 1.0
    start_s = min(span.start_s for span in timeline.spans)
    return max(max(span.end_s for span in timeline.spans) - start_s, 1e-9)


def waiting_over_time(spans: Sequence[Span], lane: str) -> Curve:
    """The share of each of `INTERVALS` equal intervals that the lane spent in spans named wait-something."""
    start_s = min(span.start_s for span in spans)
    width_s = max((max(span.end_s for span in spans) - start_s) / INTERVALS, 1e-12)
    waited: Floats = np.zeros(INTERVALS, dtype=np.float64)
    for span in spans:
        if span.lane == lane and is_wait(span):
            first = min(INTERVALS - 1, math.floor((span.start_s - start_s) / width_s))
            last = min(INTERVALS - 1, math.floor((span.end_s - start_s) / width_s))
            for i in range(first, last + 1):
                begin_s, end_s = start_s + i * width_s, start_s + (i + 1) * width_s
                waited[i] += max(0.0, min(span.end_s, end_s) - max(span.start_s, begin_s))
    middles: Floats = start_s + (np.arange(INTERVALS, dtype=np.float64) + 0.5) * width_s
    return Curve(middles, waited / width_s)


def is_wait(span: Span) -> bool:
    return span.name.startswith("wait")
