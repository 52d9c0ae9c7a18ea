"""The coordinator under any interleaving of events, and its adaptive rule against every ratio of speeds."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.hogbatch.adaptive import adapt, step_scale
from headrace.engine.hogbatch.coordinator import (
    Coordinator,
    Done,
    Grant,
    Instruction,
    Lost,
    Replace,
    Rules,
    WorkerPlan,
)


class AnyInterleaving(RuleBasedStateMachine):
    """Workers finish, stop early, die, hang, answer late, come, go and change size in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = {
            name: WorkerPlan(name=name, batch=batch, low=low, high=high, powers_of_two=name == "gpu")
            for name, batch, low, high in [("a", 1, 1, 8), ("b", 3, 2, 16), ("gpu", 32, 4, 64)]
        }
        self.rows = 211
        rules = Rules(adaptive=True, restarts=2, grant_s=1.0, scaling="linear", reference_batch=1)
        self.machine = Coordinator(self.rows, list(self.plans.values()), rules)
        self.finished = [0] * self.rows
        self.flying: dict[int, Grant] = {}
        self.late: list[Grant] = []
        self.present = set(self.plans)
        self.epochs = 0
        self.obey(self.machine.begin())

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Grant):
                assert instruction.worker in self.present
                assert 0 <= instruction.start < instruction.stop <= self.rows
                self.flying[instruction.number] = instruction
            elif isinstance(instruction, Lost):
                self.present.discard(instruction.worker)
                assert instruction.last == (not self.present)
            elif isinstance(instruction, Done):
                assert self.finished == [1] * self.rows, "a row was left out or used twice"
                assert not self.flying
                self.finished = [0] * self.rows
                self.epochs += 1
                assert self.machine.epoch == self.epochs
                self.obey(self.machine.begin())
            else:
                assert isinstance(instruction, Replace)

    def count(self, grant: Grant, rows: int) -> None:
        for row in range(grant.start, grant.start + rows):
            self.finished[row] += 1
            assert self.finished[row] == 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), seconds=st.floats(1e-4, 10))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        grant = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        self.count(grant, grant.rows)
        self.obey(self.machine.finished(grant.worker, grant.number, grant.rows, seconds))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def stop_early(self, data: st.DataObject) -> None:
        grant = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying))))
        rows = data.draw(st.integers(0, grant.rows))
        self.count(grant, rows)
        self.obey(self.machine.finished(grant.worker, grant.number, rows, 0.1))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        grant = self.flying[data.draw(st.sampled_from(sorted(self.flying)))]
        rows = data.draw(st.integers(0, grant.rows))
        self.count(grant, rows)
        gone = [number for number, other in self.flying.items() if other.worker == grant.worker]
        self.late += [self.flying.pop(number) for number in gone]
        self.obey(self.machine.died(grant.worker, grant.number, rows))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        grant = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        assert self.machine.finished(grant.worker, grant.number, grant.rows, 1.0) == []

    @rule(name=st.sampled_from(["a", "b", "gpu"]), batch=st.integers(1, 200))
    def resize(self, name: str, batch: int) -> None:
        self.machine.resized(name, batch)

    @precondition(lambda self: len(self.present) < 3)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.plans) - self.present)))
        self.present.add(name)
        self.obey(self.machine.joined(self.plans[name]))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        idle = sorted(self.present - {grant.worker for grant in self.flying.values()})
        if len(self.present) > 1 and idle:
            name = data.draw(st.sampled_from(idle))
            self.present.discard(name)
            self.obey(self.machine.left(name))

    @invariant()
    def batches_keep_their_limits(self) -> None:
        for name, batch in self.machine.batches().items():
            assert self.plans[name].low <= batch <= self.plans[name].high

    @invariant()
    def nobody_waits_without_reason(self) -> None:
        busy = {grant.worker for grant in self.flying.values()}
        if self.machine.remaining():
            assert busy == self.present

    def teardown(self) -> None:
        if not self.present:
            self.present.add("a")
            self.obey(self.machine.joined(self.plans["a"]))
        target = self.epochs + 1
        while self.epochs < target:
            grant = self.flying.pop(min(self.flying))
            self.count(grant, grant.rows)
            self.obey(self.machine.finished(grant.worker, grant.number, grant.rows, 0.01))


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def simulate(
    machine: Coordinator, rows_per_s: dict[str, float], epochs: int, fixed_s: float = 0.0
) -> tuple[float, dict[str, int]]:
    """Run epochs against a fake clock; returns the time and the updates made in the last epoch."""
    clock, order = 0.0, itertools.count()
    agenda: list[tuple[float, int, Grant, float]] = []
    free_at = dict.fromkeys(rows_per_s, 0.0)
    before = machine.updates()

    def obey(instructions: list[Instruction]) -> bool:
        over = False
        for instruction in instructions:
            over = over or isinstance(instruction, Done)
            if isinstance(instruction, Grant):
                name = instruction.worker
                took = instruction.rows / rows_per_s[name] + fixed_s * instruction.updates
                free_at[name] = max(free_at[name], clock) + took
                heapq.heappush(agenda, (free_at[name], next(order), instruction, took))
        return over

    for _ in range(epochs):
        before = machine.updates()
        over = obey(machine.begin())
        while not over:
            clock, _, grant, took = heapq.heappop(agenda)
            over = obey(machine.finished(grant.worker, grant.number, grant.rows, took))
    return clock, {name: n - before[name] for name, n in machine.updates().items()}


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.floats(0, 3).map(lambda exponent: 10.0**exponent),
    fixed_s=st.sampled_from([0.0, 1e-5, 1e-4]),
    graphs=st.booleans(),
    cpus=st.integers(1, 3),
)
def test_adaptive_makes_all_workers_update_equally_often(
    ratio: float, fixed_s: float, graphs: bool, cpus: int
) -> None:
    plans = [WorkerPlan(name=f"cpu{i}", batch=1, low=1, high=1 << 20) for i in range(cpus)]
    plans.append(WorkerPlan(name="gpu", batch=8192, low=1, high=1 << 20, powers_of_two=graphs))
    speeds = {f"cpu{i}": 1e5 for i in range(cpus)} | {"gpu": 1e5 * ratio}
    machine = Coordinator(int(2e6 * (cpus + ratio)), plans, Rules(adaptive=True, grant_s=0.02))
    _, updates = simulate(machine, speeds, 2, fixed_s)
    # The dead band allows 1.1 to either side of the mean; a batch that must be a power of two, √2 more.
    assert max(updates.values()) / min(updates.values()) < (1.75 if graphs else 1.3)


def test_static_batches_stay() -> None:
    plans = [
        WorkerPlan(name="cpu", batch=16, low=1, high=64),
        WorkerPlan(name="gpu", batch=512, low=64, high=8192),
    ]
    machine = Coordinator(1_000_000, plans, Rules())
    simulate(machine, {"cpu": 1e4, "gpu": 1e6}, 2)
    assert machine.batches() == {"cpu": 16, "gpu": 512}


@pytest.mark.parametrize("speeds", [(1e5, 1e5), (1e4, 1e5), (1e3, 1e6)])
def test_workers_finish_an_epoch_together(speeds: tuple[float, float]) -> None:
    plans = [WorkerPlan(name=name, batch=16, low=1, high=64) for name in ("a", "b")]
    machine = Coordinator(1_000_000, plans, Rules())
    seconds, _ = simulate(machine, dict(zip(("a", "b"), speeds, strict=True)), 1)
    assert seconds < 1.1 * 1_000_000 / sum(speeds) + 0.2


def test_a_fast_worker_among_slow_ones_is_seldom_asked() -> None:
    """Its share of what is left is by its speed: each grant's end costs a device a wait for its host."""
    speeds = {"gpu": 8e3 * 64} | {f"cpu{n}": 300.0 * 64 for n in range(14)}
    plans = [WorkerPlan(name=name, batch=64, low=64, high=64) for name in speeds]
    machine = Coordinator(581_000, plans, Rules())
    simulate(machine, speeds, 1)
    grants, given = [], machine._cut
    machine._cut = lambda state: grants.append(given(state)) or grants[-1]  # type: ignore[func-returns-value,method-assign]
    clock, _ = simulate(machine, speeds, 1)
    assert clock < 1.05 * 581_000 / sum(speeds.values()) + 64 / min(speeds.values())
    assert sum(grant.worker == "gpu" for grant in grants) < 40


def test_one_worker_takes_the_batches_of_a_loop() -> None:
    machine = Coordinator(1000, [WorkerPlan(name="only", batch=64, low=64, high=64)], Rules())
    position, instructions = 0, machine.begin()
    while True:
        grants = [i for i in instructions if isinstance(i, Grant)]
        for grant in grants:
            assert grant.start == position
            assert grant.rows % 64 == 0 or grant.stop == 1000
            position = grant.stop
        flying = machine.in_flight("only")
        if not flying:
            break
        grant = min(flying, key=lambda g: g.number)
        instructions = machine.finished("only", grant.number, grant.rows, 0.001 * grant.updates)
    assert instructions == [Done()]
    assert position == 1000


def test_a_halted_run_says_what_is_left_and_resumes_with_it() -> None:
    plan = WorkerPlan(name="only", batch=10, low=1, high=100)
    machine = Coordinator(100, [plan], Rules())
    first, second = (i for i in machine.begin() if isinstance(i, Grant))
    machine.halt()
    assert machine.finished("only", first.number, first.rows, 0.1) == []
    assert machine.finished("only", second.number, 4, 0.1) == []
    saved = machine.state_dict()
    assert saved["remaining"] == [[14, 20], [20, 100]]
    assert saved["workers"]["only"]["updates"] == 2
    again = Coordinator(100, [plan], Rules())
    again.load_state_dict(saved)
    grants = [i for i in again.begin([(14, 20), (20, 100)]) if isinstance(i, Grant)]
    assert (grants[0].start, grants[0].stop) == (14, 20)


def test_the_last_worker_lost_is_told() -> None:
    plan = WorkerPlan(name="only", batch=10, low=1, high=100)
    machine = Coordinator(100, [plan], Rules(restarts=1))
    number = next(i for i in machine.begin() if isinstance(i, Grant)).number
    replaced, *grants = machine.died("only", number, 0)
    assert replaced == Replace("only")
    assert isinstance(grants[0], Grant)
    assert machine.died("only", grants[0].number, 0) == [Lost("only", last=True)]


def test_the_dead_band_and_the_limit_of_a_change() -> None:
    limits = {"a": (1, 64), "b": (64, 8192)}
    assert adapt({"a": 4, "b": 128}, {"a": 100.0, "b": 95.0}, limits) == {"a": 4, "b": 128}
    assert adapt({"a": 4, "b": 1024}, {"a": 1000.0, "b": 1.0}, limits) == {"a": 8, "b": 512}
    assert adapt({"a": 64, "b": 64}, {"a": 1000.0, "b": 1.0}, limits) == {"a": 64, "b": 64}


def test_step_sizes_follow_batches() -> None:
    assert step_scale(64, 16, "linear") == 4.0
    assert step_scale(64, 16, "sqrt") == 2.0
    assert step_scale(64, 16, "off") == 1.0
