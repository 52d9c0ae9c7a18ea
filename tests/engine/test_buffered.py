"""The buffered loader as a user meets it: faults, interruption, memory, rounds that adapt."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.buffer.slots import Slot
from headrace.engine.loader import Loader
from headrace.errors import DataError, OptionError, WorkerError
from headrace.source import open_source

ROWS = 5000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = np.arange(ROWS, dtype=np.float32)[:, None] * np.ones((1, 50), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (np.arange(ROWS) * 7 % 10).astype(np.uint8))
    return tmp_path


def loader(folder: Any, **options: Any) -> Loader:
    return Loader(folder, **{"batch_size": 100, "buffer": 800 * 208, "block": 40, "device": "cpu", **options})


def readers() -> list[str]:
    """Our threads that run. One that was interrupted before its start has no identity, and never runs."""
    return [t.name for t in threading.enumerate() if t.name.startswith("headrace") and t.ident is not None]


def open_files(folder: Path) -> list[str]:
    """What of the folder this process holds open; other files come and go with other tests' garbage."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("direct", [True, False])
def test_rows_and_labels_stay_together(folder: Path, direct: bool) -> None:
    with loader(folder, direct=direct) as batches:
        assert batches.plan["residence"] == "buffered"
        for _ in range(2):
            seen = []
            for x, y in batches:
                assert x.shape == (100, 50)
                assert (x[:, 0].long() * 7 % 10).equal(y)
                assert x.min(1).values.equal(x.max(1).values)
                seen += x[:, 0].tolist()
            assert sorted(seen) == list(range(ROWS))


def test_columns_of_another_stored_type_are_served_as_promised(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3000, dtype=np.float64).reshape(1000, 3))
    np.save(tmp_path / "y.npy", np.arange(1000, dtype=np.int16))
    with Loader(tmp_path, 64, buffer=100 * 26, device="cpu") as batches:
        for x, y in batches:
            assert x.dtype == torch.float32
            assert y.dtype == torch.int64
            assert x[:, 0].equal(3.0 * y)


def test_tensors_beyond_the_device_pass_through_buffers_too() -> None:
    x = torch.randn(1000, 7)
    with Loader((x, torch.arange(1000)), 30, buffer=120 * 36, device="cpu") as batches:
        assert all(values.equal(x[rows]) for values, rows in batches)


def test_breaking_off_leaves_no_thread_and_no_file(folder: Path) -> None:
    batches = loader(folder)
    threads, files = threading.active_count(), open_files(folder)
    for _ in batches:
        break
    assert threading.active_count() == threads
    assert open_files(folder) == files
    assert len(list(batches)) == len(batches)
    batches.close()
    assert (threading.active_count(), open_files(folder)) == (threads, files)


def test_letting_go_of_a_loader_ends_its_readers(folder: Path) -> None:
    threads = threading.active_count()
    batches = loader(folder)
    list(batches)
    assert threading.active_count() > threads, "readers should be at work on the next pass"
    del batches
    assert threading.active_count() == threads


def interrupt_fifty_times(folder: Path) -> int:
    """Ctrl-C at fifty moments; each time threads, slots and files are as before. Returns how many arrived."""

    def held() -> list[Any]:
        return [o for o in gc.get_objects() if type(o) is Slot and (o.memory or o._registered)]

    batches = loader(folder)
    list(batches)
    batches.close()
    files, interrupted = open_files(folder), 0
    for k in range(50):
        ctrl_c = threading.Timer(0.0005 + 0.0004 * k, os.kill, [os.getpid(), signal.SIGINT])
        try:
            ctrl_c.start()
            # An interrupt that falls into a callback of the garbage collector is lost in Python: hence a bound.
            for _ in range(50):
                for _ in batches:
                    pass
            ctrl_c.join()
        except KeyboardInterrupt:
            interrupted += 1
        ctrl_c.join()
        batches.close()
        assert readers() == []
        assert k % 10 or held() == []
        assert open_files(folder) == files
    assert len(list(batches)) == len(batches)
    batches.close()
    return interrupted


def test_fifty_interrupts_leave_nothing_behind(folder: Path) -> None:
    """In a process of its own: signals, threads and open files are then the loader's alone."""
    program = textwrap.dedent("""
        import importlib.util, pathlib, sys
        spec = importlib.util.spec_from_file_location("buffered", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.interrupt_fifty_times(pathlib.Path(sys.argv[2])))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, __file__, str(folder)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 40


def test_memory_stays_within_what_was_declared(tmp_path: Path) -> None:
    """Peak memory of a process that streams 400 MB through buffers of 32 MB, above one that only imports."""
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=(100_000, 4000))[:] = 7
    program = textwrap.dedent("""
        import resource, sys
        from headrace.engine.loader import Loader
        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024
        batches = Loader(sys.argv[1], 500, buffer=32 << 20, device="cpu", direct=True)
        next(iter(Loader(sys.argv[1], 500, buffer=2 << 20, device="cpu", direct=True)))
        before = peak()
        rows = sum(len(batch[0]) for batch in batches)
        print(rows, peak() - before)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows, grown = map(int, done.stdout.split())
    assert rows == 100_000
    assert grown <= 2 * (32 << 20) + 40_000_000, "two slots, bounce buffers and batches"
    assert grown >= 32 << 20, "a measurement that sees no slot measures nothing"


def test_a_file_that_changes_during_the_run_is_named(folder: Path) -> None:
    batches = loader(folder)
    iterator = iter(batches)
    next(iterator)
    with (folder / "x.npy").open("ab") as file:
        file.write(b"grown")
    with pytest.raises(DataError, match=r"x\.npy had .* somebody writes to it"):
        list(iterator)
    batches.close()


def test_unreadable_rows_are_skipped_counted_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.buffer.direct import FileReader

    real = FileReader._read_cached

    def broken(self: FileReader, piece: Any, into: memoryview, done: int) -> None:
        if piece.offset <= 128 + 200 * 1234 < piece.offset + piece.length:
            raise OSError(5, "Input/output error")
        real(self, piece, into, done)

    monkeypatch.setattr(FileReader, "_read_cached", broken)
    with pytest.raises(DataError, match=r"x\.npy could not be read at byte .*on_error"):
        list(loader(folder, block=100, buffer=1000 * 208))
    with loader(folder, on_error="skip", block=100, buffer=1000 * 208) as batches:
        seen = [int(v) for x, _ in batches for v in x[:, 0]]
        missing = set(range(ROWS)) - set(seen)
        assert len(seen) == len(set(seen))
        assert 1234 in missing
        assert batches.statistics.skipped_rows == len(missing)
        assert "could not be read" in batches.statistics.failures[0]


def test_a_transform_that_fails_names_file_and_rows(folder: Path) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("by zero")

    with pytest.raises(
        WorkerError, match=r"rows \d+, .* and 95 more of the folder .*ZeroDivisionError: by zero"
    ):
        list(loader(folder, transform=fail))


def test_sorted_labels_are_warned_of(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 8), np.float32))
    np.save(tmp_path / "y.npy", np.repeat(np.arange(10), 100))
    with (
        pytest.warns(UserWarning, match="sorted by label"),
        Loader(tmp_path, 50, buffer=100 * 40, block=100, device="cpu") as batches,
    ):
        list(batches)


def test_rounds_adapt_and_a_resumed_run_keeps_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock is the test's: loads take 3.5 s, rounds 1 s, so three rounds are free once both are known.
    monkeypatch.setattr("headrace.engine.reuse.Reuse.loaded", lambda self, s: settle(self))
    monkeypatch.setattr("headrace.engine.reuse.RoundClock.finished", lambda self: [1.0])

    def settle(reuse: Any) -> None:
        reuse.timing = reuse.timing.with_load(3.5)

    batches = loader(folder, rounds="auto")
    straight = [batch[0][:, 0].tolist() for batch in batches]
    assert batches.rounds_history[0]["rounds"] == 3
    assert "a load takes" in batches.rounds_history[0]["why"]
    assert len(straight) == len(batches) == 150
    batches.close()

    broken = loader(folder, rounds="auto")
    iterator = iter(broken)
    seen = [next(iterator)[0][:, 0].tolist() for _ in range(31)]
    state = broken.state_dict()
    broken.close()
    resumed = loader(folder, rounds="auto")
    resumed.load_state_dict(state)
    seen += [batch[0][:, 0].tolist() for batch in resumed]
    assert seen == straight
    assert resumed.rounds_history == batches.rounds_history
    resumed.set_step_size(0.1)
    resumed.set_step_size(0.001)
    list(resumed)
    assert resumed.rounds_history[-1]["rounds"] == 1
    resumed.close()


def test_ranks_without_a_common_choice_are_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="one rank can choose for all"):
        list(loader(folder, rounds="auto", rank=0, world_size=2))


def test_killed_and_resumed_is_as_if_never_killed(folder: Path, tmp_path: Path) -> None:
    """A process is killed without warning after saving states; another goes on from the last one."""
    program = textwrap.dedent("""
        import json, os, signal, sys
        from headrace.engine.loader import Loader
        folder, log, state_path, stop = sys.argv[1:]
        batches = Loader(folder, 100, buffer=800 * 208, block=40, rounds=2, device="cpu")
        if os.path.exists(state_path):
            batches.load_state_dict(json.load(open(state_path)))
        done = 0
        while batches.epoch < 2:
            for x, y in batches:
                with open(log, "a") as file:
                    file.write(json.dumps(x[:, 0].tolist()) + "\\n")
                with open(state_path + ".new", "w") as file:
                    json.dump(batches.state_dict(), file)
                os.replace(state_path + ".new", state_path)
                done += 1
                if done == int(stop):
                    os.kill(os.getpid(), signal.SIGKILL)
    """)

    def run(log: str, stop: int) -> int:
        arguments = [sys.executable, "-c", program, str(folder), log, log + ".state", str(stop)]
        return subprocess.run(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode

    assert run(str(tmp_path / "straight"), 0) == 0
    assert run(str(tmp_path / "broken"), 37) == -signal.SIGKILL
    assert run(str(tmp_path / "broken"), 0) == 0
    assert (tmp_path / "broken").read_text() == (tmp_path / "straight").read_text()


def test_the_plan_tells_every_choice(folder: Path) -> None:
    plan = loader(folder, rounds="auto").plan
    for name in ("residence", "buffer_bytes", "block", "buffers", "direct_io", "rounds"):
        assert name in plan
    assert "asked for" in str(plan)
    assert open_source(folder).spans()["x"][0].row_bytes == 200


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [True, False])
def test_buffers_reach_the_device_whole(folder: Path, direct: bool) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with loader(folder, device="cuda", direct=direct) as batches:
        places = set()
        for _ in range(3):
            seen = []
            for buffer in batches.buffers():
                places.add((buffer.columns["x"].data_ptr(), len(buffer.columns["x"])))
                for start, stop in batches.bounds(buffer):
                    x, y = batches.batch(buffer, start, stop).values()
                    assert x.is_cuda
                    assert (x[:, 0].long() * 7 % 10).equal(y)
                    assert buffer.row_ids is not None
                    assert x[:, 0].long().equal(buffer.row_ids[buffer.order[start:stop]])
                    batches.consumed(stop - start)
                    seen += x[:, 0].tolist()
            assert sorted(seen) == list(range(ROWS))
        assert len(places) == 2, (
            "a captured step needs columns that stay where they are, and as long as they are"
        )
        stage = batches._feed._stage  # type: ignore[attr-defined]
        assert sum(slot.nbytes for slot in stage.host.slots) <= batches.plan["host_bytes"]
        assert stage.nbytes <= batches.plan["device_bytes"]
        # Batches of 100 rows and a few temporaries come on top of what the loader declares.
        assert torch.cuda.max_memory_allocated() - before <= batches.plan["device_bytes"] + 200_000


@pytest.mark.gpu
def test_a_slot_waits_for_work_that_is_queued_on_it(folder: Path) -> None:
    """The device is kept busy before it reads a buffer, so that the next copies could overtake it."""
    with loader(folder, device="cuda") as batches:
        seen = []
        for buffer in batches.buffers():
            assert buffer.row_ids is not None
            torch.cuda._sleep(50_000_000)
            seen.append((buffer.row_ids.clone(), buffer.columns["x"][: len(buffer.row_ids), 0].clone()))
            batches.consumed(len(buffer.order))
        assert all(values.long().equal(rows) for rows, values in seen)
        assert sorted(torch.cat([rows for rows, _ in seen]).tolist()) == list(range(ROWS))


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 6])
def test_a_captured_step_takes_every_buffer(folder: Path, first: int) -> None:
    """Also when the first buffer that it sees, and is captured on, is the short last one."""
    import headrace as hr

    def train(**options: Any) -> Any:
        torch.manual_seed(0)
        return hr.fit(
            torch.nn.Linear(50, 10), folder, loss=torch.nn.functional.cross_entropy, optimizer="sgd", lr=1e-7,
            batch_size=100, buffer=800 * 208, device="cuda", workers="single", seed=0, steps=120, **options,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        if first:
            make = Loader.__init__

            def start_later(self: Loader, *args: Any, **options: Any) -> None:
                make(self, *args, **options)
                self._at = type(self._at)(0, first)
                self._continue = True

            patch.setattr(Loader, "__init__", start_later)
        captured, eager = train(capture="graph"), train(capture="eager")
    assert captured.plan["capture"] == "graph"
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in (captured, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_fit_trains_through_buffers_and_tells_the_step_size(folder: Path, tmp_path: Path) -> None:
    import headrace as hr

    told: list[float] = []
    keep = Loader.set_step_size

    def listen(self: Loader, step_size: float) -> None:
        told.append(step_size)
        keep(self, step_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "set_step_size", listen)
        run = hr.fit(
            torch.nn.Linear(50, 10), folder, loss=torch.nn.functional.cross_entropy, optimizer="sgd", lr=1e-7,
            schedule="cosine", epochs=2, batch_size=100, buffer=800 * 208, device="cpu", workers="single",
            out=tmp_path / "run", seed=0,
        )  # fmt: skip
    assert run.plan["residence"] == "buffered"
    assert run.metrics[-1]["step"] == 100
    assert {row["rounds"] for row in run.metrics if row["kind"] == "train"} == {1}
    assert len(told) == 14
    assert told == sorted(told, reverse=True)
    assert told[-1] < 0.2 * told[0]
    assert readers() == []


@pytest.mark.slow
def test_ranks_take_the_first_ranks_rounds(folder: Path, tmp_path: Path) -> None:
    """Two processes whose clocks disagree make equally many steps and share every row."""
    program = textwrap.dedent("""
        import json, sys
        import torch
        from headrace.engine.loader import Loader
        from headrace.engine.reuse import Reuse, RoundClock
        folder, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
        torch.distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
        def loaded(self, seconds):
            self.timing = self.timing.with_load(2.5 if rank == 0 else 7.5)
        Reuse.loaded = loaded
        RoundClock.finished = lambda self: [1.0]
        with Loader(folder, 100, buffer=800 * 208, block=40, rounds="auto", device="cpu",
                    rank=rank, world_size=2) as batches:
            rows = [x[:, 0].tolist() for x, y in batches]
            print(json.dumps({"rows": rows, "rounds": batches.rounds_history[0]["rounds"]}))
        torch.distributed.destroy_process_group()
    """)
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "meeting")]
    running = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    assert [f["rounds"] for f in found] == [2, 2]
    assert len(found[0]["rows"]) == len(found[1]["rows"])
    seen = sorted(v for f in found for batch in f["rows"] for v in batch)
    assert seen == sorted(list(range(ROWS)) * 2)


def reason(plan: Any, name: str) -> str:
    """Why something in a plan is as it is."""
    return next(decision.reason for decision in plan.decisions if decision.name == name)


def test_a_run_on_a_slow_disk_says_that_it_waited_and_what_would_help(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace as hr

    # However little it waited counts, so that no clock decides.
    monkeypatch.setattr("headrace.engine.reading.SMALL_SHARE", -1.0)
    run = hr.fit(
        torch.nn.Linear(50, 10), folder, optimizer="sgd", lr=1e-7, epochs=1, batch_size=100,
        buffer=800 * 208, device="cpu", workers="single", out=tmp_path / "run", progress=False, tensorboard=False,
    )  # fmt: skip
    told = reason(run.plan, "waited")
    assert "for the disk, which gave" in told
    assert 'rounds="auto"' in told
    assert "uint8 or float16" in told
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "What would help: a disk" in page


def test_what_a_wait_is_said_to_mean() -> None:
    from headrace.engine.reading import reading_decisions

    def told(waited_s: float, **options: Any) -> str:
        settings = {"rounds": 1, "floats": False, "skipped": 0, "failures": [], "loaded_bytes_per_s": 2e8}
        return "".join(
            d.reason for d in reading_decisions(waited_s=waited_s, seconds=10.0, **{**settings, **options})
        )

    assert "keeps up" in told(0.1)
    assert "a disk about 4.0 times as fast" in told(7.5)
    assert "200 MB/s" in told(7.5)
    assert "rounds=" not in told(7.5, rounds="auto")
    assert "much faster disk" in told(10.0)
    assert "were left out" in told(0.0, skipped=3, failures=["x.npy could not be read"])


def test_rounds_that_change_are_events_of_the_run_and_end_it_with_the_schedule(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace as hr

    def settle(reuse: Any, seconds: float) -> None:
        reuse.timing = reuse.timing.with_load(4.5)

    monkeypatch.setattr("headrace.engine.reuse.Reuse.loaded", settle)
    monkeypatch.setattr("headrace.engine.reuse.RoundClock.finished", lambda self: [1.0])
    run = hr.fit(
        torch.nn.Linear(50, 10), folder, optimizer="sgd", lr=1e-7, epochs=4, batch_size=100, schedule="cosine",
        buffer=800 * 208, rounds="auto", device="cpu", workers="single", out=tmp_path / "run", progress=False,
        tensorboard=False,
    )  # fmt: skip
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert rows[0]["rounds"] == 4
    assert rows[-1]["rounds"] == 1, "as the step size falls, rounds fall to one"
    assert run.steps == 200, "the schedule's updates, which four passes of one round would take"
    assert rows[-1]["epoch"] < 3, "fewer passes are loaded: passes and steps are counted apart"
    timeline = (tmp_path / "run" / "timeline.json").read_text(encoding="utf-8")
    assert "a load takes 4.5 s and a round 1 s" in timeline
    assert "a load takes 4.5 s" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_fit_leaves_out_what_cannot_be_read_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace as hr

    np.save(tmp_path / "x.npy", np.ones((3000, 1000), np.float32))
    np.save(tmp_path / "y.npy", np.arange(3000) % 10)
    from headrace.buffer.direct import FileReader

    real = FileReader._read_cached

    def broken(self: FileReader, piece: Any, into: memoryview, done: int) -> None:
        if piece.offset <= 128 + 4000 * 1234 < piece.offset + piece.length:
            raise OSError(5, "Input/output error")
        real(self, piece, into, done)

    monkeypatch.setattr(FileReader, "_read_cached", broken)
    options = {"optimizer": "sgd", "lr": 1e-7, "epochs": 1, "batch_size": 100, "buffer": "5MB", "device": "cpu",
               "workers": "single", "progress": False}  # fmt: skip
    with pytest.raises(DataError, match=r"x\.npy could not be read at byte"):
        hr.fit(torch.nn.Linear(1000, 10), tmp_path, **options)
    run = hr.fit(torch.nn.Linear(1000, 10), tmp_path, on_error="skip", **options)
    assert run.plan["skipped_rows"] >= 1
    assert "x.npy could not be read at byte" in reason(run.plan, "skipped_rows")
    with pytest.raises(OptionError, match="on_error"):
        hr.fit(torch.nn.Linear(1000, 10), tmp_path, on_error="skipp", **options)
