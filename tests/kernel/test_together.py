"""A kernel machine trained by several machines, over the simulated transport of `headrace.cluster`; one slow test
goes through Ray."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import KernelClassifier, KernelRegressor
from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.transport import Conversation, Service, converse
from headrace.errors import OptionError
from headrace.kernel import together
from headrace.kernel.stream_data import MemoryChunks
from headrace.kernel.streaming import fit_stream, prepare_stream
from headrace.kernel.together import EVERYONE, KernelSteps, KernelWork, cluster_options, fit_together

CENTERS = 120
ROWS = 1500


def data(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    X = random.randn(rows, 4)
    return X, np.sin(2 * X[:, :1]) + X[:, 1:2] * X[:, 2:3]


def work_on(rows: int = ROWS, *, workers: int, passes: int = 3, **options: Any) -> KernelWork:
    X, y = data(rows)
    # A batch of this machine's own choice would make results differ from run to run.
    fixed = {"bandwidth": 2.0, "batch_size": 64, "epochs": passes, "tol": 0, "verbose": False, **options}
    chosen = KernelRegressor(**fixed)._settings(1)
    chunks = MemoryChunks(X, y, None)
    return KernelWork(
        model=prepare_stream(chunks, CENTERS, chosen, None),
        settings=chosen,
        chunks=chunks,
        passes=passes,
        total_steps=None,
        world_size=workers,
    )


def simulated(work: KernelWork, conditions: Conditions, **options: Any) -> Service:
    given = {"accept": EVERYONE, "merge": "mean", "local_steps": 1, **options}
    service = Service(Master(MasterOptions(**given)), Holder(work.values().clone()))
    names = [f"w{i}" for i in range(work.world_size)]

    def begin(name: str, life: int) -> Conversation:
        return converse(name, life, work.local(names.index(name)), Compressor(None))

    Simulation(service, begin, names, conditions, seed=3, max_s=1e6).run()
    work.take(service.holder.vector())
    return service


def error_of(work: KernelWork) -> float:
    """Mean squared error on new rows over their variance."""
    X, y = data(2000, seed=9)
    return float(((work.model.values(X).numpy() - y) ** 2).mean() / y.var())


class NoRows(KernelSteps):
    """Takes no steps, but notes the rows that it was to take them on."""

    seen: np.ndarray

    def _block(self) -> Any:
        chunk = super()._block()
        np.add.at(self.seen, chunk.rows[:, 0].astype(int), 1)
        return self.work.chunks.sample(np.arange(1))


@functools.cache
def prepared() -> KernelWork:
    return work_on(400, workers=1)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 400), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_every_row_of_every_pass_is_in_one_machines_steps(
    rows: int, workers: int, passes: int, granted: int
) -> None:
    """Rows carry their number; a restart after each grant changes nothing."""
    work = replace(prepared(), world_size=workers, passes=passes)
    numbered = np.tile(np.arange(rows, dtype=float)[:, None], (1, 4))
    work.chunks.rows, work.chunks.targets_nc, work.chunks.shape = (
        numbered,
        np.zeros((rows, 1)),
        numbered.shape,
    )
    seen = np.zeros(rows)
    for rank in range(workers):
        place: Any = None
        for _ in range(1000):
            machine = NoRows(work, rank)
            machine.seen = seen
            machine.resume(place)
            if not machine._has_block():
                break
            done = machine.advance(work.values(), granted)
            place = done.place
            assert done.steps <= granted
            if done.finished:
                break
        else:
            pytest.fail("never finished")
    assert (seen == passes).all()


def test_one_machine_is_the_serial_run() -> None:
    work = work_on(workers=1)
    alone, vector = work.local(0), work.values()
    while not (done := alone.advance(vector, 1)).finished:
        vector = done.vector
    service = simulated(work, Conditions())
    torch.testing.assert_close(service.holder.vector(), done.vector, rtol=0, atol=1e-12)


def test_machines_together_learn_what_one_learns() -> None:
    X, y = data()
    one = fit_stream(X, y, None, CENTERS, work_on(workers=1).settings)
    alone = work_on(workers=1)
    alone.take(one.expansion.gather())
    errors = {}
    bad = Conditions(
        spread=0.5, delay_s=(0.0, 2.0), loss=0.05, duplicate=0.05, retry_s=20.0, deaths=((9.0, "w1"),)
    )
    for name, workers, conditions in (("three", 3, Conditions()), ("three, with faults", 3, bad)):
        work = work_on(workers=workers, passes=6)
        simulated(work, conditions)
        errors[name] = error_of(work)
    errors["one"] = error_of(alone)
    assert errors["one"] < 0.2, errors
    assert max(errors.values()) < 1.3 * errors["one"], errors


def test_sums_of_their_differences_would_not_do() -> None:
    """Why differences are averaged: if this fails, summing them is the faster choice."""
    errors = {}
    for merge in ("mean", "sum"):
        work = work_on(workers=8)
        simulated(work, Conditions(spread=0.3), merge=merge)
        errors[merge] = error_of(work)
    assert errors["mean"] < 0.3 < 3.0 < errors["sum"], errors


def here(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[dict[str, Any]]:
    """Let `run_on_cluster` run on the simulated transport; returns the options that it was given."""
    asked: list[dict[str, Any]] = []

    class Result:
        local_steps = 1

    def run(work: Any, cluster: Any, progress: Any, **options: Any) -> Any:
        asked.append(cluster)
        service = simulated(replace(work, world_size=cluster["workers"]), Conditions())
        ended = progress({"losses": service.losses}, service.holder.vector)
        result = Result()
        result.workers = {f"w{i}": (1, 1, 1, 1) for i in range(cluster["workers"])}  # type: ignore[attr-defined]
        result.ended = ended  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr("headrace.training.run_on_cluster", run)
    return asked


@pytest.mark.parametrize("centers", [None, 100])
def test_the_estimators_option(centers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CENTERS", 150)
    asked = here(monkeypatch)
    X, _ = data()
    labels = np.where(X[:, 0] + X[:, 1] ** 2 > 0.5, "yes", "no")
    model = KernelClassifier(bandwidth=3.0, centers=centers, epochs=4, tol=0, cluster=3, verbose=False)
    model.fit(X, labels, sample_weight=np.ones(ROWS))
    assert asked == [{"accept": EVERYONE, "merge": "mean", "local_steps": 1, "workers": 3}]
    assert model.plan_["centers"] == (150 if centers is None else 100)
    assert model.plan_["cluster"] == 3
    assert model.cluster_.local_steps == 1
    assert len(model.residuals_) == 4
    assert model.residuals_[-1] < model.residuals_[0]
    assert model.score(X, labels) > 0.93
    with pytest.warns(UserWarning, match="partial_fit trains on this machine alone"):
        model.partial_fit(X[:200], labels[:200])


def test_early_stopping_and_tol(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch)
    X, y = data()
    options = {"bandwidth": 2.0, "centers": 100, "epochs": 6, "cluster": 2, "verbose": False}
    model = KernelRegressor(early_stopping=True, tol=0, **options).fit(X, y[:, 0])
    assert len(model.validation_scores_) >= 1
    reached = KernelRegressor(tol=10.0, **options).fit(X, y[:, 0])
    assert reached.cluster_.ended
    assert len(reached.residuals_) == 1


@pytest.mark.parametrize("cluster", [True, 1.5, "three", ["a"]])
def test_what_cluster_may_not_be(cluster: Any) -> None:
    with pytest.raises(OptionError, match="give a number of workers"):
        KernelRegressor(cluster=cluster, verbose=False).fit(*data(50))


def test_what_cluster_may_be() -> None:
    assert cluster_options("2")["workers"] == 2
    assert cluster_options("auto")["address"] == "auto"
    assert cluster_options({"workers": 2, "merge": "sum", "accept": 1})["merge"] == "sum"


def test_several_devices_and_a_cluster() -> None:
    X, y = data(100)
    chosen = KernelRegressor(device=["cpu", "cpu"], bandwidth=1.0, verbose=False)._settings(1)
    with pytest.raises(OptionError, match="one device on each machine"):
        fit_together(X, y, None, None, chosen, 2)


@pytest.mark.slow
def test_through_ray() -> None:
    pytest.importorskip("ray")
    X, _ = data(3000)
    labels = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int)
    model = KernelClassifier(bandwidth=3.0, centers=200, epochs=3, tol=0, cluster=2, verbose=False).fit(
        X, labels
    )
    assert sorted(model.cluster_.workers) == ["worker-0", "worker-1"]
    assert model.cluster_.rows == 3 * 3000
    assert model.score(X, labels) > 0.95
