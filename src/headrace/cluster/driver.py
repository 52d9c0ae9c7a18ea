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

from headrace.cluster.actors import MasterActor, MasterSpec, WorkerActor, versions
from headrace.cluster.connect import connected, version_differences
from headrace.cluster.holder import shard_bounds
from headrace.cluster.options import ClusterOptions
from headrace.cluster.sending import as_array, shared_tensor
from headrace.cluster.shards import ShardActor
from headrace.cluster.transport import Work
from headrace.errors import DeviceError, HeadraceError, WorkerError

POLL_S = 0.2


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
    """The master's time for all pushes together; near ``seconds``, the master is what everyone waits for."""
    cpu_s: float
    """The workers' processor time for all steps and exchanges; lives that were killed are not in it."""
    notes: list[str] = field(default_factory=list)


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
        self.cpu_s = 0.0
        self.master: Any = None
        self.bounds: list[tuple[int, int]] = []
        if values.nbytes > options.shard_bytes:
            self.bounds = shard_bounds(values.numel(), values.itemsize, options.shard_bytes)
        self.shards: list[Any] = []

    def run(self) -> ClusterResult:
        began_s = time.monotonic()
        self._start_master()
        self._name_workers()
        self._look_at_nodes()
        self.job_ref = self.ray.put(self.job)
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
            most_local_steps=self._most_local_steps(),
            plans=self.options.local_steps == "auto",
            bounds=tuple(self.bounds),
        )
        self.shards = [self.ray.remote(num_cpus=0)(ShardActor).remote() for _ in self.bounds]
        actor = self.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(MasterActor)
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self.ray.get_runtime_context().get_node_id(), soft=True
        )  # beside the driver, whose disk has the checkpoints
        self.master = actor.options(scheduling_strategy=here, max_concurrency=1000).remote(spec, self.shards)
        self.ray.get(self.master.begin.remote(as_array(self.values)))

    def _name_workers(self) -> None:
        """One worker for each shard. A run that is resumed keeps its shards, and its workers' lives go on."""
        before: dict[str, int] = self.ray.get(self.master.lives.remote())
        asked = self.options.workers
        cpus = max(1, int(self.ray.cluster_resources().get("CPU", 1)) // self.options.cores)
        count: int = asked if asked != "auto" else len(before) or cpus
        self.job = replace(self.job, world_size=count)
        self.names = [f"worker-{rank}" for rank in range(count)]
        self.lives = {name: before.get(name, 0) + 1 for name in self.names}

    def _most_local_steps(self) -> int:
        """At least eight pushes a pass: a guess at what staleness bears."""
        total: int = self.job.total_steps or 1024
        a_pass = total // max(1, self.job.passes or 1)
        world: int = self.job.world_size
        return max(1, a_pass // (8 * max(1, world)))

    def _start_worker(self, name: str) -> None:
        actor = self.ray.remote(num_cpus=self.options.cores, num_gpus=self.options.gpus, max_restarts=0)(
            WorkerActor
        )
        rank = self.names.index(name)
        self.actors[name] = actor.remote(name, rank, self.lives[name])
        self.running[self.actors[name].run.remote(self.job_ref, self.master, self.shards, self.bounds)] = name

    def _look_at_nodes(self) -> None:
        """Versions of the nodes that are there; workers that wait for a node are used when it comes."""
        ask = self.ray.remote(num_cpus=0, max_retries=0)(_versions_here)
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = {n["NodeManagerHostname"]: n["NodeID"] for n in self.ray.nodes() if n["Alive"]}
        answers = {
            host: ask.options(scheduling_strategy=affinity(node, soft=False)).remote()
            for host, node in nodes.items()
        }
        theirs = {host: self.ray.get(ref) for host, ref in answers.items()}
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
        done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_S)
        for ref in done:
            name = self.running.pop(ref)
            try:
                self.cpu_s += self.ray.get(ref)["cpu_s"]
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
            cpu_s=self.cpu_s,
            notes=self.notes,
        )

    def end(self) -> None:
        """Nobody outlives the run; on a cluster that goes on, this frees its CPUs."""
        for actor in (*self.actors.values(), self.master, *self.shards):
            if actor is not None:
                self.ray.kill(actor, no_restart=True)


def _versions_here() -> dict[str, str]:
    return versions()
