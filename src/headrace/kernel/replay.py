"""Steps captured in CUDA graphs. A step is some twenty launches, which cost Python several times what they cost the
device when the kernel matrix is in memory.

One graph for each size of a batch (the residue classes of the row numbers have at most two sizes). Its rows are row
numbers at a fixed address, which the host writes before each replay with one launch. The first batch of a size is
taken as it is, which compiles and warms up what the capture then finds; capturing executes nothing. So when a capture
fails, nothing is lost and nothing done twice: steps go on one operation at a time, and the reason is reported.

Invariant: what a step reads and writes stays at its address from step to step, for as long as the graphs live.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable

import torch

from headrace.kernel.rows import Rows

Step = Callable[[Rows], None]
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Told what to record, returns what repeats it; raises when it cannot."""

LEAST_STEPS = 32
"""Fewer steps are not captured: a guess, a capture costs about as much as four to eight steps save."""

CAPTURES_KEPT = 32
"""The memory of a graph that is gone, some 20 MB, stays reserved until an allocation fails; after so many captures
free memory is given back. (One pool for all graphs was refused by torch 2.11 from the second fit on.)"""
_captures = itertools.count()


def decide_replay(reads_rows: bool, steps: int) -> tuple[bool, str]:
    """Whether steps are captured on CUDA, and why. ``reads_rows``: a step reads the rows of the kernel matrix by
    their numbers on the device."""
    if not reads_rows:
        return (
            False,
            "a captured step would copy its rows of the kernel matrix, or compute them: no launch-bound work",
        )
    if steps < LEAST_STEPS:
        return False, f"{steps} steps are too few to pay for a capture"
    return True, "captured in a CUDA graph, since launching a step takes longer than the device needs for it"


class Replayed:
    """A step that is captured once for each size of a batch and replayed from then on."""

    def __init__(
        self,
        step: Step,
        *,
        rows: int,
        stride: int,
        device: torch.device,
        capture: Capture,
        on_failure: Callable[[str], None],
    ) -> None:
        self.step, self.stop, self.capture, self.on_failure = step, rows, capture, on_failure
        self.offsets = torch.arange(0, rows, stride, device=device)
        self.index = torch.empty_like(self.offsets)
        self.replays: dict[int, Callable[[], None]] = {}
        self.failed = False

    def __call__(self, rows: slice) -> None:
        if self.failed:
            self.step(rows)
            return
        size = len(range(rows.start, self.stop, rows.step))
        index = torch.add(self.offsets[:size], rows.start, out=self.index[:size])
        replay = self.replays.get(size)
        if replay is not None:
            replay()
            return
        once = functools.partial(self.step, index)
        on_side_stream(once, index.device)
        try:
            self.replays[size] = self.capture(once)
        except Exception as error:
            self.failed = True
            self.replays.clear()
            first, *_ = [*str(error).strip().splitlines(), ""]
            self.on_failure(f"{type(error).__name__}: {first}")


def on_side_stream(call: Callable[[], None], device: torch.device) -> None:
    """Run on the stream that captures use: what a library allocates for a stream is there before the capture."""
    if device.type != "cuda":
        call()
        return
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        call()
    here.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the process: matrix libraries keep a workspace of 32 MB for every stream that they have seen.
    return torch.cuda.Stream(device)


def cuda_graph(device: torch.device) -> Capture:
    """Capture in a CUDA graph. `torch.cuda.graph` would collect garbage and give all free memory back first, which
    takes longer than a whole fit."""

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        if next(_captures) % CAPTURES_KEPT == CAPTURES_KEPT - 1:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        here, side = torch.cuda.current_stream(device), _side_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(side)
        return graph.replay

    return capture
