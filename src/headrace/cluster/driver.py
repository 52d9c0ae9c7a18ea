"""The driver of a run on a cluster: starts master and workers, replaces the lost, and hears how it goes.

The driver is in nobody's way: workers and master go on between its questions. When the driver ends, however it ends,
Ray ends its actors, so that no worker outlives it for long.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headrace.cluster.actors import MasterActor, MasterSpec, Measured, WorkerActor, versions
from headrace.cluster.connect import connected, version_differences
from headrace.cluster.holder import shard_bounds
from headrace.cluster.options import ClusterOptions
from headrace.cluster.orders import OrderActor, RayOrders
from headrace.cluster.planning import most_local_steps, plan_cluster
from headrace.cluster.sending import as_array, shared_tensor
from headrace.cluster.shards import ShardActor
from headrace.cluster.training import Job
from headrace.cluster.transport import Work
from headrace.errors import DeviceError, HeadraceError, WorkerError
from headrace.types import Decision

POLL_S = 0.2
SLOWEST_POLL_S = 1.0
"""Looks get rarer in a longer run: on a small machine each costs the master's process some milliseconds."""


class Observer:
    """Override what is of interest; all calls come from the thread that called `run_cluster`."""

    def progress(self, status: dict[str, Any], vector: Any) -> bool:
        """A few times a second; ``vector()`` fetches the parameters. True ends the run."""
        return False

    def note(self, sentence: str) -> None:
        """A worker was lost and replaced."""

    def standing(self) -> tuple[float, int]:
        """Seconds and metric rows so far, for checkpoints."""
        return 0.0, 0


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """What `run_cluster` returns beside the trained parameters."""

    steps: int
    rows: int
    seconds: float
    workers: dict[str, tuple[int, int, int, int]]
    """Worker → steps, rows, pushes and lives."""
    staleness: dict[int, int]
    """Age of a merged push in versions → how often. High ages: gradients of parameters long gone."""
    local_steps: int
    """B at the end."""
    communication: float
    """Share of the workers' time that pulling and pushing took; above 0.1, take more local steps."""
    merge_s: float
    """The master's processor time for merging; near ``seconds``, the master is what everyone waits for."""
    master_cpu_s: float
    """All of the master's processor time since the first worker joined: merging, receiving, sending, checkpoints."""
    cpu_s: float
    """The workers' processor time for all steps and exchanges; lives that were killed are not in it."""
    notes: list[str] = field(default_factory=list)
    plan: list[Decision] = field(default_factory=list)
    """What was decided from measurements before the first step: how many workers, and B."""


def run_cluster(
    job: Work,
    options: ClusterOptions,
    observer: Observer,
    *,
    folder: Path | None = None,
    resume: bool = False,
    steps: int | None = None,
) -> ClusterResult:
    """Train on a cluster; ``job.take`` gets the result."""
    values = job.values()
    store_bytes = max(512 << 20, 8 * values.nbytes)
    with connected(options, store_bytes=store_bytes) as ray, tempfile.TemporaryDirectory() as scratch:
        kept = folder if folder is not None else Path(scratch)
        if not resume and kept.is_dir() and any(kept.glob("step-*")):
            raise WorkerError(f"{kept} holds checkpoints of another run; resume it or take another folder")
        driver = _Driver(ray, job, options, observer, values, str(kept.resolve()), steps)
        try:
            return driver.run()
        finally:
            driver.end()


class _Driver:
    """One run."""

    def __init__(
        self,
        ray: Any,
        job: Any,
        options: ClusterOptions,
        observer: Observer,
        values: torch.Tensor,
        folder: str,
        steps: int | None,
    ) -> None:
        self.ray, self.job, self.options, self.observer = ray, job, options, observer
        self.values, self.folder, self.steps = values, folder, steps
        self.names: list[str] = []
        self.lives: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self.actors: dict[str, Any] = {}
        self.running: dict[Any, str] = {}
        self.notes: list[str] = []
        self.plan: list[Decision] = []
        self.stopping, self.may_choose = False, False
        self.began_s = 0.0
        self.orders: Any = None
        self.job_ref: Any = None
        self.cpu_s = 0.0
        self.master: Any = None
        self.bounds: list[tuple[int, int]] = []
        if values.nbytes > options.shard_bytes:
            self.bounds = shard_bounds(values.numel(), values.itemsize, options.shard_bytes)
        self.shards: list[Any] = []

    def run(self) -> ClusterResult:
        began_s = self.began_s = time.monotonic()
        self._start_master()
        self._name_workers()
        self._look_at_nodes()
        self._send_job()
        self._plan()
        for name in self.names:
            self._start_worker(name)
        while self.running:
            self._hear()
            self._report()
        self._report()
        return self._result(time.monotonic() - began_s)

    def _start_master(self) -> None:
        spec = MasterSpec(
            options=self.options.master(steps=self.steps),
            statistics_from=self.job.statistics_from(),
            folder=self.folder,
            plans=self.options.local_steps == "auto",
            bounds=tuple(self.bounds),
        )
        self.shards = [self.ray.remote(num_cpus=0)(ShardActor).remote() for _ in self.bounds]
        actor = self.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(MasterActor)
        self.master = actor.options(scheduling_strategy=self._here(), max_concurrency=1000).remote(
            spec, self.shards
        )
        self.ray.get(self.master.begin.remote(as_array(self.values)))

    def _here(self) -> Any:
        """Beside the driver, whose disk has the checkpoints."""
        node = self.ray.get_runtime_context().get_node_id()
        return self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)

    def _name_workers(self) -> None:
        """One worker for each shard. A run that is resumed keeps its shards, and its workers' lives go on."""
        before: dict[str, int] = self.ray.get(self.master.lives.remote())
        asked = self.options.workers
        cpus = max(1, int(self.ray.cluster_resources().get("CPU", 1)) // self.options.cores)
        self._name(asked if asked != "auto" else len(before) or cpus, before)
        self.may_choose = asked == "auto" and not before

    def _name(self, count: int, before: dict[str, int]) -> None:
        self.job = replace(self.job, world_size=count)
        self.names = [f"worker-{rank}" for rank in range(count)]
        self.lives = {name: before.get(name, 0) + 1 for name in self.names}

    def _plan(self) -> None:
        """How many workers, and B, from a step and an exchange that the first worker measures."""
        for name in self.names:
            self._actor(name)  # their processes start meanwhile
        plans = self.options.local_steps == "auto"
        measured = self._measured() if plans or self.may_choose else None
        if measured is not None and measured.step_s > 0:
            self.plan = plan_cluster(
                step_s=measured.step_s,
                exchange_s=measured.exchange_s,
                merge_s=measured.merge_s,
                available=len(self.names),
                may_choose=self.may_choose,
                local_steps=None if plans else int(self.options.local_steps),
                total_steps=self.job.total_steps,
                passes=self.job.passes,
            )
        planned = {decision.name: decision.value for decision in self.plan}
        if planned.get("workers", len(self.names)) != len(self.names):
            self._name(planned["workers"], {})
            for name in set(self.actors) - set(self.names):
                self.ray.kill(self.actors.pop(name), no_restart=True)
            self._send_job()
        most = most_local_steps(self.job.total_steps, self.job.passes, len(self.names))
        self.ray.get(self.master.plan.remote(len(self.names), planned.get("local_steps"), most))

    def _measured(self) -> Measured | None:
        """Of the first worker, once a node has room for it; None when it was lost or the run is to end."""
        name = self.names[0]
        actor = self._actor(name)
        answer = actor.probe.remote(self.job_ref, self.master, self.shards, self.bounds)
        while not self.ray.wait([answer], timeout=POLL_S)[0]:
            self._report()
            if self.stopping:
                return None
        try:
            measured: Measured = self.ray.get(answer)
            return measured
        except self.ray.exceptions.RayTaskError as error:
            raise self._failure(name, error) from None
        except self.ray.exceptions.RayError:
            del self.actors[name]  # the next life goes on without a plan
            return None

    def _send_job(self) -> None:
        """To the cluster's memory; with a service of balanced orders where the job asks for them."""
        job = self.job
        if isinstance(job, Job) and job.options.order == "balanced":
            if self.orders is not None:
                self.ray.kill(self.orders, no_restart=True)
            actor = self.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(OrderActor)
            self.orders = actor.options(scheduling_strategy=self._here()).remote(
                job.rows, job.world_size, job.seed, str(Path(self.folder) / "orders")
            )
            job = replace(job, orders=RayOrders(self.orders))
        self.job_ref = self.ray.put(job)

    def _actor(self, name: str) -> Any:
        """The process of a worker; it may have been started before, to measure."""
        if name not in self.actors:
            kind = self.ray.remote(num_cpus=self.options.cores, num_gpus=self.options.gpus, max_restarts=0)
            self.actors[name] = kind(WorkerActor).remote(name, self.names.index(name))
        return self.actors[name]

    def _start_worker(self, name: str) -> None:
        actor = self._actor(name)
        answer = actor.run.remote(self.lives[name], self.job_ref, self.master, self.shards, self.bounds)
        self.running[answer] = name

    def _look_at_nodes(self) -> None:
        """Versions of the nodes that are there; workers that wait for a node are used when it comes."""
        ask = self.ray.remote(num_cpus=0, max_retries=0)(_versions_here)
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        # By number: two nodes may have the same host name.
        nodes = {n["NodeID"]: n for n in self.ray.nodes() if n["Alive"]}
        asked = {node: ask.options(scheduling_strategy=affinity(node, soft=False)).remote() for node in nodes}
        theirs = {
            f"{n['NodeManagerHostname']} ({n['NodeManagerAddress']}, {node[:8]})": self.ray.get(asked[node])
            for node, n in nodes.items()
        }
        wrong = version_differences(versions(), theirs)
        if wrong:
            raise DeviceError(
                f"the cluster's versions differ: {'; '.join(wrong)}. Install the same Python and headrace on "
                "every node"
            )
        cpus = int(self.ray.cluster_resources().get("CPU", 0))
        if cpus < len(self.names) * self.options.cores:
            self._note(
                f"{len(self.names)} workers were asked for and the cluster has {cpus} CPUs: the others start "
                "when a node with a free CPU joins"
            )

    # ------------------------------------------------------------------ while it runs

    def _hear(self) -> None:
        poll_s = min(SLOWEST_POLL_S, max(POLL_S, 0.05 * (time.monotonic() - self.began_s)))
        done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=poll_s)
        for ref in done:
            name = self.running.pop(ref)
            try:
                self.cpu_s += self.ray.get(ref)["cpu_s"]
                self.ray.kill(self.actors.pop(name), no_restart=True)  # its CPU may be waited for
            except self.ray.exceptions.RayTaskError as error:
                raise self._failure(name, error) from None
            except self.ray.exceptions.RayError as error:
                self._replace(name, error)

    def _failure(self, name: str, error: Any) -> HeadraceError:
        """A worker's own exception, in the caller, with the worker's name."""
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, HeadraceError):
            kind = type(cause)
            text = f"{name}: {cause}"
            return kind(text)
        return WorkerError(f"{name} failed: {type(cause).__name__}: {cause}\n{error}")

    def _replace(self, name: str, error: Exception) -> None:
        why = str(error).strip().split("\n")[0]
        self.losses[name] = self.losses.get(name, 0) + 1
        if self.losses[name] > self.options.restarts:
            raise WorkerError(
                f"{name} was lost {self.losses[name]} times, the last time: {why}. The run's last checkpoint stands; "
                "raise restarts= if its machine is to be trusted"
            )
        self.lives[name] = self.ray.get(self.master.lost.remote(name, self.lives[name]))
        self.actors.pop(name, None)
        self._note(f"{name} was lost and is started again where its last merged push had ended: {why}")
        self._start_worker(name)

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        self.observer.note(sentence)

    def _report(self) -> None:
        seconds, rows = self.observer.standing()
        status = self.ray.get(self.master.status.remote(seconds, rows))
        if self.observer.progress(status, self._vector):
            self.ray.get(self.master.stop.remote())
            self.stopping = True
        if self.stopping:
            # Those that wait for a free CPU would only come to hear that it is over.
            for answer, name in list(self.running.items()):
                if name not in status["members"]:
                    del self.running[answer]

    def _vector(self) -> torch.Tensor:
        return shared_tensor(self.ray.get(self.master.vector.remote()))

    # ------------------------------------------------------------------ the end

    def _result(self, seconds: float) -> ClusterResult:
        self.ray.get(self.master.save.remote())
        status = self.ray.get(self.master.status.remote(*self.observer.standing()))
        found = self.ray.get(self.master.result.remote())
        self.job.take(shared_tensor(found["vector"]))
        if found["came_back"]:
            self.notes.append("the master was lost and went on from its checkpoint")
        busy_s = found["compute_s"] + found["exchange_s"]
        return ClusterResult(
            steps=status["steps"],
            rows=status["rows"],
            seconds=seconds,
            workers=status["members"],
            staleness=found["staleness"],
            local_steps=status["local_steps"],
            communication=found["exchange_s"] / busy_s if busy_s else 0.0,
            merge_s=found["merge_s"],
            master_cpu_s=found["master_cpu_s"],
            cpu_s=self.cpu_s,
            notes=self.notes,
            plan=self.plan,
        )

    def end(self) -> None:
        """Nobody outlives the run; on a cluster that goes on, this frees its CPUs."""
        for actor in (*self.actors.values(), self.master, *self.shards, self.orders):
            if actor is not None:
                self.ray.kill(actor, no_restart=True)


def _versions_here() -> dict[str, str]:
    return versions()
