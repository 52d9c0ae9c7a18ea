"""Metrics and timeline of a run that is going on, written beside the training loop.

Invariant: the caller never waits. A call appends to a queue; one background thread encodes and writes every
`WRITE_EVERY_S` seconds, whole lines at a time, so a killed process loses at most that much and leaves files
that can be read. `flush` returns when everything recorded before it is on the disk.

A tensor among the values is read by the background thread, so that reading a loss does not hold up the loop;
pass one that is not changed afterwards. A write that fails is raised by the next call.

Threads: the deques are appended to by any thread and drained by the writer alone; everything else is touched
by the writer alone, or under `_lock`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headrace.errors import RunFolderError
from headrace.report import timeline
from headrace.report.files import encode_row, write_rows
from headrace.report.run_folder import RunFolder
from headrace.report.tensorboard import TensorBoard, why_not
from headrace.report.timeline import Counter, Instant, Span, TimelineEncoder

_log = logging.getLogger("headrace")

WRITE_EVERY_S = 0.25
"""Often enough to watch a run through its files, seldom enough that waking up costs nothing."""


class Recorder:
    """Writes `metrics.jsonl`, `timeline.json` and TensorBoard events into a run folder."""

    def __init__(
        self, folder: RunFolder, tensorboard: bool = True, resume_at_step: int | None = None
    ) -> None:
        """``resume_at_step``: continue the folder's files after that step; None starts them anew.

        Metrics of later steps are dropped, since the resumed run makes them again. The timeline keeps them:
        it tells what the machine did.
        """
        self.notes: list[str] = []
        """Sentences for the user about what is not recorded, and why."""
        self.elapsed_before_s = 0.0
        """How long the run had been going when it was interrupted, lost steps included; 0 for a new run."""
        self._rows: deque[dict[str, Any]] = deque()
        self._events: deque[Span | Counter | Instant] = deque()
        self._encoder = TimelineEncoder()
        if resume_at_step is None:
            self._start_files(folder)
        else:
            self._continue_files(folder, resume_at_step)
        self._metrics_file = folder.metrics_path.open("a", encoding="utf-8")
        self._timeline_file = folder.timeline_path.open("a", encoding="utf-8")
        self._tensorboard = self._open_tensorboard(folder.tensorboard_path, tensorboard, resume_at_step)
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="recorder", daemon=True)
        self._thread.start()

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One row: any JSON values, usually with kind, epoch, step, seconds, examples and loss."""
        if self._failure is not None:
            self._raise_failure()
        self._rows.append(dict(row))

    def span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """What ``lane`` (a thread, a worker, the device) did between two moments of the run's clock."""
        self._events.append(Span(lane, name, start_s, end_s))

    def counter(self, name: str, t_s: float, value: float) -> None:
        self._events.append(Counter(name, t_s, value))

    def instant(self, name: str, t_s: float, text: str) -> None:
        """An event worth a mark: a resume, a stop, a fallback."""
        self._events.append(Instant(name, t_s, text))

    def flush(self) -> None:
        """Return when everything recorded so far is on the disk."""
        self._write_safely(durable=True)
        self._raise_failure()

    def close(self) -> None:
        """Write what is left and end the files. Calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        try:
            self.flush()
            _append(self._timeline_file, timeline.joined(self._encoder.finish()) + timeline.CLOSING)
        finally:
            for file in (self._metrics_file, self._timeline_file):
                with contextlib.suppress(OSError):  # what could not be written has been reported by flush
                    file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start_files(self, folder: RunFolder) -> None:
        folder.metrics_path.write_text("", encoding="utf-8")
        folder.timeline_path.write_text(timeline.opening(), encoding="utf-8")

    def _continue_files(self, folder: RunFolder, step: int) -> None:
        rows, note = folder.scan_metrics()
        write_rows(folder.metrics_path, rows_until(rows, step))
        if not folder.timeline_path.exists():
            folder.timeline_path.write_text(timeline.opening(), encoding="utf-8")
        earlier = timeline.reopen(folder.timeline_path)
        self._encoder.lanes = {lane: number for number, lane in enumerate(earlier.lanes, start=1)}
        self._encoder.detailed_left = max(0, timeline.DETAILED_SPANS - len(earlier.spans))
        seconds = (row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float))
        self.elapsed_before_s = max([*seconds, earlier.end_s], default=0.0)
        self.notes += [text for text in (note, earlier.note) if text]
        self._events.append(
            Instant("resumed", self.elapsed_before_s, f"the run was resumed after step {step}")
        )

    def _open_tensorboard(self, path: Path, wanted: bool, resume_at_step: int | None) -> TensorBoard | None:
        if not wanted:
            return None
        reason = why_not()
        if reason is not None:
            self.notes.append(reason)
            return None
        return TensorBoard(path, purge_from=None if resume_at_step is None else resume_at_step + 1)

    def _write_until_stopped(self) -> None:
        while not self._stop.wait(WRITE_EVERY_S):
            self._write_safely()

    def _write_safely(self, durable: bool = False) -> None:
        with self._lock:
            try:
                self._write(durable)
            except Exception as error:  # whatever it is, it belongs to the caller, not to this thread
                self._failure = self._failure or error

    def _write(self, durable: bool) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        events = [self._events.popleft() for _ in range(len(self._events))]
        _append(self._metrics_file, "".join(self._encode_rows(rows)), durable)
        _append(self._timeline_file, timeline.joined(self._encoder.encode(events)), durable)
        self._write_tensorboard(rows, durable)

    def _write_tensorboard(self, rows: list[dict[str, Any]], durable: bool) -> None:
        """Events are a convenience: when their package fails, training goes on without them, and it is said."""
        if self._tensorboard is None:
            return
        try:
            self._tensorboard.add(rows, durable)
        except Exception as error:  # a foreign package: an import that breaks, a version that does not fit
            self._tensorboard = None
            self.notes.append(f"TensorBoard events ended: {type(error).__name__}: {error}")
            _log.warning(self.notes[-1])

    def _encode_rows(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        """One line each; a row that cannot be written is reported and does not take the others with it."""
        for row in rows:
            try:
                yield f"{encode_row(row)}\n"
            except (TypeError, ValueError) as error:
                self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        error, self._failure = self._failure, None
        raise RunFolderError(
            f"metrics and timeline could not be written ({error}); what was recorded before is kept"
        ) from error


def rows_until(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The rows that belong to the first ``step`` steps; rows without a step are kept."""
    return [row for row in rows if not isinstance(row.get("step"), int) or row["step"] <= step]


def _append(file: IO[str], text: str, durable: bool = False) -> None:
    file.write(text)
    file.flush()
    if durable:
        os.fsync(file.fileno())
