"""CD-GraB (Cooper et al., NeurIPS 2023): coordinated orders for several workers, simulated in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.papers import PaperOptions
from headrace.papers.grab_page import run_tasks
from headrace.papers.grab_tasks import WORKERS, Task
from headrace.report.page import Page


def contestants(task: Task) -> Mapping[str, dict[str, Any]]:
    return {
        "random reshuffling": {"kind": "shuffled"},
        f"CD-GraB, {task.workers} workers": {"workers": task.workers, "fallback": False},
    }


def run(options: PaperOptions) -> Path:
    page = Page("CD-GraB", subtitle="One walk over the examples of several workers")
    page.text(
        "The rows of each batch are dealt to the workers in turn, as a group of processes would read them; every "
        "worker keeps its own permutation of its own share. What a real group exchanges per pair of steps is 256 "
        "numbers per worker, whatever the model's size."
    )
    return run_tasks(options, WORKERS, contestants, page)
