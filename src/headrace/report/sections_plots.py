"""The report's sections that are plots. Each leaves the page alone when the runs hold nothing for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.report.curves import (
    Curve,
    curve,
    drawn,
    histograms,
    measurements,
    throughput,
    wants_log,
)
from headrace.report.page import Page, Series
from headrace.report.run_data import RunData
from headrace.report.time_shares import is_wait, lane_shares, waiting_over_time

MOST_SERIES = 12
"""Of one plot; more cannot be told apart."""
VALIDATION = "validation_"
"""A measurement of this prefix is drawn beside the one without it."""
SPEED_KEYS = ("examples_per_s", "steps_per_s")

MEANINGS = {
    "loss": "Low is good. Training falls and validation rises: the model begins to learn by heart.",
    "accuracy": "The share that is right; high is good.",
    "rounds": "How often each buffer was used before the next. 1 is fresh data only; more saves reading.",
    "lr": "The learning rate. Too high and the loss jumps or diverges; too low and it hardly falls.",
    "grad_norm": "The length of the gradient. A sudden high value comes before divergence.",
    "wait_s": "Seconds that the device waited for data. High means that reading is the limit.",
    "staleness": "Updates by others between a worker's read and its write. High values slow convergence. Of the bars "
    "at the end, bar 0 counts writes that missed none, bar n those that missed 2^(n-1) to 2^n - 1.",
    "updates": "How often parameters were updated, by all workers together and by each. A worker far above the others "
    "drowns what they learn.",
    "batch": "Rows of one update of each worker; adaptive runs change them until all update equally often.",
    "utilisation": "Share of the time that a worker was at work. Low: it waited for work, or for others.",
    "return": "Reward of an episode; high is good.",
    "perplexity": "How surprised the model is by held-out data; low is good.",
}
"""What a high and a low value mean, for names that say it."""

TIME_LABEL = "seconds since the start"
X_AXES = (("step", "steps", "step"), ("seconds", "time", TIME_LABEL))
"""Key, word in the title, label."""

Runs = Sequence[RunData]


@dataclass(frozen=True)
class Drawn:
    """One curve of a plot; curves of one run share a colour when the plot holds several runs."""

    name: str
    curve: Curve
    run: int
    is_validation: bool = False


def add_metrics(page: Page, runs: Runs) -> None:
    """Every measurement over steps and over time, the loss first; the learning rate over steps alone."""
    names = (key.removeprefix(VALIDATION) for run in runs for key in measurements(run.rows))
    keys = [key for key in dict.fromkeys(names) if key not in SPEED_KEYS]
    if not keys:
        return
    page.heading("Loss and metrics")
    for key in sorted(keys, key=lambda key: (key != "loss", key == "lr")):
        for x_key, word, x_label in X_AXES[:1] if key == "lr" else X_AXES:
            curves = list(_curves(runs, x_key, key))
            caption = MEANINGS.get(key, "") if x_key == "step" else None
            is_validation = all(one.is_validation for one in curves)
            title = _title(f"{VALIDATION}{key}" if is_validation else key)
            _add_plot(page, f"{title} over {word}", curves, x_label, _words(key), caption)


def add_speed(page: Page, runs: Runs) -> None:
    """Examples per second from the counts in the rows, which is steadier than what each row says of itself."""
    recorded = {key: list(_curves(runs, "seconds", key)) for key in SPEED_KEYS}
    recorded["examples_per_s"] = list(_counted_speeds(runs)) or recorded["examples_per_s"]
    if not any(recorded.values()):
        return
    page.heading("Throughput")
    meanings = {
        "examples_per_s": "High is good. Dips are validation, checkpoints, or waiting for data.",
        "steps_per_s": "High is good; it falls as batches grow.",
    }
    for key, curves in recorded.items():
        _add_plot(page, _title(key), curves, TIME_LABEL, _words(key), meanings[key], log_y=False)


def add_waiting(page: Page, runs: Runs) -> None:
    """What each lane did with its time, and when it waited."""
    shares = {(run.name, lane): parts for run in runs for lane, parts in lane_shares(run.timeline).items()}
    if not shares:
        return
    page.heading("Where the time went")
    shown = list(shares.items())[: 2 * MOST_SERIES]
    labels = [lane if len(runs) == 1 else f"{run}: {lane}" for (run, lane), _ in shown]
    names = list(dict.fromkeys(name for _, parts in shown for name in parts))
    series = [Series(name, None, [parts.get(name, 0.0) for _, parts in shown]) for name in names]
    told = (
        "Share of the run's time. A device that waits much is short of data; a reader that waits much is "
        "ahead of it, which is what one wants. What is missing to 1 was not recorded."
    )
    if len(shares) > len(shown):
        told += f" The first {len(shown)} of {len(shares)} lanes are drawn."
    page.bars("What each part did", labels, series, y_label="share of time", stacked=True, caption=told)
    told = "Near 0 is good for the device. A rise tells when something began to be short."
    waits = list(_waits(runs))
    share = (0.0, 1.0)
    _add_plot(page, "Waiting over time", waits, TIME_LABEL, "share of time waited", told, y_range=share)
    page.html("<p>Open a run's <code>timeline.json</code> in Perfetto to see every span.</p>")


def add_counters(page: Page, runs: Runs) -> None:
    """Counters of the timeline; the part of a name before "/" is the plot, the rest the curve."""
    plots: dict[str, list[Drawn]] = {}
    for number, run in enumerate(runs):
        for name in dict.fromkeys(counter.name for counter in run.timeline.counters):
            plot, _, entry = name.partition("/")
            rows = [{"seconds": c.t_s, name: c.value} for c in run.timeline.counters if c.name == name]
            label = _label(runs, run, entry) or name
            plots.setdefault(plot, []).append(Drawn(label, curve(rows, "seconds", name), number))
    if plots:
        page.heading("Counters")
    for plot, curves in plots.items():
        _add_plot(page, _title(plot), curves, TIME_LABEL, _words(plot), MEANINGS.get(plot, ""))


def add_histograms(page: Page, runs: Runs) -> None:
    """The last list that each name recorded, as bars over its positions."""
    found = [(run, histograms(run.rows)) for run in runs]
    names = list(dict.fromkeys(name for _, lists in found for name in lists))
    if names:
        page.heading("Distributions at the end")
    for name in names:
        having = [(run.name, lists[name]) for run, lists in found if name in lists]
        length = max(len(values) for _, values in having)
        series = [Series(run, None, [*values, *[0.0] * (length - len(values))]) for run, values in having]
        labels = [str(position) for position in range(length)]
        meaning = MEANINGS.get(name.partition("/")[0], "")
        page.bars(_title(name), labels, series, y_label="recorded value", x_label="position", caption=meaning)


def _curves(runs: Runs, x_key: str, key: str) -> Iterator[Drawn]:
    """One curve for each run, kind and nested entry that has ``key``, and for its validation."""
    kinds = {kind for run in runs for kind in run.kinds if key in measurements(run.of_kind(kind))}
    for number, run in enumerate(runs):
        for kind in run.kinds:
            rows = run.of_kind(kind)
            found = measurements(rows)
            told = kind if len(kinds) > 1 else ""
            sources = [(key, told, entry) for entry in found.get(key, [])]
            sources += [
                (f"{VALIDATION}{key}", "validation", entry) for entry in found.get(VALIDATION + key, [])
            ]
            for source, told, entry in sources:
                one = curve(rows, x_key, source, entry)
                if len(one):
                    is_validation = "validation" in (kind, told)
                    yield Drawn(_label(runs, run, told, entry) or kind, one, number, is_validation)


def _counted_speeds(runs: Runs) -> Iterator[Drawn]:
    """From the training rows where there are some, else from all."""
    for number, run in enumerate(runs):
        found = throughput(run.of_kind("train") or run.rows)
        if len(found):
            yield Drawn(run.name, found, number)


def _waits(runs: Runs) -> Iterator[Drawn]:
    for number, run in enumerate(runs):
        for lane in dict.fromkeys(span.lane for span in run.timeline.spans if is_wait(span)):
            yield Drawn(_label(runs, run, lane), waiting_over_time(run.timeline.spans, lane), number)


def _add_plot(
    page: Page,
    title: str,
    curves: Sequence[Drawn],
    x_label: str,
    y_label: str,
    meaning: str | None,
    log_y: bool | None = None,
    y_range: tuple[float, float] | None = None,
) -> None:
    """``meaning`` None: no caption, the plot beside it has the same. ``log_y`` None: as the values ask."""
    if not curves:
        return
    shown = curves[:MOST_SERIES]
    told = [meaning] if meaning else []
    if len(curves) > len(shown):
        told.append(f"The first {len(shown)} of {len(curves)} curves are drawn.")
    is_shared = len({one.run for one in shown}) > 1
    series = [drawn(one.name, one.curve, one.run if is_shared else None) for one in shown]
    if any(one.low is not None for one in series):
        told.append("Lines are means of neighbouring rows; bands reach from the least to the greatest.")
    is_log = wants_log([one.curve for one in shown]) if log_y is None and y_range is None else bool(log_y)
    caption = "" if meaning is None else " ".join(told)
    page.lines(title, series, x_label, y_label, log_y=is_log, caption=caption, y_range=y_range)


def _label(runs: Runs, run: RunData, *parts: str) -> str:
    """The run's name where there are several, and the parts that are not empty."""
    return ", ".join(part for part in (run.name if len(runs) > 1 else "", *parts) if part)


def _words(key: str) -> str:
    """A key as words, with its unit: wait_s becomes wait (s)."""
    if key == "lr":
        return "learning rate"
    if key.endswith("_per_s"):
        return key.removesuffix("_per_s").replace("_", " ") + " per second"
    for suffix, unit in (("_s", "s"), ("_bytes", "bytes")):
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')} ({unit})"
    return key.replace("_", " ")


def _title(key: str) -> str:
    words = _words(key)
    return words[:1].upper() + words[1:]
