"""From rows to curves: which numbers a run recorded, and how to draw long ones. Pure functions on plain data.

A row's coordinates are kind, epoch, step, seconds and examples; every other number is a measurement. A nested
dictionary, or names such as ``batch/cpu0``, give one curve per entry, drawn together; a list of numbers is a histogram.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.report.page import Series

COORDINATES = ("kind", "epoch", "step", "seconds", "examples")
MOST_POINTS = 400
"""A curve of more points is drawn as `SMOOTHED_POINTS` means."""
SMOOTHED_POINTS = 150
"""Few enough that the noise of single steps averages out, many enough for a half-screen plot."""
INVISIBLE = 0.01
"""The height of a band, as a share of the plot's, that nobody would see."""
SPEED_INTERVALS = 120
LOGARITHMIC_FROM = 50.0
"""The ratio of the greatest to the least value above which a linear axis hides the small ones; a guess."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One measurement over the rows that have it; finite values only."""

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


def measurements(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Name → the entries of its nested dictionaries ([""] for a plain number), in order of appearance."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in row.items():
            if key in COORDINATES:
                continue
            if isinstance(value, Mapping):
                entries = [str(entry) for entry, inner in value.items() if _is_number(inner)]
                found.setdefault(key, {}).update(dict.fromkeys(entries))
            elif _is_number(value):
                outer, _, inner = key.partition("/")
                found.setdefault(outer, {})[inner] = None
    return {key: list(entries) for key, entries in found.items() if entries}


def histograms(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Name → its last list of numbers, with nested names as ``outer/inner``."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            nested = value.items() if isinstance(value, Mapping) else [("", value)]
            for entry, inner in nested:
                if isinstance(inner, list) and inner and all(map(_is_number, inner)):
                    found[f"{key}/{entry}" if entry else key] = inner
    return found


def curve(rows: Iterable[Mapping[str, Any]], x_key: str, key: str, entry: str = "") -> Curve:
    """``key`` (or its nested ``entry``) over ``x_key``; rows without either are passed over."""
    pairs = []
    for row in rows:
        value = row.get(key)
        if entry:
            value = value.get(entry) if isinstance(value, Mapping) else row.get(f"{key}/{entry}")
        x = row.get(x_key)
        if _is_number(x) and _is_number(value):
            pairs.append((x, value))
    array = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return Curve(array[:, 0], array[:, 1])


def throughput(rows: Iterable[Mapping[str, Any]]) -> Curve:
    """Examples per second over seconds, in equal intervals of time that hold a row or more on average.

    Counting starts at the first row, so the time before it (starting up, compiling) is left out.
    """
    counted = curve(rows, "seconds", "examples")
    # A resumed run may set its clock or count back; only what moves both on tells about speed.
    ahead = np.maximum.accumulate(counted.x) if len(counted) else counted.x
    forward = np.concatenate([[True], np.diff(ahead) > 0])[: len(counted)]
    seconds, examples = counted.x[forward], np.maximum.accumulate(counted.y[forward])
    if len(seconds) < 2:
        return Curve(np.zeros(0), np.zeros(0))
    edges = np.linspace(seconds[0], seconds[-1], min(SPEED_INTERVALS, len(seconds) - 1) + 1)
    rates = np.diff(np.interp(edges, seconds, examples)) / np.diff(edges)
    return Curve((edges[:-1] + edges[1:]) / 2, rates)


def drawn(name: str, whole: Curve, group: int | None = None) -> Series:
    """Short curves as they are; long ones as means of neighbours, between their least and greatest."""
    if len(whole) <= MOST_POINTS:
        return Series(name, whole.x, whole.y, group=group)
    edges = np.linspace(0, len(whole), SMOOTHED_POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(whole)])
    x, y = (np.add.reduceat(values, edges) / counts for values in (whole.x, whole.y))
    low, high = np.minimum.reduceat(whole.y, edges), np.maximum.reduceat(whole.y, edges)
    if np.all(high - low <= INVISIBLE * np.ptp(whole.y)):
        return Series(name, x, y, group=group)
    return Series(name, x, y, low=low, high=high, group=group)


def wants_log(curves: Sequence[Curve]) -> bool:
    """Whether the values span so much that only a logarithmic axis shows them all."""
    values = np.concatenate([c.y for c in curves]) if curves else np.zeros(0)
    if len(values) == 0 or values.min() <= 0:
        return False
    return bool(values.max() / values.min() >= LOGARITHMIC_FROM)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
