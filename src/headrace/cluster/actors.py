"""The Ray transport: the master and the workers as actors.

The master is one asynchronous actor, so its decisions happen one after the other. A push is a call that returns when
its group is merged. Ray starts a killed master again with its state lost: it goes on from its newest checkpoint, and
the workers' calls are repeated, which the sequence numbers make harmless. A killed worker is started anew by the
driver (`headrace.cluster.driver`), since only the driver may give it a new life.

Nothing here imports Ray at the top: classes become actors in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import platform
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from numpy.typing import NDArray

import headrace
from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import (
    Dismiss,
    Instruction,
    Joined,
    Key,
    Left,
    Lost,
    Master,
    MasterOptions,
    Push,
    Replan,
    Reply,
    Restart,
    Stop,
)
from headrace.cluster.planning import plan_local_steps
from headrace.cluster.sending import Wire, as_array, from_wire, shared_tensor, to_wire
from headrace.cluster.shards import ShardedHolder, fetch, send_pieces
from headrace.cluster.transport import Answer, Conversation, Service, Work, converse
from headrace.engine import checkpoint
from headrace.errors import RunFolderError
from headrace.types import State

PUSHES_BEFORE_PLANNING = 6
"""Pushes between two plans of B; a guess."""

MOST_SPANS = 10_000
PROBE_S = 0.05
"""Steps are measured for about so long before a run; a guess."""
PROBE_STEPS = 64
PROBE_EXCHANGES = 5


@dataclass(frozen=True, kw_only=True)
class MasterSpec:
    """What a master is started with, and started with again."""

    options: MasterOptions
    statistics_from: int | None
    folder: str
    """Where its checkpoints lie."""
    bounds: tuple[tuple[int, int], ...] = ()
    """The ranges of the shards; empty when the master holds everything itself."""
    plans: bool
    """Whether B is planned from what is measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds, of one worker before the run begins."""

    step_s: float
    exchange_s: float
    """Packing a push, sending it, merging it, and getting the answer."""
    merge_s: float
    """The master's part of that."""


class MasterActor:
    """Decisions and parameters of one run."""

    def __init__(self, spec: MasterSpec, shards: list[Any]) -> None:
        self.shards = shards
        torch.set_num_threads(1)
        self.spec = spec
        self.waiting: dict[Key, asyncio.Future[Any]] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=PUSHES_BEFORE_PLANNING)
        self.pushes, self.compute_s, self.exchange_s = 0, 0.0, 0.0
        self.merge_s, self.began_cpu_s = 0.0, math.nan
        self.most_local_steps, self.workers = 1, 1
        self.spans: list[tuple[str, float, float, float]] = []
        self.begun = False
        self.seconds, self.rows = 0.0, 0
        # What importing torch and Ray left behind stays; looking through it took a sixth of this process's time.
        gc.freeze()
        self.service: Service
        with contextlib.suppress(RunFolderError):  # none yet: this is the first start
            state, _ = checkpoint.load_newest(Path(spec.folder))
            self._hold(state["cluster"]["values"])
            self.service.load_state_dict(state["cluster"])
            self.seconds, self.rows = state["seconds"], state["rows"]
            self.most_local_steps, self.workers = state["most_local_steps"], state["workers"]
            if spec.plans:
                self.service.handle(Replan(state["local_steps"]))

    def _hold(self, vector: torch.Tensor) -> None:
        holder = Holder(vector.clone(), self.spec.statistics_from)
        if self.shards:
            import ray

            holder = ShardedHolder(
                ray, self.shards, list(self.spec.bounds), vector, self.spec.statistics_from
            )
        self.service = Service(Master(self.spec.options), holder, self._save)

    async def begin(self, vector: NDArray[Any]) -> None:
        """The first parameters, unless a checkpoint has newer ones. They are saved at once: a master that is
        started again is not told them again."""
        if not hasattr(self, "service"):
            self._hold(shared_tensor(vector))
            self._save(self.service.state_dict())
        self.begun = True

    async def exchange(self, event: Joined | Push | Left, wire: Wire | None) -> tuple[Any, ...]:
        """One message of a worker; returns when there is an answer."""
        if math.isnan(self.began_cpu_s):
            self.began_cpu_s = time.process_time()
        future = self.waiting.get(event.key)
        if future is None:
            future = self.waiting[event.key] = asyncio.get_running_loop().create_future()
        began_s = time.thread_time()
        self._obey(self.service.handle(event, from_wire(wire)))
        if isinstance(event, Push):
            self.merge_s += time.thread_time() - began_s
            self._measure(event)
        answer: tuple[Any, ...] = await future
        return answer

    def _obey(self, instructions: list[Instruction]) -> list[Restart]:
        restarts = []
        for instruction in instructions:
            match instruction:
                case Reply(key, version, grant):
                    place = self.service.master.members[key.worker].place
                    apart = bool(self.shards) or not grant  # from the shards, or not needed any more
                    vector = None if apart else as_array(self.service.holder.vector())
                    self._settle(key, (version, grant, vector, place, False))
                case Dismiss(key):
                    self._settle(key, (0, 0, None, None, True))
                case Restart():
                    restarts.append(instruction)
        return restarts

    def _settle(self, key: Key, answer: tuple[Any, ...]) -> None:
        future = self.waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def lost(self, worker: str, life: int) -> int:
        """A worker's process is gone; returns the number of its next life."""
        for key in [k for k in self.waiting if k.worker == worker and k.life == life]:
            self.waiting.pop(key).cancel()
        self._obey(self.service.handle(Lost(worker, life)))
        if isinstance(self.service.holder, ShardedHolder):
            self.service.holder.forget(worker, life)
        return life + 1

    async def rehearse(self, wire: Wire | None) -> tuple[float, NDArray[Any] | None]:
        """What a push costs, without one: merge into a copy, and answer with it. With shards they do the work."""
        packed, began_s = from_wire(wire), time.thread_time()
        if packed is None:
            return 0.0, None
        copy = self.service.holder.vector()
        packed.add_to(copy, 1.0)
        return time.thread_time() - began_s, as_array(copy)

    async def plan(self, workers: int, local_steps: int | None, most_local_steps: int) -> None:
        """What the driver has planned; B is kept where it is None."""
        self.workers, self.most_local_steps = workers, most_local_steps
        if local_steps is not None:
            self._obey(self.service.handle(Replan(local_steps)))

    async def lives(self) -> dict[str, int]:
        """Worker → its newest life, from a checkpoint."""
        return {name: member.life for name, member in self.service.master.members.items()}

    async def stop(self) -> None:
        self._obey(self.service.handle(Stop()))

    async def status(self, seconds: float, rows: int) -> dict[str, Any]:
        """How far everything is; takes how far the driver's records are, for the next checkpoint."""
        self.seconds, self.rows = seconds, rows
        master = self.service.master
        losses, self.service.losses = self.service.losses, []
        spans, self.spans = self.spans, []
        now_s = time.perf_counter()
        return {
            # Worker, how long ago its push came, how long its steps took and the exchange before them.
            "spans": [(name, now_s - at_s, took_s, sent_s) for name, at_s, took_s, sent_s in spans],
            "staleness": dict(master.staleness),
            "steps": master.steps,
            "version": master.version,
            "losses": losses,
            "rows": sum(member.rows for member in master.members.values()),
            "members": {name: (m.steps, m.rows, m.pushes, m.life) for name, m in master.members.items()},
            "local_steps": master.options.local_steps,
        }

    async def result(self) -> dict[str, Any]:
        """Parameters and statistics at the end."""
        master = self.service.master
        return {
            "vector": as_array(self.service.holder.vector()),
            "staleness": dict(master.staleness),
            "merge_s": self.merge_s,
            "master_cpu_s": 0.0 if math.isnan(self.began_cpu_s) else time.process_time() - self.began_cpu_s,
            "compute_s": self.compute_s,
            "exchange_s": self.exchange_s,
            "came_back": not self.begun,
        }

    async def vector(self) -> NDArray[Any]:
        return as_array(self.service.holder.vector())

    async def save(self) -> None:
        self._save(self.service.state_dict())

    def _save(self, state: State) -> None:
        steps = self.service.master.steps
        whole = {
            "cluster": state,
            "rows": self.rows,
            "seconds": self.seconds,
            "standing": {"step": steps},
            "local_steps": self.service.master.options.local_steps,
            "most_local_steps": self.most_local_steps,
            "workers": self.workers,
        }
        checkpoint.save_checkpoint(Path(self.spec.folder), steps, whole)

    def _measure(self, push: Push) -> None:
        """Take in the times of one push, and plan B anew after every few."""
        self.pushes += 1
        self.compute_s += push.compute_s
        self.exchange_s += push.exchange_s
        # Nobody may ask for a long time: the newest are enough.
        del self.spans[:-MOST_SPANS]
        self.spans.append((push.key.worker, time.perf_counter(), push.compute_s, push.exchange_s))
        if push.exchange_s > 0:  # a worker's first push knows of no exchange before it
            self.recent.append((push.compute_s / max(1, push.steps), push.exchange_s))
        if self.spec.plans and self.recent and self.pushes % PUSHES_BEFORE_PLANNING == 0:
            self._plan()

    def _plan(self) -> None:
        """Set B from the newest pushes, unless it is nearly right: a plan that jumps about is worse."""
        middle = len(self.recent) // 2
        step_s = sorted(step_s for step_s, _ in self.recent)[middle]
        exchange_s = sorted(exchange_s for _, exchange_s in self.recent)[middle]
        planned = plan_local_steps(
            step_s,
            exchange_s,
            most=self.most_local_steps,
            workers=self.workers,
            merge_s=self.merge_s / self.pushes,
        )
        wanted = planned.value
        now = self.service.master.options.local_steps
        if wanted > 1.2 * now or wanted < now / 3:
            self._obey(self.service.handle(Replan(wanted)))


class WorkerActor:
    """The process of one life of one worker."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        torch.set_num_threads(1)

    def run(
        self, life: int, job: Work, master: Any, shards: list[Any], bounds: list[tuple[int, int]]
    ) -> dict[str, Any]:
        """Train until the grant or the shard is used up."""
        import ray

        torch.manual_seed(job.seed + self.rank)
        local = job.local(self.rank)
        began_cpu_s = time.process_time()
        talk: Conversation = converse(self.name, life, local, Compressor(job.compress))
        message = next(talk)
        waited_s = 0.0
        while True:
            began_s = time.perf_counter()
            packed = message.packed
            if shards and packed is not None:
                send_pieces(ray, shards, bounds, message.key, packed)
                packed = None
            reply = ray.get(master.exchange.remote(message.event, to_wire(packed)))
            waited_s += time.perf_counter() - began_s
            version, grant, vector, place, dismissed = reply
            own = None if vector is None else shared_tensor(vector)
            if shards and grant:
                own = fetch(ray, shards)
            try:
                message = talk.send(Answer(message.key, version, grant, own, place, dismissed))
            except StopIteration:
                return {"waited_s": waited_s, "cpu_s": time.process_time() - began_cpu_s}

    def probe(self, job: Work, master: Any, shards: list[Any], bounds: list[tuple[int, int]]) -> Measured:
        """Time some steps and exchanges that are thrown away."""
        import ray

        torch.manual_seed(job.seed + self.rank)
        local, vector = job.local(self.rank), job.values()
        local.resume(None)
        local.advance(vector.clone(), 1)  # compiles, opens and allocates
        steps, done, took_s = 0, None, 0.0
        while took_s < PROBE_S and steps < PROBE_STEPS:
            began_s = time.perf_counter()
            done = local.advance(vector.clone(), max(1, steps))
            took_s += time.perf_counter() - began_s
            steps += done.steps
            if done.finished or not done.steps:
                break
        if done is None or not steps:
            return Measured(step_s=0.0, exchange_s=0.0, merge_s=0.0)
        compressor, exchanges, merges = Compressor(job.compress), [], []
        for number in range(PROBE_EXCHANGES):
            began_s = time.perf_counter()
            packed = compressor.pack(vector, done.vector, done.decay)
            if shards:
                key = Key(self.name, 0, number)
                send_pieces(ray, shards, bounds, key, packed)
                ray.get([shard.drop.remote(key) for shard in shards])
                fetch(ray, shards)
            merge_s, _ = ray.get(master.rehearse.remote(to_wire(None if shards else packed)))
            exchanges.append(time.perf_counter() - began_s)
            merges.append(merge_s)
        return Measured(step_s=took_s / steps, exchange_s=median(exchanges), merge_s=median(merges))

    def alone(self, job: Work) -> tuple[float, int]:
        """The same training without a master: CPU seconds and steps. For measuring what communication costs."""
        local, vector = job.local(self.rank), job.values()
        began_s, steps, finished = time.process_time(), 0, False
        while not finished:
            done = local.advance(vector, 1 << 20)
            vector, steps, finished = done.vector, steps + done.steps, done.finished
        return time.process_time() - began_s, steps


def versions() -> dict[str, str]:
    """What must be equal on all nodes."""
    return {"python": platform.python_version(), "headrace": headrace.__version__}
