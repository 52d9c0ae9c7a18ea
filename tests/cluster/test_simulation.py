"""Whole clusters on a fake clock: exactness, convergence, faults; and bugs planted on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clusters import LR, Factorisation, FactorSteps, simulate
from torch import Tensor

from headrace.cluster.compress import Packed
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Apply, Event, Instruction, Push
from headrace.cluster.simulation import Conditions
from headrace.cluster.transport import Service
from headrace.types import Learned

BAD_NETWORK = Conditions(delay_s=(0.1, 8.0), spread=0.5, loss=0.1, duplicate=0.2, retry_s=60.0)
STEPS = 4_000


def loss_of(service: Service) -> float:
    return float(Factorisation().loss(service.holder.vector()))


# --------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("network", [Conditions(), BAD_NETWORK])
def test_one_worker_one_step_is_serial_sgd_to_the_last_bit(network: Conditions) -> None:
    problem = Factorisation()
    service, _ = simulate(1, conditions=network, local_steps=1, length=400)
    serial = problem.serial(400, LR, seed=0)
    assert torch.equal(service.holder.vector(), serial)
    assert set(service.master.staleness) == {0}


def test_deaths_of_the_only_worker_change_nothing() -> None:
    deaths = tuple((t, "w0") for t in (50.0, 171.0, 302.0))
    service, _ = simulate(
        1, conditions=Conditions(delay_s=(0.1, 2.0), deaths=deaths), local_steps=5, length=400
    )
    assert torch.equal(service.holder.vector(), Factorisation().serial(400, LR, seed=0))
    assert service.master.members["w0"].rows == 400
    assert service.master.members["w0"].life == 4


def test_equal_seeds_give_equal_runs() -> None:
    runs = [simulate(3, conditions=BAD_NETWORK, seed=5, local_steps=4, length=200)[0] for _ in range(2)]
    assert torch.equal(runs[0].holder.vector(), runs[1].holder.vector())
    assert runs[0].master.staleness == runs[1].master.staleness


# --------------------------------------------------------------------------- convergence


def serial_loss() -> float:
    problem = Factorisation()
    return float(problem.loss(problem.serial(STEPS, LR, seed=0)))


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (4, {}),
        (4, {"accept": 2, "merge": "mean"}),
        (4, {"merge": "decayed", "decay_after": 2000.0}),
        (4, {"staleness": 2, "stale": "wait"}),
        (4, {"staleness": 2, "stale": "scale"}),
        (4, {"compress": "bf16"}),
        (4, {"compress": 0.5}),
    ],
)
def test_four_workers_reach_the_serial_loss_in_as_many_steps(workers: int, options: dict[str, Any]) -> None:
    """After T steps in all every variant must be below 1e-3 of the first loss. Measured: serial 2e-11, asynchronous
    5e-11, mean of two 2e-5, decayed 3e-10, waiting 4e-11, scaled 9e-8, compressed 5e-11. One seed, deterministic."""
    service, _ = simulate(workers, conditions=Conditions(spread=0.5), local_steps=8, steps=STEPS, **options)
    start = float(Factorisation().loss(Factorisation().start))
    assert service.master.steps == STEPS
    assert serial_loss() < 1e-3 * start
    assert loss_of(service) < 1e-3 * start


def test_the_rate_in_steps_is_the_serial_rate() -> None:
    """The steps to a tenth and to a hundredth of the first loss: at most 1.5 times those of serial SGD
    (measured: 1.0 times, in units of 250 steps)."""
    problem = Factorisation()
    start = float(problem.loss(problem.start))

    def steps_to(share: float, workers: int) -> int:
        for steps in range(750, STEPS, 250):
            service, _ = simulate(workers, conditions=Conditions(spread=0.5), local_steps=4, steps=steps)
            if loss_of(service) < share * start:
                return steps
        return STEPS

    for share in (0.1, 0.01):
        assert steps_to(share, 4) <= 1.5 * steps_to(share, 1)


def test_staleness_is_about_the_number_of_other_workers() -> None:
    service, _ = simulate(4, conditions=Conditions(spread=0.2), local_steps=8, steps=8000)
    ages = service.master.staleness
    assert 2.5 < sum(age * n for age, n in ages.items()) / ages.total() < 3.5


def test_waiting_bounds_the_age() -> None:
    network = Conditions(delay_s=(0.1, 3.0), slow={"w0": 6.0})
    free, _ = simulate(4, conditions=network, local_steps=8, steps=4000)
    bound, _ = simulate(4, conditions=network, local_steps=8, steps=4000, staleness=2, stale="wait")
    assert max(free.master.staleness) > 2 >= max(bound.master.staleness)


# --------------------------------------------------------------------------- faults


def test_every_row_counts_once_over_a_bad_network_with_deaths() -> None:
    network = Conditions(
        delay_s=(0.1, 8.0), spread=0.5, loss=0.1, duplicate=0.3, retry_s=60.0,
        deaths=((40.0, "w0"), (90.0, "w1"), (91.0, "w2"), (300.0, "w0")),
    )  # fmt: skip
    service, _ = simulate(3, conditions=network, local_steps=7, length=300)
    assert {name: member.rows for name, member in service.master.members.items()} == dict.fromkeys(
        ["w0", "w1", "w2"], 300
    )


def test_a_master_that_dies_loses_no_push_older_than_the_interval() -> None:
    network = Conditions(delay_s=(0.1, 1.0), retry_s=20.0, master_deaths=(150.0, 400.0))
    service, _ = simulate(3, conditions=network, local_steps=5, length=400, checkpoint_every=6)
    lost = 1200 - service.master.steps
    # Two deaths, at each at most 6 pushes of 5 steps.
    assert 0 <= lost <= 2 * 6 * 5
    assert loss_of(service) < 0.05 * Factorisation().loss(Factorisation().start)


# --------------------------------------------------------------------------- planted bugs


class AppliesTwice(Service):
    """Forgets that a push was merged when it comes again."""

    def handle(self, event: Event, packed: Packed | None = None) -> list[Instruction]:
        member = self.master.members.get(event.key.worker) if isinstance(event, Push) else None
        if member is not None and isinstance(event, Push) and event.key.life == member.life:
            member.sequence = min(member.sequence, event.key.sequence - 1)
        return super().handle(event, packed)


class Overwrites(Holder):
    """Puts the difference where it should add it."""

    def apply(self, order: Apply) -> None:
        self.values.zero_()
        super().apply(order)


class NeverRefreshes(FactorSteps):
    """Goes on from its own values and ignores what it is answered."""

    own: Tensor | None = None

    def advance(self, vector: Tensor, steps: int) -> Learned:
        done = super().advance(vector if self.own is None else self.own, steps)
        self.own = done.vector.clone()
        return done


def test_planted_push_merged_twice_is_seen() -> None:
    network = Conditions(delay_s=(0.1, 2.0), duplicate=0.5)
    good, _ = simulate(1, conditions=network, local_steps=1, length=200)
    bad, _ = simulate(1, conditions=network, local_steps=1, length=200, service_type=AppliesTwice)
    assert good.master.members["w0"].rows == 200
    assert bad.master.members["w0"].rows != 200
    assert not torch.equal(bad.holder.vector(), good.holder.vector())


def test_planted_overwriting_is_seen() -> None:
    good, _ = simulate(1, local_steps=1, length=50)
    bad, _ = simulate(1, local_steps=1, length=50, holder_type=Overwrites)
    assert not torch.equal(bad.holder.vector(), good.holder.vector())


def test_planted_stale_worker_is_seen() -> None:
    """A worker that never takes up the others' work pushes its own distance again and again."""
    stale, _ = simulate(3, local_steps=4, steps=3000, local=NeverRefreshes)
    good, _ = simulate(3, local_steps=4, steps=3000)
    assert not loss_of(stale) < 10 * loss_of(good)
