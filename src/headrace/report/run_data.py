"""One run as read for a report: its parts, and sentences about what is missing or damaged.

A report is what one looks at when something went wrong, so a part that is missing or damaged becomes a note
and the rest is shown. Only a folder that is no run, a run of another format, and metrics that are damaged in
the middle are errors.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import RunFolderError
from headrace.report.run_folder import RunFolder
from headrace.report.timeline import Timeline, read_timeline
from headrace.types import Hardware, Plan

_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a report needs of one run."""

    name: str
    """Short, and different from the other runs' names."""
    path: Path
    rows: list[dict[str, Any]]
    timeline: Timeline
    plan: Plan
    hardware: Hardware | None
    config: dict[str, Any]
    notes: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("kind", "metrics") == kind]

    @property
    def kinds(self) -> list[str]:
        """In the order of their first row."""
        return list(dict.fromkeys(str(row.get("kind", "metrics")) for row in self.rows))


def load_runs(paths: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    runs = [_load(RunFolder.open(path)) for path in paths]
    names = short_names([run.path for run in runs])
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path that tell them all apart; a path given twice is numbered."""
    parts = [path.resolve().parts[1:] or ("/",) for path in paths]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(p[-depth:]) for p in parts]
    repeats = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name} ({again + 1})" if again else name for name, again in zip(names, repeats, strict=True)]


def _load(folder: RunFolder) -> RunData:
    rows, note = folder.scan_metrics()
    notes = [note] if note else []
    if not rows:
        notes.append(
            "no metrics were recorded; the run ended before its first measurement, or none was asked"
        )
    timeline = _or_note(lambda: read_timeline(folder.timeline_path), Timeline(), notes)
    if timeline.note:
        notes.append(timeline.note)
    return RunData(
        name=folder.path.name,
        path=folder.path,
        rows=rows,
        timeline=timeline,
        plan=_or_note(folder.read_plan, Plan(), notes),
        hardware=_or_note(folder.read_hardware, None, notes),
        config=_or_note(folder.read_config, {}, notes),
        notes=tuple(notes),
    )


def _or_note(read: Callable[[], _Part], instead: _Part, notes: list[str]) -> _Part:
    try:
        return read()
    except RunFolderError as error:
        notes.append(str(error))
        return instead
