"""A worker's own training without a cluster around it: threads without locks, and orders made by a service."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ray import loss_of, network, problem
from torch import Tensor, nn

from headrace.cluster import orders
from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.layout import Layout
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.sending import as_array
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.training import Job, TrainingSteps, twin_of
from headrace.cluster.transport import Service, converse
from headrace.engine.options import FitOptions
from headrace.engine.served import SKETCH, ServedOrder, order_service
from headrace.errors import OptionError
from headrace.order.coordinated import OrderService

ROWS = 120


def job(**changes: Any) -> Job:
    options = FitOptions(epochs=3, batch_size=4, lr=0.1, **changes.pop("options", {}))
    values: dict[str, Any] = {
        "module": network(), "data": problem(ROWS), "options": options, "world_size": 1, "passes": 3,
        "total_steps": 90, "rows": ROWS,
    }  # fmt: skip
    return Job(**{**values, **changes})


# --------------------------------------------------------------------------- cores


def test_twins_share_values_and_not_gradients() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin = twin_of(module)
    twin(torch.randn(8, 3)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():
        twin[0].weight.fill_(7)  # type: ignore[union-attr,operator]
    assert bool((module[0].weight == 7).all())  # type: ignore[union-attr,arg-type]
    assert torch.equal(module[1].running_mean, twin[1].running_mean)  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("capture", ["chain", "eager"])
def test_threads_take_all_steps_and_learn_as_one(capture: str) -> None:
    """Every row of every pass is used once; the loss is that of one thread within a fifth."""
    losses = {}
    for cores in (1, 3):
        work = job(cores=cores, options={"capture": capture}, passes=30)
        steps, vector, rows, count = TrainingSteps(work, 0), work.values(), 0, 0
        while True:
            done = steps.advance(vector, 7)
            vector, rows, count = done.vector, rows + done.rows, count + done.steps
            if done.finished:
                break
        work.take(vector)
        losses[cores] = loss_of(work.module, problem(ROWS))
        assert rows == 30 * ROWS and count == 30 * ROWS // 4
    assert losses[3] < 1.2 * losses[1] < 1.2 * loss_of(network(), problem(ROWS)) / 2


# --------------------------------------------------------------------------- balanced orders


class Recording(OrderService):
    """Remembers which rows were observed."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.seen: list[list[int]] = [[] for _ in self.orders]

    def observe(self, worker: int, indices: Tensor, vectors_bk: Tensor) -> None:
        self.seen[worker] += indices.tolist()
        assert vectors_bk.shape == (len(indices), self.shared.running.shape[-1])
        assert bool((vectors_bk.abs().sum(1) > 0).all()), "a row without a signal"
        super().observe(worker, indices, vectors_bk)


def recording(world: int) -> Recording:
    plain = order_service(ROWS, world, 0)
    return Recording([len(o) for o in plain.orders], plain.shared.running.shape[-1])


def test_shares_stay_and_cover_all_rows() -> None:
    service = order_service(ROWS + 1, 3, 0)
    served = [ServedOrder(ROWS + 1, rank, 3, service) for rank in range(3)]
    passes = []
    for _ in range(2):
        own = []
        for order in served:
            whole = torch.cat(list(order.epoch()))
            assert torch.equal(whole.sort().values, torch.arange(ROWS + 1))
            own.append(set(whole[order.start : order.stop].tolist()))
        assert set.union(*own) == set(range(ROWS + 1)) and sum(map(len, own)) == ROWS + 1
        passes.append(own)
    assert passes[0] == passes[1]


def test_workers_send_a_signal_for_every_row_and_take_the_order_they_get() -> None:
    service = recording(2)
    workers = [
        TrainingSteps(job(world_size=2, orders=service, options={"order": "balanced"}), r) for r in (0, 1)
    ]
    vector = Layout.of(network()).gather()
    for worker in workers:
        while not worker.advance(vector.clone(), 4).finished:
            pass
    for rank, seen in enumerate(service.seen):
        # The last pass is sent when a further one is asked for.
        assert sorted(seen) == sorted(list(range(ROWS // 2)) * (len(seen) // (ROWS // 2)))
        assert len(seen) >= 2 * ROWS // 2
        assert not torch.equal(service.orders[rank], order_service(ROWS, 2, 0).orders[rank]), (
            "never reordered"
        )


def test_the_walk_of_all_workers_stays_lower_than_that_of_shuffled_rows() -> None:
    """Two workers at constant parameters: the largest prefix sum of the centred gradients, both workers' steps
    together, must fall under 0.6 of the first pass's."""
    generator = torch.Generator().manual_seed(3)
    service = order_service(ROWS, 2, 0)
    dim = service.shared.running.shape[-1]
    vectors = torch.zeros(2, ROWS // 2, dim)
    vectors[:, :, :4] = torch.randn(2, ROWS // 2, 4, generator=generator)
    vectors -= vectors.mean(1, keepdim=True)
    heights = []
    for _ in range(12):
        now = [service.next_epoch(w) for w in (0, 1)]
        walk = torch.stack([vectors[w][now[w]] for w in (0, 1)]).sum(0).cumsum(0)
        heights.append(float(walk.abs().max()))
        for start in range(0, ROWS // 2, 10):
            for w in (0, 1):
                rows = now[w][start : start + 10]
                service.observe(w, rows, vectors[w][rows])
    assert max(heights[4:]) < 0.6 * heights[0], heights


def test_a_worker_that_comes_back_goes_on_in_its_order() -> None:
    """Bit for bit, and with a service that knows nothing of it."""

    def start(service: OrderService) -> TrainingSteps:
        return TrainingSteps(job(orders=service, options={"order": "balanced"}), 0)

    whole, vector = start(recording(1)), job().values()
    for _ in range(8):
        done = whole.advance(vector, 6)
        vector = done.vector
    after = whole.advance(vector.clone(), 6)
    fresh = recording(1)
    again = start(fresh)
    again.resume(copy.deepcopy(done.place))
    assert whole.order is not None and whole.order.own is not None
    assert torch.equal(fresh.orders[0], whole.order.own), "the service learns the order from the worker"
    assert torch.equal(again.advance(vector.clone(), 6).vector, after.vector)
    assert done.place["loader"]["permutation"] is None, "all rows travel with every push"


def observed(service: Any, batches: range, wrap: Any = lambda tensor: tensor) -> None:
    """Batches of ten rows of both workers, the same for the same numbers."""
    for number in batches:
        for worker in (0, 1):
            generator = torch.Generator().manual_seed(100 * number + worker)
            rows = torch.arange(10 * number, 10 * number + 10)
            service.observe(worker, wrap(rows), wrap(torch.randn(10, SKETCH, generator=generator)))


def test_a_service_that_comes_back_has_the_signs_of_its_newest_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "SAVE_S", 0.0)
    monkeypatch.setattr(orders, "MOST_OF_ITS_TIME", 1e9)
    first, witness = orders.OrderActor(120, 2, 0, str(tmp_path)), order_service(120, 2, 0)
    for worker in (0, 1):
        assert (first.next_epoch(worker, None) == witness.next_epoch(worker).numpy()).all()
    observed(first, range(4), as_array)
    first.due_s = float("inf")  # what follows is not saved
    observed(first, range(4, 6), as_array)
    observed(witness, range(4))
    second = orders.OrderActor(120, 2, 0, str(tmp_path))
    for worker in (0, 1):
        own = witness.orders[worker].clone()
        expected = witness.next_epoch(worker)
        assert not torch.equal(expected, own)
        assert (second.next_epoch(worker, own.numpy()) == expected.numpy()).all()
    # Another number of workers: nothing of it fits.
    other = orders.OrderActor(120, 3, 0, str(tmp_path))
    assert torch.equal(other.service.orders[0], order_service(120, 3, 0).orders[0])


def test_a_save_of_an_earlier_pass_misleads_nobody() -> None:
    """The worker's own permutation counts, and signs of another pass do not."""
    late, behind = order_service(120, 2, 0), order_service(120, 2, 0)
    observed(behind, range(6))
    observed(late, range(6))
    own = late.next_epoch(0).clone()
    assert torch.equal(behind.next_epoch(0, own), own), "rows without a sign keep their rank"
    observed(late, range(3))
    assert not torch.equal(late.next_epoch(0, own), own), "its own signs are kept"


def test_a_service_refuses_an_order_that_is_none() -> None:
    with pytest.raises(OptionError, match="no permutation"):
        order_service(10, 2, 0).go_on(0, torch.tensor([0, 0, 1, 2, 3]))


def test_every_row_counts_once_in_a_balanced_run_with_deaths() -> None:
    service = recording(2)
    work = job(world_size=2, orders=service, options={"order": "balanced"})
    master = Service(Master(MasterOptions(local_steps=3)), Holder(work.values()))

    def start(name: str, life: int) -> Any:
        own = Job(**{**vars(work), "module": network()})
        return converse(name, life, TrainingSteps(own, int(name)), Compressor())

    network_ = Conditions(delay_s=(0.1, 2.0), deaths=((20.0, "0"), (50.0, "1")))
    Simulation(master, start, ["0", "1"], network_).run()
    assert {m.rows for m in master.master.members.values()} == {3 * ROWS // 2}
    assert sorted(m.life for m in master.master.members.values()) == [2, 2]
