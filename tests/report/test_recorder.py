"""What is recorded is what is read, after a close, after a kill, and after a resume."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RunFolderError
from headrace.report import timeline
from headrace.report.recorder import Recorder
from headrace.report.run_folder import RunFolder
from headrace.report.tensorboard import ROWS_FREE, ROWS_PER_S, Allowance, evenly, scalars
from headrace.report.timeline import Counter, Instant, Span, TimelineEncoder, read_timeline


def row(step: int) -> dict[str, Any]:
    return {"kind": "train", "epoch": 0, "step": step, "loss": 1.0 / step}


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with Recorder(folder, tensorboard=False) as recorder:
        reused = {"step": 1, "loss": 0.5}
        recorder.metrics(reused)
        reused["loss"] = 99.0  # the caller may use its dictionary again at once
        recorder.metrics({"kind": "train", "step": 2, "loss": torch.tensor(float("nan"))})
        recorder.span("device", "step", 0.25, 0.5)
        recorder.span("reader", 'wait "here"', 0.5, 0.75)
        recorder.counter("batch size", 0.5, 64)
        recorder.instant("stopped", 0.75, "the loss reached its target")
        recorder.flush()
        assert len(folder.read_metrics()) == 2
    rows = folder.read_metrics()
    assert rows[0] == {"step": 1, "loss": 0.5}
    assert repr(rows[1]["loss"]) == "nan"
    read = read_timeline(folder.timeline_path)
    assert read.spans == (Span("device", "step", 0.25, 0.5), Span("reader", 'wait "here"', 0.5, 0.75))
    assert read.counters == (Counter("batch size", 0.5, 64),)
    assert read.instants == (Instant("stopped", 0.75, "the loss reached its target"),)
    assert read.note is None
    assert isinstance(json.loads(folder.timeline_path.read_text(encoding="utf-8")), list)


def test_rows_of_many_threads_all_arrive_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with Recorder(folder, tensorboard=False) as recorder:

        def work(worker: int) -> None:
            for step in range(200):
                recorder.metrics({"worker": worker, "step": step})
                recorder.span(f"worker {worker}", "step", step, step + 0.5)
                if step % 50 == 0:
                    recorder.flush()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = [(r["worker"], r["step"]) for r in folder.read_metrics()]
    assert sorted(seen) == [(worker, step) for worker in range(4) for step in range(200)]
    for worker in range(4):
        assert [step for who, step in seen if who == worker] == list(range(200))
    assert len(read_timeline(folder.timeline_path).spans) == 800


def test_a_resumed_run_has_the_metrics_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, cut = RunFolder.create(tmp_path / "whole"), RunFolder.create(tmp_path / "cut")
    with Recorder(whole, tensorboard=False) as recorder:
        for step in range(1, 9):
            recorder.metrics(row(step))
    with Recorder(cut, tensorboard=False) as recorder:
        for step in range(1, 7):
            recorder.metrics(row(step))
            recorder.span("device", "step", step, step + 1.0)
    with cut.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    with Recorder(cut, tensorboard=False, resume_at_step=4) as recorder:
        assert recorder.elapsed_before_s == 7.0
        assert recorder.notes == ["the last line of metrics.jsonl was cut off (21 bytes) and is left out"]
        for step in range(5, 9):
            recorder.metrics(row(step))
        recorder.span("reader", "read", 7.0, 8.0)  # a new lane first: the old one must keep its number
        recorder.span("device", "step", 7.0, 8.0)
    assert cut.metrics_path.read_bytes() == whole.metrics_path.read_bytes()
    read = read_timeline(cut.timeline_path)
    assert [span.lane for span in read.spans] == ["device"] * 6 + ["reader", "device"]
    assert read.lanes == ("device", "reader")
    assert [(i.name, i.t_s, i.text) for i in read.instants] == [
        ("resumed", 7.0, "the run was resumed after step 4")
    ]
    assert isinstance(json.loads(cut.timeline_path.read_text(encoding="utf-8")), list)


KILLED = """
import sys
from headrace.report.recorder import Recorder
from headrace.report.run_folder import RunFolder
recorder = Recorder(RunFolder.create(sys.argv[1]), tensorboard=False)
for step in range(1, 1_000_000_000):
    recorder.metrics({"step": step, "loss": 1 / step})
    recorder.span("device", "step", step, step + 0.5)
    if step == 2000:
        recorder.flush()
        print("flushed", flush=True)
"""


def test_a_killed_run_leaves_files_that_open_and_all_that_was_flushed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        os.kill(process.pid, signal.SIGKILL)
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.read_metrics()
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 2000
    assert len(read_timeline(folder.timeline_path).spans) >= 2000
    Recorder(folder, tensorboard=False, resume_at_step=1000).close()
    assert len(folder.read_metrics()) == 1000
    json.loads(folder.timeline_path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_timeline_cut_anywhere_can_be_read_and_continued(tmp_path: Path, cut: int) -> None:
    folder = RunFolder.create(tmp_path)
    with Recorder(folder, tensorboard=False) as recorder:
        for step in range(5):
            recorder.span("device", "step", step, step + 0.5)
    data = folder.timeline_path.read_bytes()
    folder.timeline_path.write_bytes(data[: len(data) - cut])
    assert len(read_timeline(folder.timeline_path).spans) >= 4
    with Recorder(folder, tensorboard=False, resume_at_step=0) as recorder:
        recorder.span("device", "step", 9.0, 9.5)
    json.loads(folder.timeline_path.read_text(encoding="utf-8"))
    assert read_timeline(folder.timeline_path).spans[-1] == Span("device", "step", 9.0, 9.5)


LENGTHS = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 0.7)), max_size=60)


@given(LENGTHS, st.integers(0, 20))
def test_summed_spans_keep_every_second_and_never_overlap(
    lengths: list[tuple[str, float]], detailed: int
) -> None:
    encoder = TimelineEncoder(detailed_left=detailed)
    spans, now_s = [], 0.0
    for name, length_s in lengths:
        spans.append(Span("lane", name, now_s, now_s + length_s))
        now_s += length_s
    events = [json.loads(line) for line in [*encoder.encode(spans), *encoder.finish()]]
    shown = [e for e in events if e["ph"] == "X"]
    for name in "ab":
        total_us = sum(e["dur"] for e in shown if e["name"] == name)
        told_us = 1e6 * sum(s.end_s - s.start_s for s in spans if s.name == name)
        assert total_us == pytest.approx(told_us, abs=0.1 * len(spans) + 0.1)
    counts = sum(e.get("args", {}).get("count", 1) for e in shown)
    assert counts == len(spans)
    for before, after in pairwise(shown):
        assert before["ts"] + before["dur"] <= after["ts"] + 1.0  # microseconds are rounded


def test_a_long_run_stays_small() -> None:
    encoder = TimelineEncoder()
    spans = (Span("device", "step", i * 1e-3, (i + 1) * 1e-3) for i in range(60_000))
    assert len(encoder.encode(spans)) < timeline.DETAILED_SPANS + 100


def test_a_row_that_cannot_be_written_is_raised_by_the_next_call_and_alone_is_lost(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    recorder = Recorder(folder, tensorboard=False)
    recorder.metrics({"step": 1})
    recorder.metrics({"step": 2, "loss": object()})
    recorder.metrics({"step": 3})
    with pytest.raises(RunFolderError, match="object cannot be written as JSON"):
        recorder.flush()
    recorder.close()
    assert [r["step"] for r in folder.read_metrics()] == [1, 3]


def test_a_full_disk_is_said_by_the_next_call(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    recorder = Recorder(folder, tensorboard=False)
    recorder._metrics_file.close()
    recorder._metrics_file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    recorder.metrics({"step": 1})
    with pytest.raises(RunFolderError, match=r"could not be written .*No space left on device"):
        recorder.flush()
    with pytest.raises(RunFolderError, match="No space left on device"):
        recorder.close()


def test_without_tensorboard_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with Recorder(RunFolder.create(tmp_path)) as recorder:
        recorder.metrics(row(1))
    assert recorder.notes == [
        "TensorBoard events are not written: tensorboard is not installed (pip install 'headrace[report]')"
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder.create(tmp_path)
    with Recorder(folder) as recorder:
        for step in (1, 2, 3):
            recorder.metrics(row(step))
        recorder.metrics({"kind": "validation", "step": 3, "accuracy": torch.tensor(0.5), "name": "x"})
    with Recorder(folder, resume_at_step=2) as recorder:
        recorder.metrics({**row(3), "loss": 7.0})
    events = accumulator.EventAccumulator(str(folder.tensorboard_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 7.0)]


def test_a_tensorboard_that_breaks_is_said_and_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    folder = RunFolder.create(tmp_path)
    folder.tensorboard_path.write_text("a file where the events' folder should be", encoding="utf-8")
    with Recorder(folder) as recorder:
        recorder.metrics(row(1))
        recorder.flush()
        recorder.metrics(row(2))
    assert [r["step"] for r in folder.read_metrics()] == [1, 2]
    (note,) = recorder.notes
    assert note.startswith("TensorBoard events ended: ") and note in caplog.text


def test_rows_are_thinned_evenly_and_the_last_is_kept() -> None:
    rows: list[Any] = [{"step": step} for step in range(100)]
    kept = evenly(rows, 8)
    assert len(kept) <= 8 and kept[-1] == {"step": 99}
    assert {b["step"] - a["step"] for a, b in pairwise(kept)} == {13}
    assert evenly(rows[:8], 8) == rows[:8]


def test_a_short_run_passes_whole_and_a_long_one_at_a_rate() -> None:
    allowance = Allowance(0.0)
    assert allowance.take(100, 0.0) == 100
    assert allowance.take(1000, 0.0) == ROWS_FREE - 100
    assert [allowance.take(1000, 0.0), allowance.take(5, 0.0)] == [1, 1]  # the newest is always passed on
    assert allowance.take(1000, 1.0) == ROWS_PER_S
    assert allowance.take(10_000, 1e6) == ROWS_FREE


def test_scalars_are_the_plain_numbers() -> None:
    given_row = {"kind": "train", "step": 3, "loss": 0.5, "updates": {"cpu 0": 4}, "ok": True, "all": [1, 2]}
    assert scalars(given_row) == {"loss": 0.5, "updates/cpu 0": 4.0}
