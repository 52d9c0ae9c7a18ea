"""The page that both GraB papers share: curves by epoch and by time, the drift, and a table beside the claims."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.errors import DataError, unknown
from headrace.papers import PaperOptions
from headrace.papers.grab_race import Curve, mean_curve, race
from headrace.papers.grab_tasks import Task
from headrace.report.page import Page, Series

Contestants = Callable[[Task], Mapping[str, dict[str, Any]]]


def run_tasks(
    options: PaperOptions, tasks: Mapping[str, Callable[[], Task]], contestants: Contestants, page: Page
) -> Path:
    """Race on every task asked for, write numbers.json and the page."""
    for name in options.only:
        if name not in tasks:
            raise unknown("experiment", name, tasks)
    chosen = [name for name in tasks if not options.only or name in options.only]
    end = time.monotonic() + options.seconds
    numbers: dict[str, Any] = {"torch": torch.__version__, "seconds": options.seconds}
    rows: list[list[Any]] = []
    sections: list[tuple[Task, dict[str, list[Curve]]]] = []
    for place, name in enumerate(chosen):
        if place and time.monotonic() >= end:
            page.text(f"{name} was left out: the time budget of {options.seconds:g} s was used up.")
            continue
        try:
            task = tasks[name]()
        except DataError as error:
            page.text(f"{name} was left out: {error}.")
            continue
        share = (end - time.monotonic()) / (len(chosen) - place)
        runs = race(task, contestants(task), options.seeds, share)
        sections.append((task, runs))
        numbers[name] = {label: [dataclasses.asdict(c) for c in curves] for label, curves in runs.items()}
        (options.out / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        rows.extend(_rows(task, runs))
    page.heading("At the last epoch that all seeds reached")
    page.table(
        [
            "task",
            "order",
            "epochs",
            "seeds",
            "objective",
            "validation",
            "CPU s/epoch",
            "drift ratio",
            "memory, KB",
        ],
        rows,
        caption="Objective: lower is better. Drift ratio: 0.5 to 0.9 for a shuffle, lower is better balanced. Memory: "
        "what learning the order holds beside one byte per row.",
    )
    for task, runs in sections:
        _section(page, task, runs)
    path = options.out / "index.html"
    page.save(path)
    return path


def _rows(task: Task, runs: dict[str, list[Curve]]) -> list[list[Any]]:
    rows = []
    for label, curves in runs.items():
        objective, score, seconds = (mean_curve(curves, n)[0] for n in ("objective", "score", "seconds"))
        ratios = [c.drift_ratio[-1] for c in curves if c.drift_ratio]
        rows.append(
            [
                task.title,
                label,
                len(objective),
                len(curves),
                f"{objective[-1]:.4f}",
                f"{score[-1]:.2f}",
                f"{seconds[-1] / len(seconds):.2f}",
                f"{sum(ratios) / len(ratios):.2f}" if ratios else "–",
                f"{max(c.memory_bytes for c in curves) / 1024:.0f}",
            ]
        )
    return rows


def _section(page: Page, task: Task, runs: dict[str, list[Curve]]) -> None:
    page.heading(task.title)
    page.text(f"The paper: {task.claim}. Here: {task.cut}.")
    by_epoch, by_time, scores, scores_by_time, drifts = [], [], [], [], []
    for group, (label, curves) in enumerate(runs.items()):  # an order has one colour in all plots
        objective, low, high = mean_curve(curves, "objective")
        epochs = list(range(1, len(objective) + 1))
        by_epoch.append(Series(label, epochs, objective, low=low, high=high, group=group))
        seconds = mean_curve(curves, "seconds")[0]
        by_time.append(Series(label, seconds, objective, group=group))
        score, low, high = mean_curve(curves, "score")
        scores.append(Series(label, epochs, score, low=low, high=high, group=group))
        scores_by_time.append(Series(label, seconds, score, group=group))
        if all(c.drift_ratio for c in curves):
            ratio, low, high = mean_curve(curves, "drift_ratio")
            epochs = list(range(1, len(ratio) + 1))
            drifts.append(Series(label, epochs, ratio, low=low, high=high, group=group))
    page.lines("Training objective", by_epoch, x_label="epoch", y_label="objective", log_y=True)
    page.lines(
        "The same by time", by_time, x_label="CPU seconds of training", y_label="objective", log_y=True
    )
    page.lines("Validation", scores, x_label="epoch", y_label=task.score_name)
    page.lines(
        "Validation by time", scores_by_time, x_label="CPU seconds of training", y_label=task.score_name
    )
    if drifts:
        page.lines("Drift of the order, H / √Σ‖g − ḡ‖²", drifts, x_label="epoch", y_label="ratio")
