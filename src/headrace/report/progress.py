"""How far a run is: a bar in a terminal, a plain line every few seconds elsewhere.

`Progress.update` takes the run's totals, so a missed update loses nothing; a resumed run's first update tells
where counting begins. Calling it at every step is cheap: nearly all calls only look at the clock. ``loss`` may
be a tensor; it is read only when drawn, since reading waits for the device.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

DRAW_EVERY_S = 0.2
PLAIN_EVERY_S = 5.0
RATE_OVER_S = 10.0
"""The rate shown is that of the last seconds: long enough to be calm, short enough to show a change."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stands at one moment."""

    elapsed_s: float
    step: int
    loss: float
    examples: int
    wait_s: float
    """Since the bar was opened, as ``elapsed_s``."""
    examples_per_s: float
    left_s: float | None
    """None while it cannot be told."""
    fraction: float | None
    """Of the way to the end, 0 to 1; None when the run has no planned end."""

    @property
    def waited_share(self) -> float:
        """Of the time so far; high means that the device starved for data."""
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Goal:
    """When the run will end: at whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def fraction(self, step: int, elapsed_s: float) -> float | None:
        parts = []
        if self.steps:
            parts.append(step / self.steps)
        if self.seconds:
            parts.append(elapsed_s / self.seconds)
        return min(1.0, max(parts)) if parts else None

    def left_s(self, step: int, elapsed_s: float, steps_per_s: float) -> float | None:
        lefts = []
        if self.steps and steps_per_s > 0:
            lefts.append((self.steps - step) / steps_per_s)
        if self.seconds:
            lefts.append(self.seconds - elapsed_s)
        return max(0.0, min(lefts)) if lefts else None


class Pace:
    """Rates over the last `RATE_OVER_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, elapsed_s: float, step: int, examples: int) -> tuple[float, float]:
        """Steps and examples per second."""
        self._seen.append((elapsed_s, step, examples))
        while len(self._seen) > 2 and self._seen[1][0] <= elapsed_s - RATE_OVER_S:
            self._seen.popleft()
        then_s, then_step, then_examples = self._seen[0]
        passed_s = elapsed_s - then_s
        if passed_s <= 0:
            return 0.0, 0.0
        return (step - then_step) / passed_s, (examples - then_examples) / passed_s


def describe(standing: Standing) -> str:
    """One plain line."""
    done = f"{standing.fraction:4.0%}  " if standing.fraction is not None else ""
    left = f", {duration(standing.left_s)} left" if standing.left_s is not None else ""
    return (
        f"{done}step {standing.step:,}, loss {standing.loss:.4g}, "
        f"{rate(standing.examples_per_s)} examples/s, {waited(standing)}, "
        f"{duration(standing.elapsed_s)} gone{left}"
    )


def waited(standing: Standing) -> str:
    return f"waited {duration(standing.wait_s)} ({standing.waited_share:.0%})"


def rate(per_s: float) -> str:
    """Three digits: 12.3k rather than 12,345.6."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:.3g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Progress:
    """A context manager that draws where the run stands."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        total_seconds: float | None = None,
        first_step: int = 0,
        title: str = "training",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``first_step`` is where a resumed run goes on; time is counted from now."""
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._goal = Goal(steps=total_steps, seconds=total_seconds)
        self._first_step = first_step
        self._title = title
        self._clock = clock
        self._pace = Pace()
        self._is_plain = not self._console.is_terminal or bool(os.environ.get("CI"))
        self._every_s = PLAIN_EVERY_S if self._is_plain else DRAW_EVERY_S
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last: tuple[int, Any, int, float] | None = None
        self._note = ""
        self._drawn_step: int | None = None
        self._wait_before_s: float | None = None if first_step else 0.0
        self._started_s = self._next_s = clock()

    def __enter__(self) -> Progress:
        self._started_s = self._clock()
        self._next_s = self._started_s + (self._every_s if self._is_plain else 0.0)
        if not self._first_step:
            self._pace.add(0.0, 0, 0)
        if not self._is_plain:
            self._bar, self._task = _make_bar(self._console, self._title)
            self._bar.start()
        return self

    def update(self, step: int, loss: Any, examples: int, wait_s: float = 0.0, note: str = "") -> None:
        """Totals; ``loss`` is a number or a one-element tensor. ``note`` is shown behind them."""
        self._note = note
        self._last = (step, loss, examples, wait_s)
        now_s = self._clock()
        if self._wait_before_s is None:
            self._wait_before_s = wait_s
            self._pace.add(now_s - self._started_s, step, examples)
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._draw(now_s)

    def print(self, text: str) -> None:
        """A line of its own above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._last is not None and self._last[0] != self._drawn_step:
            self._draw(self._clock())
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, now_s: float) -> None:
        assert self._last is not None
        standing = self._standing(now_s, *self._last)
        self._drawn_step = standing.step
        if self._bar is None or self._task is None:
            self.print(f"{self._title} {describe(standing)}{'; ' if self._note else ''}{self._note}")
            return
        self._bar.update(
            self._task,
            total=None if standing.fraction is None else 1.0,
            completed=standing.fraction or 0.0,
            told=f"loss {standing.loss:.4g}  {rate(standing.examples_per_s)} examples/s  "
            + (self._note or waited(standing)),
            left="" if standing.left_s is None else f"{duration(standing.left_s)} left",
        )

    def _standing(self, now_s: float, step: int, loss: Any, examples: int, wait_s: float) -> Standing:
        elapsed_s = now_s - self._started_s
        steps_per_s, examples_per_s = self._pace.add(elapsed_s, step, examples)
        return Standing(
            elapsed_s=elapsed_s,
            step=step,
            loss=float(loss),
            examples=examples,
            wait_s=wait_s - (self._wait_before_s or 0.0),
            examples_per_s=examples_per_s,
            left_s=self._goal.left_s(step, elapsed_s, steps_per_s),
            fraction=self._goal.fraction(step, elapsed_s),
        )


def _make_bar(console: Console, title: str) -> tuple[RichProgress, TaskID]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24 if console.width >= 100 else 10),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}"),
        TextColumn("{task.fields[left]}"),
    )
    bar = RichProgress(*columns, console=console, refresh_per_second=5)
    return bar, bar.add_task(title, total=None, told="", left="")
