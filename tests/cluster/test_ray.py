"""The Ray transport with real processes: one small cluster on this machine for the whole file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.cluster.connect import connected
from headrace.cluster.driver import ClusterResult, Observer, run_cluster
from headrace.cluster.options import ClusterOptions
from headrace.cluster.orders import SAVE_S, OrderActor, RayOrders
from headrace.cluster.sending import sendable
from headrace.cluster.training import Job
from headrace.engine.options import FitOptions
from headrace.engine.served import SKETCH, order_service
from headrace.engine.setup import open_data
from headrace.errors import WorkerError

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with connected(ClusterOptions(workers=2)) as found:
        yield found


def problem(rows: int = 600) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def loss_of(module: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(data[0]), data[1]))


def processes(title: str) -> list[int]:
    """Ray's processes of this name below this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            if command.startswith(title) and is_ours(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return False


class Killer(Observer):
    """Kills a process once, when so many steps are done."""

    def __init__(self, title: str, at_step: int) -> None:
        self.title, self.at_step, self.killed = title, at_step, 0

    def progress(self, status: dict[str, Any], vector: Callable[[], Tensor]) -> bool:
        if not self.killed and status["steps"] >= self.at_step:
            victims = processes(self.title)
            if victims:
                os.kill(victims[0], signal.SIGKILL)
                self.killed = victims[0]
        return False


def train(observer: Observer, epochs: int, folder: Path, **options: Any) -> tuple[nn.Module, ClusterResult]:
    data, module = problem(), network()
    fit = FitOptions(epochs=epochs, batch_size=10, lr=0.2)
    source, _, _ = open_data(data, fit)
    job = Job(
        module=module,
        data=sendable(data, source),
        options=fit,
        world_size=2,
        passes=epochs,
        total_steps=epochs * 60,
    )
    return module, run_cluster(job, ClusterOptions(workers=2, **options), observer, folder=folder)


@pytest.fixture(scope="module")
def undisturbed(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss that a run reaches in which nobody dies."""
    module, result = train(Observer(), epochs=30, folder=tmp_path_factory.mktemp("calm"), local_steps=4)
    assert result.rows == 30 * 600 and not result.notes
    return loss_of(module, problem())


def test_fit_on_a_cluster_learns_and_leaves_a_run_folder(ray: Any, tmp_path: Path) -> None:
    data, module = problem(), network()
    before = loss_of(module, data)
    run = hr.fit(
        module,
        data,
        cluster={"workers": 2, "accept": 2, "merge": "mean", "compress": "bf16"},
        order="balanced",
        epochs=12,
        lr=0.5,
        batch_size=10,
        validation=data,
        out=tmp_path / "run",
        progress=False,
    )
    assert run.model is module and run.steps == 12 * 60
    assert run.last["examples"] == 12 * 600 and run.last["kind"] == "epoch"
    assert loss_of(module, data) < 0.6 * before
    assert run.last["validation_loss"] == pytest.approx(loss_of(module, data), rel=1e-6)
    assert {"model.safetensors", "metrics.jsonl", "plan.json", "state"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    told = {decision.name: decision for decision in run.plan.decisions}
    assert "an exchange takes" in told["local_steps"].reason or "would keep" in told["local_steps"].reason
    assert (
        sum(run.last["staleness"]) == len([r for r in run.metrics if r["kind"] == "train"])
        or sum(run.last["staleness"]) >= 2
    ), "every push is in the histogram"
    assert "Staleness" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    timeline = (tmp_path / "run" / "timeline.json").read_text(encoding="utf-8")
    assert "worker-0" in timeline and "worker-1" in timeline and "exchange" in timeline


def test_a_killed_order_service_loses_the_batches_since_its_last_save(ray: Any, tmp_path: Path) -> None:
    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(OrderActor)
    actor, witness = kind.remote(120, 1, 0, str(tmp_path)), order_service(120, 1, 0)
    served = RayOrders(actor)

    def observe(to: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        rows = torch.arange(20 * number, 20 * number + 20)
        to.observe(0, rows, torch.randn(20, SKETCH, generator=generator))

    own = witness.next_epoch(0)
    assert torch.equal(served.next_epoch(0), own)  # saved: it is the first call
    observe(served, 0)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    time.sleep(SAVE_S + 0.2)
    observe(served, 1)  # saved with the one before
    observe(served, 2)  # not saved
    ray.get(actor.__ray_call__.remote(lambda _: None))  # all of them have arrived
    os.kill(pid, signal.SIGKILL)
    for number in (0, 1):
        observe(witness, number)
    expected = witness.next_epoch(0)
    assert not torch.equal(expected, own)
    assert torch.equal(served.next_epoch(0, own), expected)
    assert ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) != pid
    ray.kill(actor)


@pytest.mark.parametrize("shard_bytes", [500, pytest.param(64 << 20, marks=pytest.mark.slow)])
def test_one_worker_with_one_local_step_is_the_engines_own_run(ray: Any, shard_bytes: int) -> None:
    """To the last bit, whether one actor holds the 1,424 bytes of parameters or three."""
    data = problem(100)
    serial, alone = network(), network()
    options: dict[str, Any] = {"epochs": 1, "batch_size": 1, "lr": 0.1, "capture": "eager", "progress": False}
    hr.fit(serial, data, **options, deterministic=True)
    hr.fit(alone, data, **options, cluster={"workers": 1, "local_steps": 1, "shard_bytes": shard_bytes})
    for mine, theirs in zip(alone.parameters(), serial.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_worker_that_is_killed_is_replaced_and_its_shard_goes_on(
    ray: Any, tmp_path: Path, undisturbed: float
) -> None:
    killer = Killer("ray::WorkerActor", at_step=100)
    module, result = train(killer, epochs=30, folder=tmp_path, local_steps=4)
    assert killer.killed and any("was lost and is started again" in note for note in result.notes)
    assert result.rows == 30 * 600, "every row of every pass is merged once"
    assert sorted(member[3] for member in result.workers.values()) == [1, 2]
    assert loss_of(module, problem()) < 1.5 * undisturbed < 0.4


def test_a_worker_without_its_data_is_named(ray: Any, tmp_path: Path) -> None:
    job = Job(
        module=network(),
        data=str(tmp_path / "nowhere"),
        options=FitOptions(epochs=1),
        world_size=1,
        passes=1,
        total_steps=1,
    )
    with pytest.raises((WorkerError, hr.HeadraceError), match=r"worker-0.*nowhere"):
        run_cluster(job, ClusterOptions(workers=1), Observer())


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [64 << 20, 500])
def test_a_master_that_is_killed_goes_on_from_its_checkpoint(
    ray: Any, tmp_path: Path, undisturbed: float, shard_bytes: int
) -> None:
    killer = Killer("ray::MasterActor", at_step=400)
    options = {"local_steps": 4, "checkpoint_every": 20, "shard_bytes": shard_bytes}
    module, result = train(killer, epochs=60, folder=tmp_path, **options)
    assert killer.killed and any("went on from its checkpoint" in note for note in result.notes)
    lost = 60 * 60 - result.steps
    assert 0 <= lost <= 20 * 4 + 2 * 4, "at most the pushes since the last checkpoint"
    assert loss_of(module, problem()) < 1.1 * undisturbed, "twice the passes, less what was lost"


def test_topics_are_learned_on_a_cluster(ray: Any) -> None:
    """Affine pushes of two machines give topics as good as one machine's, and every document is learned from."""
    pytest.importorskip("numba")
    draws = np.random.RandomState(0)
    beta = draws.dirichlet(np.full(120, 0.05), 5)
    theta = draws.dirichlet(np.full(5, 0.1), 400)
    counts = np.array([draws.multinomial(60, p / p.sum()) for p in theta @ beta], dtype=np.float64)
    options: dict[str, Any] = {
        "learning_method": "online",
        "batch_size": 16,
        "max_iter": 6,
        "random_state": 0,
    }
    alone = hr.LatentDirichletAllocation(5, **options).fit(counts)
    together = hr.LatentDirichletAllocation(
        5, **options, cluster={"workers": 2, "local_steps": 3, "compress": "bf16"}, held_out=counts[:50]
    ).fit(counts)
    assert together.cluster_.rows == 6 * 400 and together.n_iter_ == 6
    assert sum(together.cluster_.staleness.values()) == sum(m[2] for m in together.cluster_.workers.values())
    assert together.history_[-1]["documents"] == 6 * 400
    assert together.held_out_perplexity(counts) < 1.1 * alone.held_out_perplexity(counts)
