"""CD-GraB: several workers, one order (Cooper et al., NeurIPS 2023).

Every worker keeps its own share of the rows and its own permutation of them. At each step the differences of the
workers' pairs are walked by *one* running sum, worker after worker, so the sum over workers stays balanced and not
only each worker alone. What travels is a sketch: m · k numbers per pair of steps.

- `WorkerPairs` pairs the rows: in one process, rows that are dealt to the workers in turn; or in each of m processes
  its own rows, with an `Exchange` that gathers the differences of all.
- `OrderService` does the same for workers that do not run in step: a difference is signed when it arrives. It is plain
  state without a transport; an actor or a socket may stand before it.

`shard` cuts the rows as `torch.utils.data.DistributedSampler` does: every ``workers``-th row of a permutation, padded
by repeating its beginning so that all shares have the same length, or cut with ``drop_last``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.errors import OptionError
from headrace.order.balance import reorder
from headrace.order.balancers import SharedPairBalancer
from headrace.types import State

Exchange = Callable[[Tensor], Tensor]
"""p × k differences of this worker → m × p × k of all, in the order of ranks."""


def gather_over(group: Any = None) -> Exchange:
    """An exchange over a torch.distributed process group (gloo or NCCL)."""
    import torch.distributed as dist

    def exchange(differences_pk: Tensor) -> Tensor:
        workers = dist.get_world_size(group)
        gathered = differences_pk.new_empty(workers, *differences_pk.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), differences_pk.contiguous(), group=group)
        return gathered

    return exchange


def share_length(n: int, workers: int, drop_last: bool) -> int:
    """Rows per worker."""
    return n // workers if drop_last else -(-n // workers)


def shard(rows: Tensor, workers: int, drop_last: bool = False) -> Tensor:
    """Rows dealt to the workers in turn: length × workers, column w is worker w's share."""
    length = share_length(len(rows), workers, drop_last)
    if drop_last:
        return rows[: length * workers].view(length, workers)
    missing = length * workers - len(rows)
    if missing:
        repeats = -(-missing // max(len(rows), 1))
        rows = torch.cat([rows, rows.repeat(repeats)[:missing]])
    return rows.view(length, workers)


class WorkerPairs:
    """Pairs of rows of several workers, signed by a shared walk."""

    def __init__(self, dim: int, workers: int, exchange: Exchange | None = None, **options: Any) -> None:
        self.workers = workers
        self.exchange = exchange
        self.local = 1 if exchange is not None else workers
        self.shared = SharedPairBalancer(dim, **options)
        self._vectors: Tensor | None = None
        self._indices: Tensor | None = None

    def step(self, vectors_bk: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(indices, signs) of the rows that this batch settles; the others wait for their partners."""
        if self._vectors is not None and self._indices is not None:
            vectors_bk = torch.cat([self._vectors, vectors_bk])
            indices = torch.cat([self._indices, indices])
        block = 2 * self.local
        settled = len(indices) // block * block
        pairs = vectors_bk[:settled].view(-1, 2, self.local, vectors_bk.shape[1])
        differences = (pairs[:, 0] - pairs[:, 1]).transpose(0, 1)
        if self.exchange is not None:
            everyone = self.exchange(differences[0])
            mine = self._rank(everyone, differences[0])
            signs = self.shared.step_workers(everyone)[mine : mine + 1]
        else:
            signs = self.shared.step_workers(differences)
        self._vectors, self._indices = vectors_bk[settled:].clone(), indices[settled:].clone()
        both = torch.stack([signs.T, -signs.T], 1).reshape(-1)
        return indices[:settled], both

    rank: int | None = None

    def _rank(self, everyone: Tensor, own: Tensor) -> int:
        if self.rank is None:
            import torch.distributed as dist

            self.rank = dist.get_rank()
        return self.rank

    def end_epoch(self) -> None:
        self.shared.end_epoch()
        self._vectors = self._indices = None

    def bytes(self) -> int:
        waiting = self._vectors.nbytes if self._vectors is not None else 0
        return self.shared.bytes() + waiting

    def state_dict(self) -> State:
        waiting = self._vectors is not None and self._indices is not None
        return {
            "shared": self.shared.state_dict(),
            "vectors": self._vectors.clone() if waiting and self._vectors is not None else None,
            "indices": self._indices.clone() if waiting and self._indices is not None else None,
        }

    def load_state_dict(self, state: State) -> None:
        self.shared.load_state_dict(state["shared"])
        like = self.shared.running
        self._vectors = None if state["vectors"] is None else state["vectors"].to(like)
        self._indices = None if state["indices"] is None else state["indices"].to(like.device)


class OrderService:
    """Orders for workers that run at their own pace.

    A worker sends the vectors of the rows it has just used, by its own row numbers (0 … its share − 1), and later asks
    for its next epoch. Differences are walked in the order of arrival. All methods are quick and take a worker's number
    first; the caller serialises the calls (an actor does).
    """

    def __init__(self, shares: list[int], dim: int, *, seed: int = 0) -> None:
        if not shares or min(shares) < 1:
            raise OptionError(f"shares={shares!r}: every worker needs at least one row")
        self.shared = SharedPairBalancer(dim, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.orders = [torch.randperm(n, generator=generator) for n in shares]
        self.signs = [torch.zeros(n, dtype=torch.int8) for n in shares]
        self._waiting: list[tuple[Tensor, Tensor] | None] = [None] * len(shares)

    def observe(self, worker: int, indices: Tensor, vectors_bk: Tensor) -> None:
        """Sign what can be paired; a last row without partner waits for the worker's next batch."""
        self._check(worker)
        if len(indices) != len(vectors_bk):
            raise OptionError(f"worker {worker} sent {len(indices)} rows with {len(vectors_bk)} vectors")
        waiting = self._waiting[worker]
        if waiting is not None:
            indices, vectors_bk = torch.cat([waiting[0], indices]), torch.cat([waiting[1], vectors_bk])
        even = len(indices) // 2 * 2
        differences = vectors_bk[0:even:2] - vectors_bk[1:even:2]
        if even:
            signs = self.shared.step_workers(differences[None])[0]
            both = torch.stack([signs, -signs], 1).view(-1)
            self.signs[worker][indices[:even]] = both.to(torch.int8)
        self._waiting[worker] = (indices[even:], vectors_bk[even:]) if even < len(indices) else None

    def next_epoch(self, worker: int, own: Tensor | None = None) -> Tensor:
        """The worker's next permutation of its rows; rows without a sign keep their rank.

        ``own`` is the permutation that the worker has in force. A service that came back with an earlier state goes on
        from it.
        """
        self._check(worker)
        if own is not None:
            self.go_on(worker, own)
        order = self.orders[worker]
        self.orders[worker] = reorder(order, self.signs[worker][order])
        self.signs[worker].zero_()
        self._waiting[worker] = None
        return self.orders[worker]

    def go_on(self, worker: int, order: Tensor) -> None:
        """Take over the permutation that a worker was in the middle of.

        What was signed of it stays signed; signs of another pass are dropped.
        """
        self._check(worker)
        if torch.equal(order, self.orders[worker]):
            return
        if not torch.equal(order.sort().values, torch.arange(len(self.orders[worker]))):
            raise OptionError(f"worker {worker} goes on in an order that is no permutation of its rows")
        self.orders[worker] = order.clone()
        self.signs[worker].zero_()
        self._waiting[worker] = None

    def _check(self, worker: int) -> None:
        if not 0 <= worker < len(self.orders):
            raise OptionError(f"worker {worker} was named; there are workers 0 to {len(self.orders) - 1}")

    def state_dict(self) -> State:
        return {
            "shared": self.shared.state_dict(),
            "orders": [o.clone() for o in self.orders],
            "signs": [s.clone() for s in self.signs],
            "waiting": [None if w is None else [w[0].clone(), w[1].clone()] for w in self._waiting],
        }

    def load_state_dict(self, state: State) -> None:
        self.shared.load_state_dict(state["shared"])
        self.orders = [o.clone() for o in state["orders"]]
        self.signs = [s.clone() for s in state["signs"]]
        self._waiting = [None if w is None else (w[0].clone(), w[1].clone()) for w in state["waiting"]]
