"""Starts workers, watches them, starts those anew that die or hang, and ends the run.

Two parts: `judge` decides, from plain numbers, what to do about one worker; `run` obeys. The parameters live in the
store, so a restarted worker pulls and goes on; what is lost is its rollout and its optimiser's running averages.

Only processes started here are ever ended, through their own handles.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.agents.board import Board
from headrace.agents.exchange import THETA, moments_of, shared_values
from headrace.agents.goal import Goal, row
from headrace.agents.loop import Loop
from headrace.agents.store import SharedStore
from headrace.agents.worker import FAILED, Spec, main
from headrace.engine.records import Records
from headrace.errors import OptionError, WorkerError

if TYPE_CHECKING:
    from headrace.agents.agent import ActorCritic

Report = Callable[[dict[str, Any]], None]
_LOOK_EVERY_S = 0.05
_ROW_EVERY_S = 0.5
_END_S = 5.0  # a worker ends after its present rollout, unless it hangs
_START_S = 120.0  # importing torch on a loaded machine takes tens of seconds; a guess with room


def judge(
    *, exit_code: int | None, beat_s: float, now_s: float, started_s: float, hang_s: float, restarts_left: int
) -> str:
    """What to do about a worker: "keep", "done", "restart", "kill" (then restart) or "give up".

    ``beat_s`` is the time of its last step, 0 before its first.
    """
    if exit_code == 0:
        return "done"
    if exit_code is not None:
        return "restart" if restarts_left > 0 else "give up"
    allowed_s = hang_s if beat_s > started_s else max(hang_s, _START_S)
    if now_s - max(beat_s, started_s) > allowed_s:
        return "kill" if restarts_left > 0 else "give up"
    return "keep"


@dataclasses.dataclass
class _Worker:
    number: int
    process: Any
    started_s: float
    incarnation: int = 0
    done: bool = False


def run(agent: ActorCritic, goal: Goal, report: Report, records: Records) -> str:
    """Learn with several workers or machines until the goal is reached; returns why it ended."""
    config = agent.config
    if config.mode == "asynchronous":
        # A3C's workers: one environment each, and every update is pushed at once.
        config = dataclasses.replace(config, n_envs=1, push_every=1)
    spec = Spec(
        config=config, goal=goal, env=agent.env, env_options=agent.env_options, vectorization=agent.vectorization,
        optimizer=agent.optimizer, module=agent.module,
    )  # fmt: skip
    if agent.cluster is not None and not hasattr(agent.cluster, "open_store"):
        from headrace.agents import machines

        return machines.run(agent, spec, goal, report)
    loop = Loop(agent.config, agent._driver, agent._learner)
    context = multiprocessing.get_context("spawn")
    store = _open_store(agent, context, shared_values(loop))
    try:
        with _Watch(spec, store, Board(context, config.workers), context, report, records) as watch:
            return watch.go()
    finally:
        _take_over(loop, store)
        if isinstance(store, SharedStore):
            store.close()


def _open_store(agent: ActorCritic, context: Any, values: dict[str, Any]) -> Any:
    if agent.cluster is None:
        return SharedStore(context, values)
    return agent.cluster.open_store(values)


def _take_over(loop: Loop, store: Any) -> None:
    pulled = store.pull()
    loop.learner.set_theta(pulled[THETA].numpy().astype(np.float32))
    for i, moments in enumerate(moments_of(loop)):
        moments.sums[:] = pulled[f"sums.{i}"].numpy()
        moments.refresh()


class _Watch:
    def __init__(
        self, spec: Spec, store: Any, board: Board, context: Any, report: Report, records: Records
    ) -> None:
        self.spec, self.store, self.board, self.context = spec, store, board, context
        self.report, self.records = report, records
        self.restarts = 0
        self.workers: list[_Worker] = []
        self.first_beat_s: float | None = None
        self.ended_s: float | None = None
        self.reported = (0, 0.0)
        self.next_row_s = 0.0

    def _start(self, number: int, incarnation: int) -> _Worker:
        process = self.context.Process(
            target=main, args=(self.spec, self.store, self.board, number, incarnation), daemon=True,
            name=f"agent-worker-{number}",
        )  # fmt: skip
        # One thread per worker for whatever BLAS it loads: more would fight over the cores.
        kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        try:
            os.environ.update(dict.fromkeys(kept, "1"))
            process.start()
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise OptionError(
                f"the environment, module or optimizer cannot be sent to a worker process ({error}); "
                "define it at the top level of a module"
            ) from error
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        return _Worker(number, process, time.monotonic(), incarnation)

    @property
    def seconds(self) -> float:
        """Since the first worker took its first step: starting processes is not learning."""
        if self.first_beat_s is None:
            return 0.0
        return (self.ended_s or time.monotonic()) - self.first_beat_s

    def __enter__(self) -> _Watch:
        return self

    def go(self) -> str:
        """Start the workers and watch until the goal is reached."""
        for number in range(self.spec.config.workers):
            self.workers.append(self._start(number, 0))
        while True:
            time.sleep(_LOOK_EVERY_S)
            if self.first_beat_s is None and self.board.total("steps"):
                self.first_beat_s = time.monotonic()
            for worker in self.workers:
                self._look_after(worker)
            ended = self._ended()
            if not ended and self.seconds > self.next_row_s:
                self.next_row_s = self.seconds + _ROW_EVERY_S
                self._row()
            if ended:
                self.ended_s = time.monotonic()  # ending processes is not learning either
                self.board.stop()
                self._join()
                self._row()
                return ended

    def _ended(self) -> str | None:
        recent, steps = self.board.recent(), self.board.total("steps")
        mean = float(recent[:, 0].mean()) if len(recent) else math.nan
        ended = self.spec.goal.reached(steps, self.seconds, len(recent), mean)
        return ended or ("all workers ended" if all(worker.done for worker in self.workers) else None)

    def _look_after(self, worker: _Worker) -> None:
        if worker.done:
            return
        verdict = judge(
            exit_code=worker.process.exitcode, beat_s=float(self.board.measure("beat_s")[worker.number]),
            now_s=time.monotonic(), started_s=worker.started_s, hang_s=self.spec.config.hang_s,
            restarts_left=self.spec.config.max_restarts - self.restarts,
        )  # fmt: skip
        if verdict == "done":
            worker.done = True
        elif verdict == "give up":
            raise WorkerError(self._obituary(worker))
        elif verdict in ("restart", "kill"):
            self._restart(worker, verdict)

    def _restart(self, worker: _Worker, verdict: str) -> None:
        if verdict == "kill":
            worker.process.kill()
            worker.process.join()
        self.restarts += 1
        if hasattr(self.records, "instant"):
            self.records.instant("worker restarted", self._obituary(worker))
        self.workers[worker.number] = self._start(worker.number, worker.incarnation + 1)

    def _obituary(self, worker: _Worker) -> str:
        told = self.board.error(worker.number).strip()
        code = worker.process.exitcode
        if code == FAILED and told:
            how = f"failed:\n{told}"
        elif code is None or code == -9:
            how = f"was killed or showed no step for {self.spec.config.hang_s:g} s"
        else:
            how = f"ended with status {code}"
        hint = ""
        if not self.board.total("steps"):
            hint = '; no worker has made a step: is the script guarded by `if __name__ == "__main__":`?'
        return f"worker {worker.number} (life {worker.incarnation + 1}, {self.restarts} restarts so far) {how}{hint}"

    def _row(self) -> None:
        board, seconds, steps = self.board, self.seconds, self.board.total("steps")
        recent = board.recent()
        then_steps, then_s = self.reported
        self.reported = (steps, seconds)
        best = board.measure("best")
        values = row(
            step=steps, seconds=seconds, episodes=board.total("episodes"),
            mean=float(recent[:, 0].mean()) if len(recent) else math.nan,
            best=float(np.nanmax(best)) if np.isfinite(best).any() else math.nan,
            length=float(recent[:, 1].mean()) if len(recent) else math.nan,
            lr=_mean(board.measure("lr")), rate=(steps - then_steps) / max(seconds - then_s, 1e-9),
        )  # fmt: skip
        losses = {name: _mean(board.measure(name)) for name in ("policy_loss", "value_loss", "entropy")}
        self.report({
            **values, **{name: value for name, value in losses.items() if math.isfinite(value)},
            "staleness": board.total("staleness_sum") / max(board.total("pushes"), 1),
            "staleness_max": board.most("staleness_max"), "pushes": board.total("pushes"),
            "restarts": self.restarts, "cpu_s": float(np.nansum(board.measure("cpu_s"))),
        })  # fmt: skip

    def _join(self) -> None:
        for worker in self.workers:
            worker.process.join(timeout=_END_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process that was started here."""
        self.board.stop()
        self._join()
        for worker in self.workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()


def _mean(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
