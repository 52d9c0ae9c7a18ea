"""The bar tells the truth on a clock of our own, and keeps quiet where nobody watches."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.report.progress import Goal, Pace, Progress, Standing, describe, duration, rate


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class CountedLoss:
    """A loss that knows how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def __float__(self) -> float:
        self.reads += 1
        return 0.25


def run(console: Console, steps: int = 100) -> CountedLoss:
    clock, loss = Clock(), CountedLoss()
    with Progress(steps, title="training", console=console, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now_s += 0.11
            progress.update(step, loss, examples=step * 32, wait_s=step * 0.022)
    return loss


def test_without_a_terminal_there_is_a_plain_line_every_few_seconds() -> None:
    out = io.StringIO()
    loss = run(Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # at 5 s, at 10 s, and at the end
    assert loss.reads == 3
    assert lines[0] == (
        "training  46%  step 46, loss 0.25, 291 examples/s, waited 1.0 s (20%), 5.1 s gone, 5.9 s left"
    )
    assert lines[2].startswith("training 100%  step 100,") and lines[2].endswith("11.0 s gone, 0.0 s left")
    assert "\x1b" not in out.getvalue()


def test_in_a_terminal_there_is_a_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    out = io.StringIO()
    loss = run(Console(file=out, width=90, force_terminal=True))
    drawn = out.getvalue()
    assert "100%" in drawn and "loss 0.25" in drawn and "291 examples/s" in drawn and "waited" in drawn
    assert loss.reads < 60  # of 100 updates: at most one a fifth of a second


def test_in_continuous_integration_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    out = io.StringIO()
    run(Console(file=out, width=200, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and lines[0].startswith("training  46%  step 46, loss 0.25,")


def test_a_resumed_run_is_not_credited_with_the_steps_before_it() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(200, first_step=100, console=Console(file=out, width=200), clock=clock) as progress:
        progress.update(100, 0.5, examples=3200, wait_s=7.0)
        clock.now_s += 10.0
        progress.update(110, 0.5, examples=3520, wait_s=8.0)
    (line,) = out.getvalue().splitlines()
    assert " 55%  step 110," in line and "32 examples/s, waited 1.0 s (10%)" in line
    assert line.endswith("10.0 s gone, 1:30 left")


def test_a_run_without_updates_prints_nothing() -> None:
    out = io.StringIO()
    with Progress(10, console=Console(file=out)):
        pass
    assert out.getvalue() == ""


def test_the_goal_is_whichever_comes_first() -> None:
    goal = Goal(steps=100, seconds=10.0)
    assert goal.fraction(step=50, elapsed_s=2.0) == 0.5
    assert goal.fraction(step=10, elapsed_s=8.0) == 0.8
    assert goal.left_s(step=50, elapsed_s=2.0, steps_per_s=25.0) == 2.0
    assert goal.left_s(step=50, elapsed_s=9.5, steps_per_s=25.0) == 0.5
    assert Goal().fraction(5, 1.0) is None
    assert Goal().left_s(5, 1.0, 1.0) is None
    assert Goal(steps=10).left_s(5, 1.0, 0.0) is None


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    pace.add(0.0, 0, 0)
    assert pace.add(0.0, 0, 0) == (0.0, 0.0)
    for second in range(1, 31):
        steps_per_s, _ = pace.add(float(second), second * 10 if second <= 10 else 100 + (second - 10), 0)
    assert steps_per_s == 1.0


def test_words() -> None:
    assert [rate(r) for r in (0.0, 12.34, 12_345.6, 2e6)] == ["0", "12.3", "12.3k", "2M"]
    assert [duration(s) for s in (0.04, 59.9, 61, 3661)] == ["0.0 s", "59.9 s", "1:01", "1:01:01"]
    standing = Standing(
        elapsed_s=2.0,
        step=1000,
        loss=float("nan"),
        examples=1,
        wait_s=0.0,
        examples_per_s=1.0,
        left_s=None,
        fraction=None,
    )
    assert describe(standing) == "step 1,000, loss nan, 1 examples/s, waited 0.0 s (0%), 2.0 s gone"
