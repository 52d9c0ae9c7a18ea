"""Several workers: shards, the shared walk, torch.distributed, and the service for workers at their own pace."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data.distributed import DistributedSampler

from headrace import BalancedSampler
from headrace.errors import OptionError
from headrace.order import OrderService
from headrace.order.balance import drift, reorder
from headrace.order.balancers import PairBalancer, VectorRows
from headrace.order.coordinated import WorkerPairs, gather_over, shard


@given(st.integers(1, 50), st.integers(1, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_shards_are_as_long_as_those_of_the_distributed_sampler(
    n: int, workers: int, drop_last: bool
) -> None:
    if drop_last and n < workers:
        return
    dealt = shard(torch.randperm(n), workers, drop_last)
    torchs = DistributedSampler(range(n), workers, 0, drop_last=drop_last)  # type: ignore[arg-type]
    assert dealt.shape == (len(torchs), workers)
    counts = torch.bincount(dealt.reshape(-1), minlength=n)
    assert int(counts.max()) - int(counts.min()) <= (1 if n >= workers else n * workers)
    if not drop_last:
        assert int(counts.min()) == 1 or n < workers


def naive_shared_walk(vectors: torch.Tensor, orders: list[list[int]]) -> list[list[int]]:
    """CD-GraB as published: pair j of worker 1, pair j of worker 2, …; one running sum."""
    s = torch.zeros(vectors.shape[1], dtype=torch.float64)
    plus: list[list[int]] = [[] for _ in orders]
    minus: list[list[int]] = [[] for _ in orders]
    for j in range(len(orders[0]) // 2):
        for w, order in enumerate(orders):
            a, b = order[2 * j], order[2 * j + 1]
            z = vectors[a] - vectors[b]
            sign = 1 if float(s @ z) < 0 else -1
            s = s + sign * z
            plus[w].append(a if sign == 1 else b)
            minus[w].append(b if sign == 1 else a)
    return [
        p + m[::-1] if len(o) % 2 == 0 else [*p, *m[::-1], o[-1]]
        for p, m, o in zip(plus, minus, orders, strict=True)
    ]


@pytest.mark.parametrize(("n", "workers", "batch"), [(24, 3, 6), (27, 3, 4), (40, 4, 7)])
def test_a_simulated_group_walks_as_published(n: int, workers: int, batch: int) -> None:
    vectors = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    sampler = BalancedSampler(n, workers=workers)
    assert sampler.rows is not None
    orders = [list(o) for o in torch.tensor(list(sampler)).view(-1, workers).T.tolist()]
    flat = torch.tensor(orders).T.reshape(-1)
    for rows in flat.split(batch):
        sampler.observe(vectors[rows])
    renewed = torch.tensor(list(sampler)).view(-1, workers).T.tolist()
    assert renewed == naive_shared_walk(vectors, orders)


def test_a_shared_walk_beats_independent_shuffles() -> None:
    """H over steps of 8 workers on fixed vectors: at most 0.4 of independent shuffling's, as the paper has it."""
    n, workers = 1024, 8
    vectors = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    sampler = BalancedSampler(n, workers=workers)
    first = list(sampler)
    order = first
    for _ in range(6):
        for rows in torch.tensor(order).split(64):
            sampler.observe(vectors[rows])
        order = list(sampler)
    before = drift(vectors[torch.tensor(first).view(-1, workers)].sum(1))
    after = drift(vectors[torch.tensor(order).view(-1, workers)].sum(1))
    assert after <= 0.4 * before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_rank(rank: int, workers: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    n = 21
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parallel = nn.parallel.DistributedDataParallel(model)
    sampler = BalancedSampler(n, seed=5, fallback=False)
    sampler.watch(parallel)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        rows = torch.tensor(list(sampler))
        orders.append(rows.tolist())
        for part in rows.split(4):
            optimizer.zero_grad()
            F.cross_entropy(parallel(x[part]), y[part]).backward()
            optimizer.step()
    torch.save(orders, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # once in some twenty runs gloo's threads ended the interpreter's own clean-up with SIGABRT


def test_two_processes_walk_together(tmp_path: Path) -> None:
    """Two gloo processes give the orders of the same group simulated in one process."""
    context: Any = torch.multiprocessing.spawn(
        one_rank, args=(2, free_port(), str(tmp_path)), nprocs=2, join=True
    )
    assert context is None
    mine, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    generator = torch.Generator().manual_seed(3)
    n = 21
    x, y = torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for epoch in range(2):
        for orders in (mine, other):
            assert len(orders[epoch]) == 11
            assert orders[epoch] != orders[epoch + 1]
            assert sorted(orders[epoch]) == sorted(orders[epoch + 1])
    assert len(set(mine[0]) | set(other[0])) == n
    alone = BalancedSampler(n, seed=5, workers=2, fallback=False)
    alone.watch(model)
    alone.order._order = interleaved(alone, mine[0], other[0])
    for epoch in range(3):
        rows = torch.tensor(list(alone))
        assert rows.view(-1, 2)[:, 0].tolist() == mine[epoch]
        assert rows.view(-1, 2)[:, 1].tolist() == other[epoch]
        for part in rows.split(8):
            F.cross_entropy(model(x[part]), y[part]).backward()


def one_rank_over_nccl(rank: int, port: int, folder: str) -> None:
    """A group of one: NCCL does not take two processes on one device."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
    generator = torch.Generator().manual_seed(4)
    vectors, rows = torch.randn(30, 16, generator=generator), torch.randperm(30, generator=generator)
    pairs = WorkerPairs(16, 1, gather_over(), device="cuda")
    found = [pairs.step(vectors[part].cuda(), part.cuda()) for part in rows.split(7)]
    signs = torch.zeros(30)
    for settled, given_signs in found:
        signs[settled.cpu()] = given_signs.flatten().cpu()
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3).cuda(), device_ids=[0])
    sampler = BalancedSampler(12, seed=5, fallback=False)
    sampler.watch(model)
    orders = []
    for _ in range(2):
        order = torch.tensor(list(sampler))
        orders.append(order.tolist())
        for part in order.split(4):
            F.cross_entropy(model(torch.ones(4, 6).cuda() * part[:, None].cuda()), part.cuda() % 3).backward()
    torch.save({"signs": signs, "rows": rows, "vectors": vectors, "orders": orders}, Path(folder) / "0.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
def test_nccl_carries_the_differences(tmp_path: Path) -> None:
    """Gathered over NCCL, one worker's pairs get the signs of a pair balancer on the CPU."""
    torch.multiprocessing.spawn(one_rank_over_nccl, args=(free_port(), str(tmp_path)), nprocs=1, join=True)
    told = torch.load(tmp_path / "0.pt", weights_only=True)
    expected = PairBalancer(16).step(VectorRows(told["vectors"][told["rows"]]))
    assert torch.equal(told["signs"][told["rows"]], expected)
    first, second = told["orders"]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def interleaved(sampler: BalancedSampler, first: list[int], second: list[int]) -> torch.Tensor:
    """Slots of a simulated group whose workers begin with the given rows (row 0 of a padded share comes twice)."""
    assert sampler.rows is not None
    slots = []
    for pair in zip(first, second, strict=True):
        for worker, row in enumerate(pair):
            candidates = (sampler.rows == row).nonzero()[:, 0]
            slots.append(int(next(c for c in candidates if int(c) % 2 == worker)))
    return torch.tensor(slots)


def test_the_service_signs_in_the_order_of_arrival() -> None:
    vectors = torch.randn(2, 12, 4, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    service = OrderService([12, 9], 4, seed=0)
    before = [order.clone() for order in service.orders]
    arrivals = [(0, slice(0, 4)), (1, slice(0, 3)), (1, slice(3, 6)), (0, slice(4, 12)), (1, slice(6, 9))]
    s = torch.zeros(4)
    waiting: dict[int, int] = {}
    signs = [torch.zeros(12), torch.zeros(9)]
    for worker, part in arrivals:
        rows = before[worker][part]
        service.observe(worker, rows, vectors[worker][rows])
        for row in rows.tolist():
            if worker not in waiting:
                waiting[worker] = row
                continue
            first = waiting.pop(worker)
            z = vectors[worker][first] - vectors[worker][row]
            sign = 1.0 if float(s @ z) < 0 else -1.0
            s = s + sign * z
            signs[worker][first], signs[worker][row] = sign, -sign
    saved = service.state_dict()
    again = OrderService([12, 9], 4, seed=9)
    again.load_state_dict(saved)
    for worker in (0, 1):
        expected = reorder(before[worker], signs[worker][before[worker]])
        assert service.next_epoch(worker).tolist() == expected.tolist()
        assert again.next_epoch(worker).tolist() == expected.tolist()


def test_the_service_says_what_is_wrong() -> None:
    service = OrderService([4], 2)
    with pytest.raises(OptionError, match="workers 0 to 0"):
        service.next_epoch(1)
    with pytest.raises(OptionError, match="2 rows with 1 vectors"):
        service.observe(0, torch.arange(2), torch.zeros(1, 2))
    with pytest.raises(OptionError, match="at least one row"):
        OrderService([0], 2)
