"""Workers that are killed, hang or are interrupted: every row is used once and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.hogbatch import HogbatchOptions, Observer, OptimiserSpec, run_hogbatch
from headrace.errors import WorkerError


def segments() -> set[str]:
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if path.name.startswith(("torch_", "psm_", "headrace"))
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = segments()
    yield
    assert multiprocessing.active_children() == []
    assert segments() <= before


class Slow(nn.Module):
    """A step of a few milliseconds, so that a run lasts long enough to be disturbed. May hang once."""

    def __init__(self, flag: str = "", pause_s: float = 0.002) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.flag, self.pause_s = flag, pause_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        if self.flag:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                time.sleep(5)
        return self.linear(x)


def data(rows: int = 1600) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 6, generator=g)
    return {"x": x, "y": (x @ torch.randn(6, 3, generator=g)).argmax(1)}


def options(**given: Any) -> HogbatchOptions:
    usual: dict[str, Any] = {"batch_size": 8, "scaling": "off", "optimiser": OptimiserSpec(lr=0.05)}
    return HogbatchOptions(**{**usual, **given})


class Killer(Observer):
    """Kills worker processes, one at a time, while they work."""

    def __init__(self, kills: int) -> None:
        self.left, self.notes, self.pids = kills, [], set[int]()

    def stopping(self) -> bool:
        alive = [child for child in multiprocessing.active_children() if child.pid not in self.pids]
        if self.left and alive:
            pid = alive[0].pid
            assert pid is not None
            self.pids.add(pid)
            self.left -= 1
            os.kill(pid, signal.SIGKILL)
        return False

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def test_a_killed_process_is_replaced_and_every_row_is_used_once() -> None:
    observer = Killer(1)
    result = run_hogbatch(Slow(), data(), F.cross_entropy, options(cpu=2, processes=True, epochs=2), observer)
    assert result.rows == 2 * 1600
    assert result.epochs == 2
    assert sum(worker.restarts for worker in result.workers) == 1
    assert any("SIGKILL" in note for note in observer.notes)


def test_all_workers_dead_is_an_error_with_their_last_words() -> None:
    with pytest.raises(WorkerError, match=r"no worker is left: cpu0 ended with signal SIGKILL"):
        run_hogbatch(Slow(), data(), F.cross_entropy, options(cpu=1, processes=True, restarts=0), Killer(9))


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_hanging_worker_is_replaced(tmp_path: Path, processes: bool) -> None:
    module = Slow(str(tmp_path / "hung"))
    result = run_hogbatch(
        module, data(), F.cross_entropy, options(cpu=2, processes=processes, hang_s=1.0, grant_s=0.02)
    )
    assert result.rows == 1600
    assert sum(worker.restarts for worker in result.workers) >= 1


class Interrupter(Observer):
    """Presses Ctrl-C once some rows are done."""

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "workers":
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_run_and_leaves_a_state_to_resume(processes: bool) -> None:
    module, columns = Slow(), data(6_000)
    result = run_hogbatch(
        module, columns, F.cross_entropy, options(cpu=2, processes=processes, epochs=30), Interrupter()
    )
    assert result.stopped_by == "interrupt"
    left = sum(stop - start for start, stop in result.state["remaining"])
    assert result.rows == 6_000 * (result.epochs + 1) - left
    assert 0 < result.rows < 30 * 6_000
    module.pause_s = 0.0
    again = run_hogbatch(
        module,
        columns,
        F.cross_entropy,
        options(cpu=2, processes=False, epochs=result.epochs + 1),
        resume=result.state,
    )
    assert again.rows - result.rows == left


def test_threads_end_with_the_run() -> None:
    before = threading.active_count()
    run_hogbatch(Slow(pause_s=0.0), data(), F.cross_entropy, options(cpu=3, processes=False, standin=1))
    assert threading.active_count() == before
