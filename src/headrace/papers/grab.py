"""GraB (Lu, Guo, De Sa, NeurIPS 2022): balanced orders against random reshuffling and greedy herding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.papers import PaperOptions
from headrace.papers.grab_page import run_tasks
from headrace.papers.grab_tasks import GRAB, Task
from headrace.report.page import Page

GREEDY_ROWS = 3500  # greedy ordering takes O(n²) time and n·k numbers; beyond this it would eat the budget


def contestants(task: Task) -> Mapping[str, dict[str, Any]]:
    """The orders to compare; greedy where the data is small enough for it."""
    orders: dict[str, dict[str, Any]] = {
        "random reshuffling": {"kind": "shuffled"},
        "pair balance": {"kind": "pair", "fallback": False},
        "mean balance": {"kind": "mean", "fallback": False},
    }
    if len(task.train[0]) <= GREEDY_ROWS and task.name in ("mnist-logistic", "lenet"):
        orders["greedy"] = {"kind": "greedy", "fallback": False}
    return orders


def run(options: PaperOptions) -> Path:
    page = Page("GraB", subtitle="Better orders of the examples than random reshuffling")
    page.text(
        "All contestants of a seed begin with the same weights; they differ in the order alone. Signs come from "
        "sketches of 256 numbers per example, read by hooks in the ordinary backward pass. Bands span the seeds."
    )
    return run_tasks(options, GRAB, contestants, page)
