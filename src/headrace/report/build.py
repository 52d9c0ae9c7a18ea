"""The report of one run, or of several side by side, as one page: ``write_report([paths])``.

Every section takes the page and the runs, and leaves the page alone when the runs hold nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import OptionError
from headrace.report.page import Page
from headrace.report.run_data import load_runs
from headrace.report.run_folder import RunFolder
from headrace.report.sections_plots import add_counters, add_histograms, add_metrics, add_speed, add_waiting
from headrace.report.sections_words import add_events, add_hardware, add_plan, add_settings, add_summary

SECTIONS = (
    add_summary,
    add_events,
    add_metrics,
    add_speed,
    add_waiting,
    add_counters,
    add_histograms,
    add_plan,
    add_hardware,
    add_settings,
)


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page and return its path.

    ``out`` is by default the run's own ``report.html``, or ``report.html`` in the current folder for several.
    """
    if not runs:
        raise OptionError("a report needs at least one run folder; name one")
    loaded = load_runs(runs)
    title = "Training report" if len(loaded) == 1 else f"{len(loaded)} runs side by side"
    page = Page(title, subtitle=", ".join(run.name for run in loaded))
    for add_section in SECTIONS:
        add_section(page, loaded)
    if out is None:
        out = RunFolder(runs[0]).report_path if len(loaded) == 1 else "report.html"
    return page.save(out)
