"""One line about a run that is going on, on stderr: steps, steps per second, mean and best return."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from headrace.agents.goal import Goal

_PLAIN_EVERY_S = 5.0


class Progress:
    """A bar in a terminal, a plain line every few seconds elsewhere, nothing when ``shown`` is False."""

    def __init__(self, goal: Goal, name: str, shown: bool) -> None:
        self.goal, self.name, self.shown = goal, name, shown
        self._bar: Any = None
        self._task: Any = None
        self._last_plain_s = 0.0
        self._last_step = -1.0

    def __enter__(self) -> Progress:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"),
                TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            bounded = self.goal.steps is not None or self.goal.seconds is not None
            self._task = self._bar.add_task(self.name, total=1.0 if bounded else None, told="starting")
        return self

    def update(self, row: dict[str, float], *, last: bool = False) -> None:
        """Show a row of metrics; the ``last`` one is always shown."""
        if not self.shown:
            return
        share = self.goal.progress(int(row["step"]), row["seconds"])
        if self._bar is not None:
            self._bar.update(self._task, completed=share, told=told(row))
        elif (last and row["step"] != self._last_step) or row[
            "seconds"
        ] - self._last_plain_s >= _PLAIN_EVERY_S:
            self._last_plain_s, self._last_step = row["seconds"], row["step"]
            sys.stderr.write(f"{self.name}: {told(row)}\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def told(row: dict[str, float]) -> str:
    """A row of metrics as a line for a person."""
    parts = [f"{int(row['step']):,} steps"]
    if "steps_per_s" in row:
        parts.append(f"{row['steps_per_s']:,.0f}/s")
    if "return" in row:
        parts.append(f"return {row['return']:.1f}")
    if "best_return" in row:
        parts.append(f"best {row['best_return']:.1f}")
    if row.get("restarts"):
        parts.append(f"{int(row['restarts'])} restarts")
    return ", ".join(parts)
