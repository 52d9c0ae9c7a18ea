"""DPSVI: topic models at speed. Curves against time and documents, threads, machines, beside the peers.

Writes ``numbers.json`` and ``page.html``. Experiments by name: ``curves``, ``threads``, ``machines``. Machines are
simulated in one process: what they show is what staleness costs in likelihood, not network time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import unknown
from headrace.papers import PaperOptions
from headrace.papers.dpsvi_learners import SWEEPS, installed
from headrace.papers.dpsvi_runs import corpora, curve, machines, needed, split, threads
from headrace.report.page import Page, Series
from headrace.topics.learner import warm_up

EXPERIMENTS = ("curves", "threads", "machines")
TOPICS = 50
PER_WORD = "log likelihood per word"


def run(options: PaperOptions) -> Path:
    """Run the experiments within ``options.seconds`` and write the page."""
    for name in options.only:
        if name not in EXPERIMENTS:
            raise unknown("experiment of dpsvi", name, EXPERIMENTS)
    chosen = options.only or EXPERIMENTS
    warm_up()
    data = {name: split(matrix) for name, matrix in corpora(options.seconds).items()}
    numbers: dict[str, Any] = {"topics": TOPICS, "seconds": options.seconds, "seeds": options.seeds}
    if "curves" in chosen:
        numbers["curves"], numbers["missing"] = run_curves(data, options)
    if "threads" in chosen:
        numbers["threads"] = run_threads(data, options)
    if "machines" in chosen:
        numbers["machines"] = run_machines(data, options)
    (options.out / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return write_page(numbers, options.out / "page.html")


def run_curves(data: dict[str, Any], options: PaperOptions) -> tuple[dict[str, Any], list[str]]:
    """Every library on every corpus, for equal CPU time each."""
    learners, missing = installed()
    limit_s = 0.6 * options.seconds / (len(data) * len(learners))
    found = {
        corpus: {
            name: curve(
                learn, parts[0], parts[1], TOPICS, 0, limit_s, looks=SWEEPS if name == "tomotopy" else 1
            )
            for name, learn in learners.items()
        }
        for corpus, parts in data.items()
    }
    return found, missing


def run_threads(data: dict[str, Any], options: PaperOptions) -> list[dict[str, Any]]:
    """One to all cores on the largest corpus, the fastest of a few runs."""
    name = max(data, key=lambda corpus: data[corpus][0].nnz)
    train, held_out = data[name]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = sorted(
        {1, 2, *(count for count in (4, 8, 16, 32, 64) if count < cores), cores} & set(range(1, cores + 1))
    )
    best = []
    for count in jobs:
        runs = [threads(train, held_out, TOPICS, seed, count) for seed in range(options.seeds)]
        points = min(runs, key=lambda run: run[-1]["seconds"])
        likelihood = float(np.mean([run[-1]["likelihood"] for run in runs]))
        rate = points[-1]["documents"] / points[-1]["seconds"]
        best.append({"jobs": count, "corpus": name, "rate": rate, "likelihood": likelihood, "points": points})
    return best


def run_machines(data: dict[str, Any], options: PaperOptions) -> dict[str, Any]:
    """One to four machines on one corpus."""
    train, held_out = data.get("KOS", data["synthetic"])
    return {
        str(count): [machines(train, held_out, TOPICS, seed, count) for seed in range(options.seeds)]
        for count in (1, 2, 3, 4)
    }


def write_page(numbers: dict[str, Any], path: Path) -> Path:
    """The page from the numbers alone."""
    page = Page("DPSVI: topic models at speed", "Latent Dirichlet allocation, measured on this machine")
    if "curves" in numbers:
        _curves(page, numbers)
    if "threads" in numbers:
        _threads(page, numbers["threads"])
    if "machines" in numbers:
        _machines(page, numbers["machines"])
    page.save(path)
    return path


def _curves(page: Page, numbers: dict[str, Any]) -> None:
    page.heading("Held-out likelihood against time")
    page.text(
        f"{numbers['topics']} topics, one thread, one seed; mini-batches of 256 (collapsed: 32), offset "
        "10, decay 0.7. Each point is the log likelihood "
        "per word of the second half of held-out documents, given the first half: higher "
        "is better. All libraries are judged by the same code under their own priors. Time is CPU time of learning. "
        "On documents drawn from the model itself (synthetic) collapsed learning is best early and then overfits, "
        "which held_out= shows; on real documents it was not seen to."
    )
    if numbers["missing"]:
        page.text(f"Not installed here and left out: {', '.join(numbers['missing'])}.")
    for corpus, curves in numbers["curves"].items():
        lines = [
            Series(name, [p["seconds"] for p in points], [p["likelihood"] for p in points])
            for name, points in curves.items()
        ]
        page.lines(corpus, lines, x_label="CPU seconds", y_label=PER_WORD, log_x=True)
    page.heading("Held-out likelihood against documents")
    page.text(
        "The same points over the documents that were looked at, every pass counted: how much a library learns from a "
        f"document, whatever its speed. A sampler's sweep looks at every document once; {SWEEPS} sweeps are a pass."
    )
    for corpus, curves in numbers["curves"].items():
        lines = [
            Series(name, [p["documents"] for p in points], [p["likelihood"] for p in points])
            for name, points in curves.items()
        ]
        page.lines(corpus, lines, x_label="documents, with repetitions", y_label=PER_WORD, log_x=True)
    _passes(page, numbers)


def _passes(page: Page, numbers: dict[str, Any]) -> None:
    rows = []
    for corpus, curves in numbers["curves"].items():
        own = _rate(curves["headrace online"])
        for name, points in curves.items():
            rows.append(
                [corpus, name, round(1 / _rate(points), 3), round(_rate(points) / own, 1), _best(points)]
            )
    page.table(
        ["corpus", "library", "passes per CPU-s", "time per pass, headrace = 1", "best likelihood"],
        rows,
        caption="A pass is one look at every document; for tomotopy it is 20 sweeps. First passes are "
        "slower than later ones, so compare rows with similar numbers of passes, from a larger time budget. "
        "High passes per second and high likelihoods are good.",
    )
    page.text(
        "A published reference on one core of another machine (3,384 documents, 10,000 words, 50 topics, five passes, "
        "documents per CPU-second): scikit-learn 2,065, gensim 1,959, Vowpal Wabbit 2,508. Vowpal Wabbit reads its "
        "documents from a text file in every pass, and starts from its own draw of topics, which weighs more than a "
        "small corpus does."
    )


def _rate(points: list[dict[str, float]]) -> float:
    """CPU seconds per pass."""
    return points[-1]["seconds"] / points[-1]["passes"]


def _best(points: list[dict[str, float]]) -> float:
    return round(max(p["likelihood"] for p in points), 3)


def _threads(page: Page, rows: list[dict[str, Any]]) -> None:
    page.heading("Threads without locks")
    page.text(
        f"{rows[0]['corpus']}, five passes, mini-batches of 64, the fastest of the seeds. Against time, more threads "
        "should lie further left; against documents, on one line: what threads read of each other is a little old."
    )
    for of, label in (("seconds", "wall seconds"), ("documents", "documents, with repetitions")):
        lines = [
            Series(
                _counted(row["jobs"], "thread"),
                [p[of] for p in row["points"]],
                [p["likelihood"] for p in row["points"]],
            )
            for row in rows
        ]
        page.lines(f"Held-out likelihood against {of}", lines, x_label=label, y_label=PER_WORD)
    ratios = [r["rate"] / rows[0]["rate"] for r in rows]
    jobs = [int(r["jobs"]) for r in rows]
    page.lines(
        "Speed-up in wall time",
        [Series("measured", jobs, ratios), Series("perfect", jobs, jobs)],
        x_label="threads",
        y_label="times one thread",
    )
    page.table(
        ["threads", "documents per second", "speed-up", "likelihood"],
        [
            [int(r["jobs"]), round(r["rate"]), round(x, 2), round(r["likelihood"], 3)]
            for r, x in zip(rows, ratios, strict=True)
        ],
        caption="As many as threads would be perfect, on idle cores; other work on the machine lowers it. "
        "Likelihoods differ between seeds by about 0.02.",
    )


def _machines(page: Page, found: dict[str, Any]) -> None:
    page.heading("Machines, simulated: what staleness costs")
    page.text(
        "All machines pull the topics, each learns from its own documents, and their affine maps are applied one "
        "after another. Against documents per machine, more machines should lie higher: they have seen more."
    )
    lines = []
    for count, runs in found.items():
        values = np.array([[p["likelihood"] for p in points] for points in runs])
        x = [p["documents"] for p in runs[0]]
        name = _counted(count, "machine")
        lines.append(Series(name, x, values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0)))
    page.lines("Held-out likelihood", lines, x_label="documents per machine", y_label=PER_WORD)
    level, speed_ups = speed_up(found)
    counts = [int(count) for count in found]
    page.lines(
        "Speed-up",
        [Series("simulated", counts, speed_ups), Series("perfect", counts, counts)],
        x_label="machines",
        y_label="times one machine",
        caption=f"Documents that one machine needs to a likelihood of {level:.3f} per word, over those that each of "
        "several needs. Missing where several never reach it.",
    )


def speed_up(found: dict[str, Any]) -> tuple[float, list[float | None]]:
    """The likelihood that one machine reaches in four fifths of its way, and how much sooner several reach it."""
    means = {
        count: [
            {**place[0], "likelihood": float(np.mean([point["likelihood"] for point in place]))}
            for place in zip(*runs, strict=True)
        ]
        for count, runs in found.items()
    }
    one = [point["likelihood"] for point in next(iter(means.values()))]
    level = one[0] + 0.8 * (max(one) - one[0])
    takes = [needed(points, level, "documents") for points in means.values()]
    return level, [None if take is None or takes[0] is None else takes[0] / take for take in takes]


def _counted(count: Any, what: str) -> str:
    return f"{int(count)} {what}" + ("" if int(count) == 1 else "s")
