"""What a run writes while it goes: metrics, timeline, progress. One place for all who train.

`open_records` is for every room that trains (`fit`, agents, topics): with ``out=None`` rows are kept in memory
only. Rows are plain dicts; whatever numeric key they hold is plotted in the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.report.files import write_rows
from headrace.report.recorder import Recorder
from headrace.report.run_folder import RunFolder
from headrace.types import Hardware, Plan


class Records:
    """Metrics in memory and, with a folder, on disk; a clock that goes on over a resume."""

    def __init__(
        self,
        folder: RunFolder | None,
        *,
        tensorboard: bool = True,
        resume_rows: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self._recorder: Recorder | None = None
        self._started = time.perf_counter() - seconds
        self.notes: list[str] = []
        """Sentences about what is not recorded, and why."""
        if folder is None:
            return
        step = None
        if resume_rows is not None:
            # A row may have been written after the checkpoint at the same step: count rows, not steps.
            self.rows = folder.read_metrics()[:resume_rows]
            write_rows(folder.metrics_path, self.rows)
            step = max((row["step"] for row in self.rows if "step" in row), default=0)
        self._recorder = Recorder(folder, tensorboard=tensorboard, resume_at_step=step)
        self.notes = list(self._recorder.notes)

    @property
    def path(self) -> Path | None:
        return self.folder.path if self.folder else None

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the run began, earlier parts included."""
        return time.perf_counter() - self._started

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        if self._recorder:
            self._recorder.metrics(row)

    def span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Something took place on a lane of the timeline; times on this run's clock."""
        if self._recorder:
            self._recorder.span(lane, name, start_s, end_s)

    def counter(self, name: str, value: float) -> None:
        if self._recorder:
            self._recorder.counter(name, self.seconds, value)

    def instant(self, name: str, text: str) -> None:
        if self._recorder:
            self._recorder.instant(name, self.seconds, text)

    def write_plan(self, plan: Plan) -> None:
        if self.folder:
            self.folder.write_plan(plan)

    def flush(self) -> None:
        if self._recorder:
            self._recorder.flush()

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()
            self._recorder = None


def open_records(
    out: str | Path | None,
    plan: Plan,
    config: Mapping[str, Any],
    *,
    hardware: Hardware | None = None,
    overwrite: bool = False,
    tensorboard: bool = True,
) -> Records:
    """Records of a new run in the folder ``out``, or in memory only."""
    if out is None:
        return Records(None)
    folder = RunFolder.create(out, overwrite=overwrite)
    folder.write_config(dict(config))
    folder.write_plan(plan)
    if hardware is not None:
        folder.write_hardware(hardware)
    return Records(folder, tensorboard=tensorboard)
