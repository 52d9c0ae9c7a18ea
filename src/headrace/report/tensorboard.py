"""The metrics as TensorBoard events, when its package is installed.

Runs in the recorder's thread. Importing and each scalar (60 µs measured) are slow beside a fast step, so the
import happens at the first row, and a run that writes many rows has them thinned: the first `ROWS_FREE` of a
kind are passed on whole, later ones at `ROWS_PER_S`, evenly chosen and always with the last that arrived.
`metrics.jsonl` keeps them all.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROWS_FREE = 300
"""A short run is shown whole; writing so many takes less than 0.1 s."""
ROWS_PER_S = 8.0
"""More than a plot shows; at four scalars a row 0.2 % of a core."""

_COORDINATES = ("kind", "epoch", "step")


def why_not() -> str | None:
    """Why events cannot be written, as a sentence; None when they can."""
    if importlib.util.find_spec("tensorboard") is not None:
        return None
    return "TensorBoard events are not written: tensorboard is not installed (pip install 'headrace[report]')"


class TensorBoard:
    """An events file that is opened at the first row."""

    def __init__(self, path: Path, purge_from: int | None = None) -> None:
        self._path = path
        self._purge_from = purge_from
        self._writer: Any = None
        self._allowed: dict[str, Allowance] = {}

    def add(self, rows: Iterable[Mapping[str, Any]], durable: bool = False) -> None:
        by_kind: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if isinstance(row.get("step"), int):
                by_kind.setdefault(str(row.get("kind", "metrics")), []).append(row)
        for kind, group in by_kind.items():
            allowance = self._allowed.setdefault(kind, Allowance(time.monotonic()))
            for row in evenly(group, allowance.take(len(group), time.monotonic())):
                for tag, value in scalars(row).items():
                    self._open().add_scalar(f"{kind}/{tag}", value, row["step"])
        if durable and self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._path), purge_step=self._purge_from)
        return self._writer


class Allowance:
    """How many rows may pass: what is left of the first `ROWS_FREE`, and `ROWS_PER_S` since."""

    def __init__(self, now_s: float) -> None:
        self._left = float(ROWS_FREE)
        self._then_s = now_s

    def take(self, wanted: int, now_s: float) -> int:
        """How many of ``wanted`` may pass now; one at least."""
        self._left = min(ROWS_FREE, self._left + (now_s - self._then_s) * ROWS_PER_S)
        self._then_s = now_s
        granted = max(1, min(wanted, math.floor(self._left)))
        self._left = max(0.0, self._left - granted)
        return granted


def evenly(rows: list[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    """At most ``limit`` of the rows at even distances, the last always among them."""
    stride = max(1, math.ceil(len(rows) / limit))
    return rows[::-1][::stride][::-1]


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's plain numbers; nested dicts give ``outer/inner``."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in _COORDINATES or isinstance(value, bool):
            continue
        if isinstance(value, Mapping):
            found |= {f"{key}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float) or _is_one_number(value):
            found[key] = float(value)
    return found


def _is_one_number(value: Any) -> bool:
    return hasattr(value, "numel") and bool(value.numel() == 1)
