"""A report shows what was recorded, says what is missing, and opens in a browser without a network."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError, RunFolderError
from headrace.report.build import write_report
from headrace.report.curves import (
    MOST_POINTS,
    SMOOTHED_POINTS,
    Curve,
    curve,
    drawn,
    histograms,
    measurements,
    throughput,
    wants_log,
)
from headrace.report.recorder import Recorder
from headrace.report.run_data import short_names
from headrace.report.run_folder import RunFolder
from headrace.report.time_shares import lane_shares, waiting_over_time
from headrace.report.timeline import Span, Timeline
from headrace.types import Hardware, Plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

HARDWARE = Hardware(
    cores=2,
    memory_bytes=2**34,
    available_bytes=2**33,
    gemm_core_flops=5e10,
    gemm_all_flops=9e10,
    memory_copy_bytes_per_s=1e10,
    disk_path="/data",
    disk_sequential_bytes_per_s=1e9,
    disk_random_reads_per_s=5e4,
)


def make_run(path: Path, *, lr: float = 0.1, steps: int = 20) -> RunFolder:
    """A run with every kind of thing that can be recorded."""
    folder = RunFolder.create(path)
    plan = Plan().with_("batch_size", 64, "asked for").with_("step", "eager", "there is no compiler")
    folder.write_plan(plan.with_("lr", lr, "asked for"))
    folder.write_hardware(HARDWARE)
    folder.write_config({"lr": lr, "model": "mlp"})
    with Recorder(folder, tensorboard=False) as recorder:
        for step in range(1, steps + 1):
            where = {"epoch": step / 10, "step": step, "seconds": step * 0.5, "examples": step * 64}
            recorder.metrics({"kind": "train", **where, "loss": 1 / step, "lr": lr})
            recorder.span("device", "wait", step * 0.5, step * 0.5 + 0.1)
            recorder.span("device", "step", step * 0.5 + 0.1, step * 0.5 + 0.5)
            if step % 10 == 0:
                counts = {"updates": {"cpu 0": step, "cpu 1": 2 * step}, "staleness": {"cpu 0": [3, 2, 1]}}
                recorder.metrics({"kind": "validation", **where, "loss": 2 / step, "accuracy": 0.5, **counts})
                recorder.counter("batch size/cpu 0", step * 0.5, 64 + step)
        recorder.instant("stopped", steps * 0.5, f"all {steps} steps are done")
    return folder


def figures_and_words(page: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Plot title → figure, and the page's text without the scripts."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    figures = json.loads(found.group(1)) if found else []
    words = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    titles = [html.unescape(title) for title in re.findall(r"<h3>(.*?)</h3>", words)]
    return dict(zip(titles, figures, strict=True)), html.unescape(re.sub(r"<[^>]+>", " ", words))


def test_a_report_plots_everything_that_was_recorded(tmp_path: Path) -> None:
    figures, words = figures_and_words(write_report([make_run(tmp_path / "run").path]))
    assert list(figures) == [
        "Loss over steps",
        "Loss over time",
        "Validation accuracy over steps",
        "Validation accuracy over time",
        "Validation updates over steps",
        "Validation updates over time",
        "Learning rate over steps",
        "Examples per second",
        "What each part did",
        "Waiting over time",
        "Batch size",
        "Staleness/cpu 0",
    ]
    train, validation = figures["Loss over steps"]["traces"]
    assert (train["name"], validation["name"]) == ("train", "validation")
    assert train["x"] == list(range(1, 21))
    assert train["y"] == [float(f"{1 / step:.7g}") for step in range(1, 21)]
    assert figures["Loss over time"]["traces"][0]["x"] == [step * 0.5 for step in range(1, 21)]
    assert [trace["name"] for trace in figures["Validation updates over steps"]["traces"]] == [
        "cpu 0",
        "cpu 1",
    ]
    assert figures["Examples per second"]["traces"][0]["y"] == pytest.approx([128.0] * 19)
    shares = {trace["name"]: trace["y"] for trace in figures["What each part did"]["traces"]}
    assert shares == {"step": pytest.approx([0.8]), "wait": pytest.approx([0.2])}
    assert figures["Staleness/cpu 0"]["traces"][0]["y"] == [3, 2, 1]
    for sentence in ("there is no compiler", "all 20 steps are done", "50 GFLOP/s", 'model = "mlp"'):
        assert sentence in words


def test_validation_is_drawn_beside_training_however_it_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with Recorder(folder, tensorboard=False) as recorder:
        for step in (1, 2):
            recorder.metrics({"kind": "train", "step": step, "seconds": step, "loss": 1.0})
            found = {"loss": 1.5, "validation_loss": 2.0, "validation_accuracy": 0.25}
            recorder.metrics({"kind": "epoch", "step": step, "seconds": step, **found})
    figures, words = figures_and_words(write_report([tmp_path]))
    losses = {trace["name"]: trace["y"] for trace in figures["Loss over steps"]["traces"]}
    assert losses == {"train": [1, 1], "epoch": [1.5, 1.5], "validation": [2, 2]}
    assert [trace["y"] for trace in figures["Validation accuracy over time"]["traces"]] == [[0.25, 0.25]]
    assert "loss 2, accuracy 0.25" in words


def test_runs_side_by_side_share_plots_and_show_what_differs(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", lr=0.5, steps=10)
    page = write_report([first.path, second.path], tmp_path / "both.html")
    figures, words = figures_and_words(page)
    losses = figures["Loss over steps"]["traces"]
    assert [trace["name"] for trace in losses] == [
        "a/run, train",
        "a/run, validation",
        "b/run, train",
        "b/run, validation",
    ]
    assert [trace["ink"] for trace in losses] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert re.search(r"lr\s+0\.1\s+0\.5", words)  # settings that differ
    assert re.search(r"batch_size\s+all\s+64\s+asked for", words)
    assert re.search(r"lr\s+a/run\s+0\.1\s+asked for", words)
    assert not re.search(r"model\s+mlp\s+mlp", words)


def test_a_run_without_metrics_still_gets_a_page_that_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    figures, words = figures_and_words(write_report([folder.path]))
    assert figures == {}
    assert "no metrics were recorded" in words
    assert "holds no plan.json" in words and "holds no hardware.json" in words


def test_damaged_parts_become_notes_and_damaged_metrics_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.plan_path.write_text("{", encoding="utf-8")
    with folder.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"ki')
    _, words = figures_and_words(write_report([folder.path]))
    assert "plan.json is damaged" in words
    assert "the last line of metrics.jsonl was cut off (4 bytes)" in words
    folder.metrics_path.write_text('{"ki\n{"step": 1}\n', encoding="utf-8")
    with pytest.raises(RunFolderError, match="line 1 of"):
        write_report([folder.path])


def test_a_diverged_run_shows_its_finite_part(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with Recorder(folder, tensorboard=False) as recorder:
        for step, loss in enumerate([1.0, 2.0, float("inf"), float("nan")]):
            recorder.metrics({"kind": "train", "step": step, "seconds": step, "loss": loss})
        recorder.instant("diverged", 3.0, "the loss is not finite at step 3")
    figures, words = figures_and_words(write_report([tmp_path]))
    assert figures["Loss over steps"]["traces"][0]["y"] == [1, 2]
    assert "the loss is not finite at step 3" in words and "nan" in words


def test_no_run_and_a_folder_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least one run folder"):
        write_report([])
    with pytest.raises(RunFolderError, match="is not a run folder"):
        write_report([tmp_path])


def test_the_command_line_writes_the_page_and_exits_2_for_what_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    command = [sys.executable, "-m", "headrace", "report"]
    done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    assert done.stdout == f"report: {tmp_path / 'run' / 'report.html'}\n"
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "does not exist" in done.stderr


def test_nothing_is_fetched_from_outside(tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    text = write_report([make_run(tmp_path / "run").path]).read_text(encoding="utf-8")
    assert text.count(get_plotlyjs()) == 1
    ours = text.replace(get_plotlyjs(), "")
    assert "http:" not in ours and "https:" not in ours
    references = re.findall(r'\b(?:src|href|srcset|action)\s*=\s*"([^"]*)"', ours)
    assert references == ["data:,"]
    assert not re.search(r"@import|url\(", ours)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_chromium_draws_every_plot_without_a_network(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run").path])
    figures, _ = figures_and_words(page)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --virtual-time-budget=20000"
    flags += f" --proxy-server=127.0.0.1:9 --user-data-dir={tmp_path / 'profile'} --dump-dom"
    command = [str(CHROMIUM), *flags.split(), page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert len(figures) == 12
    opened = {tag for tag in re.findall(r"<div[^>]*>", body) if "js-plotly-plot" in tag}
    drawn_ids = {re.findall(r'id="(plot-\d+)"', tag)[0] for tag in opened}
    assert drawn_ids == {f"plot-{number}" for number in range(len(figures))}
    assert body.count('class="main-svg"') >= len(figures)
    traces = [trace["type"] for figure in figures.values() for trace in figure["traces"]]
    assert body.count('class="trace scatter') == traces.count("scatter") > 0
    assert body.count('class="trace bars') == traces.count("bar") > 0
    assert body.count('class="point"') > 0
    assert "learning rate" in body and "seconds since the start" in body


def test_what_was_not_measured_is_said_and_is_no_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rates = {f.name: 0.0 for f in dataclasses.fields(Hardware) if f.name.endswith(("_flops", "_per_s"))}
    run.write_hardware(dataclasses.replace(HARDWARE, **rates))
    words = re.sub(
        r"<[^>]*>", " ", write_report([run.path]).read_text(encoding="utf-8").split("The machine")[1]
    )
    assert words.count("not measured") == 5
    assert not re.search(r"\b0 (GFLOP|GB|reads)", words)


def test_measurements_are_the_numbers_that_are_not_coordinates() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": 1, "seconds": 0.1, "loss": 0.5, "name": "x", "ok": True, "bins": [1, 2]},
        {"kind": "train", "step": 2, "updates": {"b": 1, "a": 2, "note": "x"}, "bins": [3, 4]},
        {"step": 3, "staleness": {"cpu": [1, 2]}, "empty": []},
    ]
    assert measurements(rows) == {"loss": [""], "updates": ["b", "a"]}
    assert histograms(rows) == {"bins": [3, 4], "staleness/cpu": [1, 2]}
    updates = curve(rows, "step", "updates", "a")
    assert (updates.x.tolist(), updates.y.tolist()) == ([2], [2])


@given(st.integers(MOST_POINTS + 1, 5 * MOST_POINTS), st.integers(0, 2**32 - 1))
def test_long_curves_keep_their_extremes_and_their_mean(length: int, seed: int) -> None:
    y = np.random.default_rng(seed).normal(size=length) * 1e3
    series = drawn("a", Curve(np.arange(len(y), dtype=float), y))
    assert series.low is not None and series.high is not None
    low, high, mean = (np.array(list(v)) for v in (series.low, series.high, series.y))
    assert len(mean) == SMOOTHED_POINTS
    assert low.min() == y.min() and high.max() == y.max()
    slack = 1e-6 * (1 + np.abs(y).max())
    assert np.all(low <= mean + slack) and np.all(mean <= high + slack)
    edges = np.linspace(0, len(y), SMOOTHED_POINTS + 1).astype(int)
    assert np.dot(mean, np.diff(edges)) == pytest.approx(y.sum(), abs=slack * len(y))


def test_throughput_is_exact_for_a_steady_run_and_survives_clocks_that_jump_back() -> None:
    steady = [{"seconds": s / 10, "examples": 50 * s} for s in range(1, 1000)]
    assert throughput(steady).y == pytest.approx(500.0)
    resumed = [*steady[:500], *steady[450:]]
    assert throughput(resumed).y == pytest.approx(500.0)
    assert len(throughput([])) == len(throughput(steady[:1])) == 0


def test_shares_and_waiting_add_up() -> None:
    spans = []
    for i in range(60):  # the second half waits twice as long as the first
        wait_s = 0.2 if i < 30 else 0.4
        spans += [Span("device", "wait", i, i + wait_s), Span("device", "step", i + wait_s, i + 1.0)]
    shares = lane_shares(Timeline(spans=tuple(spans)))
    assert shares == {"device": {"step": pytest.approx(0.7), "wait": pytest.approx(0.3)}}
    assert list(shares["device"]) == ["step", "wait"]
    waiting = waiting_over_time(spans, "device")
    assert waiting.y == pytest.approx([0.2] * 30 + [0.4] * 30)


def test_a_span_over_several_intervals_is_shared_among_them() -> None:
    spans = [Span("device", "step", 0.0, 30.0), Span("device", "wait for data", 30.0, 60.0)]
    assert waiting_over_time(spans, "device").y == pytest.approx([0.0] * 30 + [1.0] * 30)


def test_a_logarithmic_axis_is_for_positive_values_that_span_much() -> None:
    def of(*values: float) -> list[Curve]:
        return [Curve(np.arange(len(values), dtype=float), np.array(values))]

    assert wants_log(of(1.0, 1e-3))
    assert not wants_log(of(1.0, 0.5))
    assert not wants_log(of(1.0, 0.0))
    assert not wants_log([])


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert short_names([Path("/x/run"), Path("/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/x/run"), Path("/x/run")]) == ["run", "run (2)"]
