"""From rows to curves: which numbers a run recorded, and how to draw long ones. Pure functions on plain data.

A row's coordinates are kind, epoch, step, seconds and examples; every other number is a measurement. A nested
dictionary gives one curve per entry, drawn together; a list of numbers is a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.report.page import Series

COORDINATES = ("kind", "epoch", "step", "seconds", "examples")
MOST_POINTS = 400
"""Of one curve: about one per pixel of half a screen."""
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
                found.setdefault(key, {})[""] = None
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
            value = value.get(entry) if isinstance(value, Mapping) else None
        x = row.get(x_key)
        if _is_number(x) and _is_number(value):
            pairs.append((x, value))
    array = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return Curve(array[:, 0], array[:, 1])


def throughput(rows: Iterable[Mapping[str, Any]]) -> Curve:
    """Examples per second between rows, over seconds; at most `MOST_POINTS` intervals of equal row counts."""
    counted = curve(rows, "seconds", "examples")
    stride = max(1, math.ceil((len(counted) - 1) / MOST_POINTS))
    seconds, examples = counted.x[::stride], counted.y[::stride]
    passed_s, done = np.diff(seconds), np.diff(examples)
    # A resumed run may set its clock back; such an interval tells nothing about speed.
    sane = (passed_s > 0) & (done >= 0)
    return Curve(seconds[1:][sane], done[sane] / passed_s[sane])


def drawn(name: str, whole: Curve) -> Series:
    """Short curves as they are; long ones as means of neighbours, between their least and greatest."""
    if len(whole) <= MOST_POINTS:
        return Series(name, whole.x, whole.y)
    edges = np.linspace(0, len(whole), MOST_POINTS + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(whole)])
    return Series(
        name,
        np.add.reduceat(whole.x, edges) / counts,
        np.add.reduceat(whole.y, edges) / counts,
        low=np.minimum.reduceat(whole.y, edges),
        high=np.maximum.reduceat(whole.y, edges),
    )


def wants_log(curves: Sequence[Curve]) -> bool:
    """Whether the values span so much that only a logarithmic axis shows them all."""
    values = np.concatenate([c.y for c in curves]) if curves else np.zeros(0)
    if len(values) == 0 or values.min() <= 0:
        return False
    return bool(values.max() / values.min() >= LOGARITHMIC_FROM)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
