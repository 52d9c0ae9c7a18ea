"""What a run tells while it runs, and what it has to say at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.engine.hogbatch.coordinator import Coordinator
from headrace.engine.hogbatch.shared import BUSY_NS, MERGES, STALENESS, UPDATES, Board, staleness_labels


class Observer:
    """Override what is of interest. All calls come from the thread that called `run_hogbatch`."""

    def metrics(self, row: dict[str, Any]) -> None:
        """A row of numbers about twice a second, and one at the end of each epoch (with the key
        ``epoch``)."""

    def span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """One worker's work on one grant, in seconds since the run began: a bar of a timeline."""

    def note(self, sentence: str) -> None:
        """Something the user should know."""

    def resumable(self, state: dict[str, Any]) -> None:
        """What `run_hogbatch` takes as ``resume=`` to go on from here: just before `epoch_ended`, and when a
        `WorkerError` is about to be raised (the module then holds what was learned so far)."""

    def epoch_ended(self, epoch: int) -> bool:
        """All workers rest and the module holds the parameters: evaluate, save. True ends the run.

        The time taken here does not count as training time.
        """
        return False

    def stopping(self) -> bool:
        """Asked several times a second; True ends the run after the batches at work."""
        return False


@dataclass(frozen=True)
class WorkerSummary:
    """What one worker did, over all its lives."""

    name: str
    updates: int
    rows: int
    batch: int
    """Its last batch size."""
    merges: int
    utilisation: float
    """Share of the training time at work; low means that it waited for grants or for others at epochs'
    ends."""
    restarts: int
    staleness: dict[str, int]
    """Updates of others between reading and writing parameters → how often; high buckets: stale gradients."""


@dataclass(frozen=True)
class HogbatchResult:
    """What `run_hogbatch` returns; the trained parameters are in the module."""

    epochs: int
    """Complete epochs."""
    updates: int
    rows: int
    seconds: float
    """Training time, without evaluation."""
    losses: list[float]
    """Mean training loss of each epoch, each batch's taken before its update."""
    workers: list[WorkerSummary]
    batch_history: list[tuple[float, dict[str, int]]]
    """Seconds → batch sizes, whenever one changed."""
    lost_merges: float
    """Share of merges that another worker's simultaneous merge undid in part; NaN without replicas."""
    notes: list[str]
    stopped_by: str
    """`epochs`, `updates`, `seconds`, `observer`, or `interrupt`."""
    state: dict[str, Any] = field(default_factory=dict)
    """Give it as ``resume=`` to go on from here; plain numbers, strings and lists."""

    @property
    def update_ratios(self) -> dict[str, float]:
        """Each worker's share of all updates."""
        return {worker.name: worker.updates / max(1, self.updates) for worker in self.workers}


def summarise(
    coordinator: Coordinator, board: Board, rows_of: dict[str, list[int]], seconds: float
) -> list[WorkerSummary]:
    """One summary per worker; ``rows_of`` names the board's rows that its lives used."""
    batches, updates = coordinator.batches(), coordinator.updates()
    rows, restarts = coordinator.rows_done(), coordinator.restarts()
    labels = staleness_labels()
    summaries = []
    for name, lives in rows_of.items():
        cells = board.cells[lives].sum(axis=0)
        counts = {label: int(n) for label, n in zip(labels, cells[STALENESS:], strict=True) if n}
        summaries.append(
            WorkerSummary(
                name=name,
                updates=updates[name],
                rows=rows[name],
                batch=batches.get(name, 0),
                merges=int(cells[MERGES]),
                utilisation=int(cells[BUSY_NS]) / 1e9 / max(seconds, 1e-9),
                restarts=restarts[name],
                staleness=counts,
            )
        )
    return summaries


def live_row(
    coordinator: Coordinator, board: Board, rows_of: dict[str, list[int]], seconds: float, epoch: int
) -> dict[str, Any]:
    """The numbers for a progress bar, from the board: they include work that is not reported yet."""
    row: dict[str, Any] = {
        "kind": "workers",
        "seconds": seconds,
        "in_epoch": epoch,
        "updates": int(board.cells[:, UPDATES].sum()),
        "examples": sum(coordinator.rows_done().values()),
    }
    for name, batch in coordinator.batches().items():
        cells = board.cells[rows_of[name]].sum(axis=0)
        row[f"updates/{name}"] = int(cells[UPDATES])
        row[f"batch/{name}"] = batch
        row[f"utilisation/{name}"] = int(cells[BUSY_NS]) / 1e9 / max(seconds, 1e-9)
    return row
