"""The report's sections that are words and tables. Each leaves the page alone when it has nothing to say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from headrace.report.curves import COORDINATES
from headrace.report.page import Page
from headrace.report.progress import duration, rate
from headrace.report.run_data import RunData
from headrace.report.time_shares import extent_s
from headrace.report.toml import dump_toml
from headrace.types import Hardware

Runs = Sequence[RunData]

_GIB = 2.0**30


def add_summary(page: Page, runs: Runs) -> None:
    """One row per run, and what could not be read."""
    head = ["run", "steps", "epochs", "time", "examples/s", "first loss", "last loss", "last validation"]
    caption = (
        "Examples per second count the whole time, validation and checkpoints included; high is good. "
        "A low last loss is good as long as the validation follows it."
    )
    page.table(head, [_summary_row(run) for run in runs], caption=caption)
    for run in runs:
        for note in run.notes:
            page.html(f'<p class="note">{escape(run.name)}: {escape(note)}.</p>')


def add_events(page: Page, runs: Runs) -> None:
    """Resumes, stops, fallbacks and divergence, in the order in which they happened."""
    rows = [
        [run.name, duration(event.t_s), event.name, event.text]
        for run in runs
        for event in sorted(run.timeline.instants, key=lambda instant: instant.t_s)
    ]
    if rows:
        page.heading("Events")
        page.table(["run", "at", "event", "what happened"], rows)


def add_plan(page: Page, runs: Runs) -> None:
    """Every decision with its reason; where runs differ, each one's."""
    names = list(dict.fromkeys(decision.name for run in runs for decision in run.plan.decisions))
    if not names:
        return
    page.heading("The plan, and why")
    rows = [row for name in names for row in _plan_rows(runs, name)]
    if len(runs) == 1:
        page.table(["decision", "value", "reason"], [row[:1] + row[2:] for row in rows])
    else:
        page.table(["decision", "runs", "value", "reason"], rows)


def add_hardware(page: Page, runs: Runs) -> None:
    """The machines as measured."""
    having = [run for run in runs if run.hardware is not None]
    if not having:
        return
    page.heading("The machine" if len(having) == 1 else "The machines")
    head = ["measured", *(run.name if len(runs) > 1 else "value" for run in having), "what it means"]
    rows = [
        [name, *(_shown(read, run.hardware) for run in having if run.hardware), meaning]
        for name, read, meaning in HARDWARE_ROWS
    ]
    page.table(head, [row for row in rows if any(cell != "–" for cell in row[1:-1])])


def add_settings(page: Page, runs: Runs) -> None:
    """What differs between the runs, and each one's whole configuration."""
    having = [run for run in runs if run.config]
    if not having:
        return
    page.heading("Settings")
    if len(having) > 1:
        flat = [_flat(run.config) for run in having]
        keys = list(dict.fromkeys(key for one in flat for key in one))
        rows = [[key, *(str(one.get(key, "–")) for one in flat)] for key in keys]
        differing = [row for row in rows if len(set(row[1:])) > 1]
        page.table(["setting", *(run.name for run in having)], differing, caption="Settings that differ.")
    for run in having:
        text = escape(dump_toml(run.config))
        title = f"config.toml of {escape(run.name)}"
        page.html(f"<details><summary>{title}</summary><pre><code>{text}</code></pre></details>")


def _summary_row(run: RunData) -> list[Any]:
    train = [row for row in run.rows if row.get("kind") != "validation" and "step" in row]
    last = train[-1] if train else {}
    losses = [row["loss"] for row in train if "loss" in row]
    seconds = float(last.get("seconds", extent_s(run.timeline) if run.timeline.spans else 0.0))
    speed = rate(last["examples"] / seconds) if seconds > 0 and "examples" in last else "–"
    return [
        run.name,
        last.get("step", "–"),
        last.get("epoch", "–"),
        duration(seconds),
        speed,
        *(_number(loss) for loss in (losses[:1] + losses[-1:] if losses else ["–", "–"])),
        next(filter(None, map(_validation, reversed(run.rows))), "–"),
    ]


def _validation(row: Mapping[str, Any]) -> str:
    """The validation numbers of a row, or nothing."""
    plain = {key: value for key, value in row.items() if isinstance(value, int | float)}
    if row.get("kind") == "validation":
        found = {key: value for key, value in plain.items() if key not in COORDINATES}
    else:
        found = {k.removeprefix("validation_"): v for k, v in plain.items() if k.startswith("validation_")}
    return ", ".join(f"{key} {_number(value)}" for key, value in found.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _plan_rows(runs: Runs, name: str) -> list[list[str]]:
    """One row for each different decision of that name, with the runs that took it."""
    takers: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for decision in run.plan.decisions:
            if decision.name == name:
                takers.setdefault((_value(decision.value), decision.reason), []).append(run.name)
    return [
        [name, "all" if len(who) == len(runs) else ", ".join(who), value, reason]
        for (value, reason), who in takers.items()
    ]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _shown(read: Callable[[Hardware], str], hardware: Hardware) -> str:
    try:
        return read(hardware)
    except IndexError:
        return "–"


NOT_MEASURED = "not measured (headrace probe does)"


def _flops(value: float) -> str:
    if not value:
        return NOT_MEASURED
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _bytes_per_s(value: float) -> str:
    if not value:
        return NOT_MEASURED
    return f"{value / 1e9:.3g} GB/s" if math.isfinite(value) else "–"


HARDWARE_ROWS: list[tuple[str, Callable[[Hardware], str], str]] = [
    ("cores", lambda h: str(h.cores), "More cores read, decode and train beside one another."),
    ("memory", lambda h: f"{h.memory_bytes / _GIB:.1f} GiB", "High lets data stay in memory."),
    ("product of matrices, one core", lambda h: _flops(h.gemm_core_flops), "High: a CPU worker is fast."),
    (
        "product of matrices, all cores",
        lambda h: _flops(h.gemm_all_flops),
        "Near cores times one core is good; lower means that they share caches or memory.",
    ),
    (
        "copying in memory",
        lambda h: _bytes_per_s(h.memory_copy_bytes_per_s),
        "Low slows gathering of batches.",
    ),
    (
        "disk, in sequence",
        lambda h: _bytes_per_s(h.disk_sequential_bytes_per_s),
        "Low: data beyond memory comes slower than it is used; buffer more and use it more often.",
    ),
    (
        "disk, at random",
        lambda h: f"{rate(h.disk_random_reads_per_s)} reads/s" if h.disk_random_reads_per_s else NOT_MEASURED,
        "Low means that examples should be read in ranges, not one by one.",
    ),
    ("accelerator", lambda h: h.accelerators[0].name, "The first device."),
    (
        "its memory",
        lambda h: f"{h.accelerators[0].memory_bytes / _GIB:.1f} GiB",
        "High lets data and model stay on the device.",
    ),
    (
        "its products, fp32",
        lambda h: _flops(h.accelerators[0].gemm_fp32_flops),
        "High: full precision is fast.",
    ),
    (
        "its products, TF32",
        lambda h: _flops(h.accelerators[0].gemm_tf32_flops),
        "High: use it where allowed.",
    ),
    ("its products, bf16", lambda h: _flops(h.accelerators[0].gemm_bf16_flops), "High: bf16 pays."),
    (
        "to it, pinned memory",
        lambda h: _bytes_per_s(h.accelerators[0].pinned_bytes_per_s),
        "Low means that moving data is the limit.",
    ),
    (
        "to it, pageable memory",
        lambda h: _bytes_per_s(h.accelerators[0].pageable_bytes_per_s),
        "Much lower than pinned is usual; it is why buffers are pinned.",
    ),
    (
        "starting a kernel",
        lambda h: (
            f"{h.accelerators[0].launch_s * 1e6:.1f} µs" if h.accelerators[0].launch_s else NOT_MEASURED
        ),
        "High makes small steps slow; captured steps avoid it.",
    ),
    (
        "compiler",
        lambda h: h.compiler or "–",
        "Without one, torch.compile falls back to eager steps on a CPU.",
    ),
    ("torch", lambda h: h.torch_version or "–", ""),
    ("measured at", lambda h: h.measured_at or "–", ""),
]
"""What is shown of `Hardware`: name, how to read it, what high and low mean."""
