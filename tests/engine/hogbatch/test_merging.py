"""Merging keeps every worker's changes: exactly, in any order of events, and as statistics with threads.

The planted bugs at the end are the mistakes that are easy to make: each is caught by what stands above it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch
from headrace.engine.hogbatch.device import Exchange
from headrace.engine.hogbatch.links import HostLink
from headrace.engine.hogbatch.replica import Replica
from headrace.engine.hogbatch.shared import Board, SharedTensors, staleness_labels


def shared(size: int) -> tuple[SharedTensors, SharedTensors]:
    parameters = SharedTensors({"w": torch.arange(size, dtype=torch.float64), "b": torch.ones(3).double()})
    return parameters, SharedTensors({"merges": torch.zeros((), dtype=torch.float64)})


def conserves(steps: list[tuple[int, int]], size: int = 200_000) -> bool:
    """Whether the shared parameters end as the start plus all that every replica ever added.

    Each step is (worker, what): 0 to 2 adds that to its replica, 3 merges, 4 pulls after a merge.
    """
    parameters, canary = shared(size)
    start = parameters.views()
    start = {name: tensor.clone() for name, tensor in start.items()}
    replicas = [Replica(parameters.views(), canary.views()["merges"]) for _ in range(2)]
    added = 0
    for worker, what in [*steps, (0, 3), (1, 3)]:
        replica = replicas[worker]
        if what < 3:
            for tensor in replica.parameters.values():
                tensor += what
            added += what
        else:
            replica.merge()
            if what == 4:
                replica.pull()
    end = parameters.views()
    return all(torch.equal(end[name], start[name] + added) for name in start)


STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=12)


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_what_replicas_add_arrives_once(steps: list[tuple[int, int]]) -> None:
    assert conserves(steps, size=100)


def test_pieces_cover_large_parameters() -> None:
    assert conserves([(0, 1), (1, 2), (1, 3), (0, 1), (0, 3), (0, 2)])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=16))
def test_what_a_device_adds_arrives_once_and_it_learns_what_others_add(steps: list[int]) -> None:
    parameters, canary = shared(50)
    views = parameters.views()
    start = {name: tensor.clone() for name, tensor in views.items()}
    exchange = Exchange(parameters.views(), canary.views()["merges"], HostLink())
    added = 0
    for step in [*steps, 2, 3]:
        if step == 0:  # a local step
            added += 1
            for tensor in exchange.parameters.values():
                tensor += 1
        elif step == 1:  # another worker's update
            added += 10
            for tensor in views.values():
                tensor += 10
        elif step == 2:
            exchange.absorb(wait=True)
            exchange.push()
        else:
            exchange.absorb(wait=True)
    exchange.absorb(wait=True)
    exchange.push()
    exchange.absorb(wait=True)
    exchange.close()
    for name, tensor in views.items():
        assert torch.equal(tensor, start[name] + added)
        assert torch.equal(exchange.parameters[name], tensor)


def test_a_device_keeps_the_steps_it_made_while_an_exchange_was_under_way() -> None:
    parameters, canary = shared(8)
    views = parameters.views()
    start = views["w"].clone()
    exchange = Exchange(parameters.views(), canary.views()["merges"], HostLink())
    views["w"] += 10  # another worker, before the exchange
    exchange.parameters["w"] += 1
    exchange.push()
    exchange.parameters["w"] += 2  # a local step, while it is under way
    assert exchange.absorb(wait=True)
    assert torch.equal(views["w"], start + 11)
    assert torch.equal(exchange.parameters["w"], start + 13)
    exchange.close()


def final_losses(workers: int, seeds: int, sparse: bool) -> list[float]:
    """Losses at convergence of a convex problem, or of a small network, over seeds."""
    found = []
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(256, 20, generator=g)
        if sparse:
            x *= torch.rand(256, 20, generator=g) < 0.1
        y = ((x @ torch.randn(20, generator=g) + 0.5 * torch.randn(256, generator=g)) > 0).long()
        torch.manual_seed(seed)
        module = nn.Linear(20, 2) if sparse else nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))
        options = HogbatchOptions(
            cpu=workers,
            batch_size=8,
            epochs=10,
            merge_every=4,
            processes=False,
            scaling="off",
            seed=seed,
            grant_s=0.005,
            # Weight decay gives the problem one solution; a falling step size lets every run come near it.
            optimiser=OptimiserSpec(lr=0.2, weight_decay=0.01),
            schedule=lambda epoch: 0.7**epoch,
        )
        run_hogbatch(module, {"x": x, "y": y}, F.cross_entropy, options)
        with torch.no_grad():
            decay = 0.005 * sum(float((p**2).sum()) for p in module.parameters())
            found.append(float(F.cross_entropy(module(x), y)) + decay)
    return found


def apart(a: list[float], b: list[float]) -> float:
    """How many standard errors the means of paired losses lie apart; one is at least 0.2 % of a loss."""
    differences = [p - q for p, q in zip(a, b, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return abs(statistics.mean(differences)) / max(error, 0.01 * statistics.mean(a) / 5)


@pytest.mark.parametrize("sparse", [True, False])
def test_more_workers_end_at_the_same_losses(sparse: bool) -> None:
    # Five standard errors of twenty pairs: a false alarm in a million runs; the floor of 0.2 % keeps tiny
    # systematic differences, which asynchrony has, out of the alarm.
    one = final_losses(1, 20, sparse)
    for workers in (2, 8):
        assert apart(one, final_losses(workers, 20, sparse)) < 5


def lost(self: Replica) -> None:
    """Overwrites the shared parameters: what others added since the pull is lost."""
    for h, w in zip(self._shared, self._local, strict=True):
        h.copy_(w)


def stale(self: Replica) -> None:
    """Adds the difference and never refreshes the replica."""
    for h, w, s in zip(self._shared, self._local, self._snapshot, strict=True):
        h.add_(w - s)
        s.copy_(w)


def double(self: Replica) -> None:
    """Adds the difference twice."""
    for h, w, s in zip(self._shared, self._local, self._snapshot, strict=True):
        h.add_(w - s, alpha=2.0)
        w.copy_(h)
        s.copy_(w)


def refreshed_too_late(self: Replica) -> None:
    """Keeps the snapshot of before the merge: the difference is added again next time."""
    for h, w, s in zip(self._shared, self._local, self._snapshot, strict=True):
        h.add_(w - s)
        w.copy_(h)


ALL_SHORT = list(itertools.product([(0, 1), (1, 2), (0, 3), (1, 3)], repeat=4))


@pytest.mark.parametrize("bug", [lost, double, refreshed_too_late])
def test_planted_bugs_break_conservation(bug: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "merge", bug)
    assert not all(conserves(list(steps), size=4) for steps in ALL_SHORT)


def test_a_planted_stale_replica_never_sees_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees(replicas: list[Replica]) -> bool:
        replicas[0].parameters["w"] += 1
        replicas[0].merge()
        replicas[1].merge()
        return torch.equal(replicas[0].parameters["w"], replicas[1].parameters["w"])

    def pair() -> list[Replica]:
        parameters, canary = shared(10)
        return [Replica(parameters.views(), canary.views()["merges"]) for _ in range(2)]

    assert sees(pair())
    monkeypatch.setattr(Replica, "merge", stale)
    assert not sees(pair())


def test_the_canary_counts_merges() -> None:
    parameters, canary = shared(10)
    replica = Replica(parameters.views(), canary.views()["merges"])
    for _ in range(5):
        replica.merge()
    assert float(canary.views()["merges"]) == replica.merges == 5


def test_staleness_buckets() -> None:
    board = Board(2)
    for updates in (0, 1, 2, 3, 4, 1 << 40):
        board.saw_staleness(1, updates)
    labels = staleness_labels()
    assert labels[:4] == ["0", "1", "2–3", "4–7"]
    assert board.cells[1, -len(labels) :].tolist()[:4] == [1, 1, 2, 1]
    assert board.cells[1, -1] == 1
    assert board.cells[0].sum() == 0


def test_shared_tensors_keep_values_shapes_and_cache_lines() -> None:
    like = {
        "a": torch.randn(3, 5),
        "empty": torch.zeros(0, 2),
        "n": torch.tensor(7),
        "d": torch.randn(2).double(),
    }
    block = SharedTensors(like)
    first, second = block.views(), block.views()
    for name, tensor in like.items():
        assert torch.equal(first[name], tensor)
        assert first[name].dtype == tensor.dtype
    assert (first["d"].data_ptr() - first["a"].data_ptr()) % 64 == 0
    first["a"][1, 2] = 9.0
    assert second["a"][1, 2] == 9.0
    assert second["a"]._version == 0
