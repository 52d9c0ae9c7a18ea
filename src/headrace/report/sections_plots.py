"""The report's sections that are plots. Each leaves the page alone when the runs hold nothing for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.report.curves import (
    MOST_POINTS,
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
SPEED_KEYS = ("examples_per_s", "steps_per_s")

MEANINGS = {
    "loss": "Low is good. Training falls and validation rises: the model begins to learn by heart.",
    "accuracy": "The share that is right; high is good.",
    "lr": "The learning rate. Too high and the loss jumps or diverges; too low and it hardly falls.",
    "grad_norm": "The length of the gradient. A sudden high value comes before divergence.",
    "wait_s": "Seconds that the device waited for data. High means that reading is the limit.",
    "staleness": "Updates by others between a worker's read and its write. High values slow convergence.",
    "return": "Reward of an episode; high is good.",
    "perplexity": "How surprised the model is by held-out data; low is good.",
}
"""What a high and a low value mean, for names that say it."""

Runs = Sequence[RunData]
Named = tuple[str, Curve]


def add_metrics(page: Page, runs: Runs) -> None:
    """Every measurement over steps and over time, the loss first."""
    keys = list(dict.fromkeys(key for run in runs for key in measurements(run.rows)))
    keys = [key for key in keys if key not in SPEED_KEYS]
    if not keys:
        return
    page.heading("Loss and metrics")
    for key in sorted(keys, key=lambda key: key != "loss"):
        for x_key, x_label in (("step", "step"), ("seconds", "seconds since the start")):
            named = list(_curves(runs, x_key, key))
            _add_plot(page, f"{_title(key)} over {x_key}", named, x_label, key, MEANINGS.get(key, ""))


def add_speed(page: Page, runs: Runs) -> None:
    """Examples per second, as recorded or from the counts in the rows."""
    recorded = {key: list(_curves(runs, "seconds", key)) for key in SPEED_KEYS}
    if not recorded["examples_per_s"]:
        kinds = {kind for run in runs for kind in run.kinds if kind != "validation"}
        recorded["examples_per_s"] = [
            (_label(runs, run, kind, len(kinds)), throughput(run.of_kind(kind)))
            for run in runs
            for kind in run.kinds
            if kind in kinds
        ]
    recorded = {key: [pair for pair in named if len(pair[1])] for key, named in recorded.items()}
    if not any(recorded.values()):
        return
    page.heading("Throughput")
    meanings = {
        "examples_per_s": "High is good. Dips are validation, checkpoints, or waiting for data.",
        "steps_per_s": "High is good; it falls as batches grow.",
    }
    for key, named in recorded.items():
        _add_plot(page, _title(key), named, "seconds since the start", key, meanings[key])


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
    waits = list(_waits(runs))
    told = "Near 0 is good for the device. A rise tells when something began to be short."
    _add_plot(page, "Waiting over time", waits, "seconds since the start", "share of time waited", told)
    page.html("<p>Open a run's <code>timeline.json</code> in Perfetto to see every span.</p>")


def add_counters(page: Page, runs: Runs) -> None:
    """Counters of the timeline; the part of a name before "/" is the plot, the rest the curve."""
    plots: dict[str, list[Named]] = {}
    for run in runs:
        for name in dict.fromkeys(counter.name for counter in run.timeline.counters):
            plot, _, entry = name.partition("/")
            rows = [{"seconds": c.t_s, name: c.value} for c in run.timeline.counters if c.name == name]
            label = _joined([run.name if len(runs) > 1 else "", entry]) or name
            plots.setdefault(plot, []).append((label, curve(rows, "seconds", name)))
    if plots:
        page.heading("Counters")
    for plot, named in plots.items():
        _add_plot(page, _title(plot), named, "seconds since the start", plot, MEANINGS.get(plot, ""))


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


def _curves(runs: Runs, x_key: str, key: str) -> Iterator[Named]:
    """One curve for each run, kind and nested entry that has ``key``."""
    kinds = {kind for run in runs for kind in run.kinds if key in measurements(run.of_kind(kind))}
    for run in runs:
        for kind in run.kinds:
            rows = run.of_kind(kind)
            for entry in measurements(rows).get(key, []):
                found = curve(rows, x_key, key, entry)
                if len(found):
                    yield _joined([_label(runs, run, kind, len(kinds)), entry]), found


def _waits(runs: Runs) -> Iterator[Named]:
    for run in runs:
        lanes = dict.fromkeys(span.lane for span in run.timeline.spans if is_wait(span))
        for lane in lanes:
            label = _joined([run.name if len(runs) > 1 else "", lane])
            yield label, waiting_over_time(run.timeline.spans, lane)


def _add_plot(
    page: Page, title: str, named: Sequence[Named], x_label: str, y_label: str, meaning: str
) -> None:
    if not named:
        return
    curves = [one for _, one in named[:MOST_SERIES]]
    told = [meaning] if meaning else []
    if len(named) > MOST_SERIES:
        told.append(f"The first {MOST_SERIES} of {len(named)} curves are drawn.")
    if any(len(one) > MOST_POINTS for one in curves):
        told.append("Lines are means of neighbouring rows; the band reaches from the least to the greatest.")
    series = [drawn(name, one) for name, one in named[:MOST_SERIES]]
    page.lines(title, series, x_label, y_label, log_y=wants_log(curves), caption=" ".join(told))


def _label(runs: Runs, run: RunData, kind: str, kinds: int) -> str:
    """As much as is needed to tell the curves of a plot apart."""
    return _joined([run.name if len(runs) > 1 else "", kind if kinds > 1 else ""]) or kind


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part)


def _title(key: str) -> str:
    words = {
        "lr": "learning rate",
        "examples_per_s": "examples per second",
        "steps_per_s": "steps per second",
    }
    text = words.get(key, key.replace("_", " "))
    return text[:1].upper() + text[1:]
