"""The pipeline under forced interleavings: what is published is whole, what is held does not change."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.ahead import ReadAhead
from headrace.buffer.cook import SpanCook
from headrace.buffer.passes import Ranges, row_numbers
from headrace.buffer.pipeline import Pipeline
from headrace.buffer.ring import Ring
from headrace.buffer.slots import Lane, Slot
from headrace.buffer.stage import DeviceStage
from headrace.errors import DataError, WorkerError
from headrace.source import open_source
from headrace.types import Spanned

_spec = importlib.util.spec_from_file_location("sequencer", Path(__file__).parent / "sequencer.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
Sequencer = _module.Sequencer

ROWS = 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = np.arange(ROWS * 64, dtype=np.int32).reshape(ROWS, 64)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(ROWS, dtype=np.int32))
    return tmp_path


def steps(count: int = 4) -> list[tuple[Any, Ranges]]:
    """Buffers of a thousand rows, each of four blocks that are no neighbours."""
    buffers = []
    for k in range(count):
        first = np.arange(4) * 1000 + 250 * (k % 4)
        ranges = np.stack((first, first + 250), axis=1)
        buffers.append((ranges, ranges))
    return buffers


def made(
    folder: Path,
    pause: Any,
    *,
    slots: int = 2,
    threads: int = 2,
    plan: Any = None,
    start: bool = True,
    **options: Any,
) -> Pipeline:
    source = open_source(folder)
    assert isinstance(source, Spanned)
    cook = SpanCook(source.stored(), source.spans(), block=250, direct=options.pop("direct", False))
    memory = [Slot(cook.lanes, 1000) for _ in range(slots)]
    pipeline = Pipeline(cook, plan or steps(), memory, threads=threads, pause=pause, **options)
    if start:
        pipeline.start()
    return pipeline


def staged_over(pipeline: Pipeline, pause: Any = lambda _: None) -> DeviceStage:
    """The copier over a pipeline, its device being memory too."""
    return DeviceStage(pipeline, pipeline.slots[0].lanes, 1000, torch.device("cpu"), pause=pause)


def is_whole(columns: dict[str, torch.Tensor], ranges: Ranges) -> bool:
    rows = torch.from_numpy(row_numbers(ranges)).int()
    wanted = rows[:, None] * 64 + torch.arange(64, dtype=torch.int32)
    return columns["x"][: len(rows)].equal(wanted) and columns["y"][: len(rows)].equal(rows)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_all_buffers_come_whole_and_in_order(folder: Path, direct: bool, staged: bool) -> None:
    pipeline = made(folder, lambda _: None, direct=direct, threads=4, plan=steps(9), start=False)
    stage = staged_over(pipeline) if staged else pipeline
    stage.start()
    for ranges, _ in steps(9):
        loaded = stage.take()
        assert loaded is not None
        assert loaded.key is not None
        assert (loaded.key == ranges).all()
        assert is_whole(loaded.columns, ranges)
        stage.release(loaded)
    assert stage.take() is None
    stage.close()


def test_a_buffer_is_not_published_while_one_job_is_open(folder: Path) -> None:
    sequencer = Sequencer("read")
    pipeline = made(folder, sequencer, slots=1, threads=1)
    # One job reads x and one gathers y: let the first pass and hold the second.
    sequencer.until("read", 1)
    assert not pipeline.is_full()
    sequencer.let("read")
    sequencer.until("read", 2)
    assert sequencer.arrived["done"] == 1
    assert not pipeline.is_full(), "published before it was filled"
    sequencer.open("read")
    loaded = pipeline.take()
    assert loaded is not None
    assert is_whole(loaded.columns, steps()[0][0])
    pipeline.close()


def test_a_held_buffer_does_not_change_however_far_the_readers_run(folder: Path) -> None:
    sequencer = Sequencer()
    pipeline = made(folder, sequencer)
    held = pipeline.take()
    assert held is not None
    # Both slots' jobs are done, so the readers have nothing left but to overwrite what is held.
    sequencer.until("done", 4)
    pipeline.take()
    assert is_whole(held.columns, steps()[0][0]), "the slot was reused while it was held"
    assert sequencer.arrived["read"] == 4, "readers were given work without a free slot"
    pipeline.release(held)
    sequencer.until("done", 6)
    assert not is_whole(held.columns, steps()[0][0])
    pipeline.close()


def test_a_host_slot_is_not_refilled_before_it_is_copied(folder: Path) -> None:
    sequencer = Sequencer("copied")
    pipeline = made(folder, sequencer, start=False)
    stage = staged_over(pipeline, sequencer)
    stage.start()
    sequencer.until("copied", 1)
    sequencer.until("done", 4)
    assert sequencer.arrived["release"] == 0, "the host slot was freed before its copy was complete"
    assert sequencer.arrived["read"] == 4
    sequencer.open("copied")
    for ranges, _ in steps():
        loaded = stage.take()
        assert loaded is not None
        assert is_whole(loaded.columns, ranges)
        stage.release(loaded)
    stage.close()


def test_a_device_slot_is_not_overwritten_while_it_is_held(folder: Path) -> None:
    sequencer = Sequencer("slot")
    stage = staged_over(made(folder, sequencer, start=False), sequencer)
    stage.start()
    sequencer.let("slot", 2)
    first, second = stage.take(), stage.take()
    assert first is not None
    assert second is not None
    sequencer.until("slot", 3)
    # The copier stands before the slots that are free, with the third buffer in its hands.
    assert stage._free.empty(), "a slot that is held was given back"
    sequencer.open("slot")
    sequencer.until("done", 8)
    assert sequencer.arrived["copied"] == 2, "a third buffer was copied into a slot that is held"
    assert is_whole(first.columns, steps()[0][0])
    assert is_whole(second.columns, steps()[1][0])
    stage.release(first)
    sequencer.until("copied", 3)
    assert is_whole(second.columns, steps()[1][0])
    stage.close()


@pytest.mark.parametrize("closing", ["read", "done", "release"])
def test_closing_ends_every_thread_wherever_it_is(folder: Path, closing: str) -> None:
    before = threading.active_count()
    sequencer = Sequencer(closing)
    pipeline = made(folder, sequencer, start=False)
    stage = staged_over(pipeline, sequencer)
    stage.start()
    sequencer.until(closing, 1)
    opener = threading.Timer(0.05, sequencer.open, [closing])
    opener.start()
    stage.close()
    opener.join()
    assert threading.active_count() == before
    assert stage.take() is None
    stage.close()


def test_a_file_that_changes_during_the_run_is_named(folder: Path) -> None:
    pipeline = made(folder, lambda _: None, plan=steps(), slots=1)
    first = pipeline.take()
    assert first is not None
    with (folder / "x.npy").open("rb+") as file:
        file.truncate(128 + 64 * 4 * 3800)
    pipeline.release(first)
    with pytest.raises(DataError, match=r"x\.npy had .* bytes when it was opened"):
        pipeline.take()
    assert pipeline.take() is None
    pipeline.close()


def test_positions_that_cannot_be_read_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.buffer.direct import FileReader

    real = FileReader._read_cached

    def broken(self: FileReader, piece: Any, into: memoryview, done: int) -> None:
        if piece.offset == 128 + 64 * 4 * 2000:
            raise OSError(5, "Input/output error")
        real(self, piece, into, done)

    monkeypatch.setattr(FileReader, "_read_cached", broken)
    skipping = made(folder, lambda _: None, on_error="skip")
    loaded = skipping.take()
    assert loaded is not None
    assert loaded.bad == ((500, 750),)
    assert "x.npy could not be read at byte 512128" in str(loaded.failures[0])
    skipping.close()
    raising = made(folder, lambda _: None)
    with pytest.raises(DataError, match="at byte 512128"):
        raising.take()
    raising.close()


def test_other_exceptions_in_a_reader_come_to_the_consumer(folder: Path) -> None:
    source = open_source(folder)

    class Broken:
        columns = source.columns
        origin = "a broken source"

        def __len__(self) -> int:
            return ROWS

        def read(self, rows: Any, out: Any = None) -> Any:
            raise ZeroDivisionError("no")

    ahead = ReadAhead(Broken(), steps(), torch.device("cpu"))
    ahead.start()
    with pytest.raises(
        WorkerError, match="1000 rows of a broken source, the first of them row 0, failed: Zero"
    ):
        ahead.take()
    assert ahead.take() is None
    ahead.close()


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=80))
@settings(deadline=None)
def test_the_ring_keeps_its_invariants(slots: int, moves: list[int]) -> None:
    ring = Ring(slots)
    begun, taken, next_out = [], [], 0
    for move in moves:
        if move == 0 and (fill := ring.begin(len(begun), 2)) is not None:
            begun.append(fill)
        elif move == 1 and (open_fills := [f for f in begun if f.jobs]):
            ring.job_done(open_fills[-1])
        elif move == 2 and (fill := ring.take()) is not None:
            assert fill.jobs == 0
            assert fill.key == next_out
            next_out += 1
            taken.append(fill)
        elif move == 3 and taken:
            ring.release(taken.pop(0))
        in_use = [fill.slot for fill in ring.begun] + list(ring.taken) + list(ring.free)
        assert sorted(in_use) == list(range(slots))


def test_slots_declare_what_they_take() -> None:
    slot = Slot((Lane("x", torch.float32, (1000,)), Lane("y", torch.int64, ())), 1000)
    assert 4_008_000 <= slot.nbytes <= 4_008_000 + 4 * 4096
    views = slot.tensors(10, {"x": 128, "y": 0})
    assert views["x"].shape == (10, 1000)
    assert views["x"].data_ptr() == slot.address("x") + 128
