"""What do metrics, timeline and progress cost a fast training loop?

Question: how much longer does a loop of about 100,000 steps a minute take when it records metrics rows,
timeline spans, TensorBoard events and progress, than the same loop with nothing recorded? Once with a row and
two spans at every step, which is the worst case, and once with them at every tenth, which is nearer to what a
run of that speed does. Low is good; 1.00 is free.

    python benchmarks/bench_report_overhead.py [--train]

Both sides take turns in one process, 1,500 steps each: several times as long as the recorder waits between two
writes, so that its background thread's work falls into the turn that caused it. CPU time is that of the whole
process, that thread included; medians of all turns are compared. The steps sleep instead of training, so the
difference in CPU time is the cost of recording and little else; ``--train`` takes steps of a small network
instead, whose difference drowns in noise where other programs use the cores too.

Measured on 2 shared x86-64 cores (18 November 2026), Python 3.11, torch 2.13 CPU, beside other work:

    recorded        more CPU a step   of a 600 µs step
    every step      14.9 µs           2.5 %
    every 10 steps   6.7 µs           1.1 %
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from headrace.report.progress import Progress
from headrace.report.recorder import Recorder
from headrace.report.run_folder import RunFolder

Step = Callable[[], float]
STEP_S = 6e-4  # 100,000 steps a minute
WARM_UP = 400  # past the rows that TensorBoard takes whole


def make_step(batch: int) -> Step:
    """One SGD step of a small network, about 0.6 ms; returns its loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(54, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(batch, 54), torch.randint(0, 8, (batch,))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def plain(step: Step, steps: int) -> None:
    for _ in range(steps):
        step()


@dataclass
class Recording:
    """The same loop, with all that a run records."""

    recorder: Recorder
    progress: Progress
    batch: int
    every: int
    done: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def run(self, step: Step, steps: int) -> None:
        before_s = time.perf_counter() - self.started_s
        for number in range(self.done + 1, self.done + steps + 1):
            loss = step()
            self.progress.update(number, loss, number * self.batch, 0.0)
            if number % self.every == 0:
                before_s = self.record(number, loss, before_s)
        self.done += steps

    def record(self, number: int, loss: float, before_s: float) -> float:
        now_s = time.perf_counter() - self.started_s
        self.recorder.metrics(
            {
                "kind": "train",
                "epoch": 0,
                "step": number,
                "seconds": now_s,
                "examples": number * self.batch,
                "loss": loss,
                "lr": 0.01,
                "wait_s": 0.0,
            }
        )
        self.recorder.span("device", "wait", before_s, before_s)
        self.recorder.span("device", "step", before_s, now_s)
        return now_s


def measured(run: Callable[[], None]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def pause() -> float:
    """A step that leaves the cores alone, so that what is left is the cost of recording."""
    time.sleep(STEP_S)
    return 0.5


def compare(name: str, step: Step, options: argparse.Namespace, every: int) -> None:
    """Both sides in turn; prints what recording every ``every`` steps costs."""
    sides: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": []}
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run")
        quietly = Console(file=io.StringIO())
        with Recorder(folder) as recorder, Progress(10**9, console=quietly) as progress:
            recording = Recording(recorder, progress, options.batch, every)
            recording.run(step, WARM_UP * every)
            recorder.flush()
            runs = {
                "plain": lambda: plain(step, options.steps),
                "recorded": lambda: recording.run(step, options.steps),
            }
            for pair in range(options.pairs):
                for side in sorted(runs, reverse=bool(pair % 2)):
                    sides[side].append(measured(runs[side]))
        rows = len(folder.read_metrics())
    for index, what in enumerate(("wall", "CPU")):
        quiet = {
            side: statistics.quantiles([one[index] for one in found])[0] for side, found in sides.items()
        }
        plain_us, recorded_us = (quiet[side] / options.steps * 1e6 for side in ("plain", "recorded"))
        print(
            f"{name:8} every {every:2}: {what:4} plain {plain_us:6.1f} µs a step, recorded {recorded_us:6.1f} µs, "
            f"difference {recorded_us - plain_us:5.1f} µs = {(recorded_us - plain_us) / (STEP_S * 1e6):6.2%} of "
            f"{STEP_S * 1e6:.0f} µs  ({rows} rows)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="of one side before the other's turn")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--train", action="store_true", help="steps of a network instead of pauses")
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = make_step(options.batch)
    plain(step, WARM_UP)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for every in (1, 10):
        compare("training" if options.train else "pausing", step if options.train else pause, options, every)


if __name__ == "__main__":
    main()
