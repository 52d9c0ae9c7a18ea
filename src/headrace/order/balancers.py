"""Balancers: what turns a batch of example gradients into signs, carrying a running sum from batch to batch.

A balancer never sees which examples it signs. It asks the batch for inner products and for weighted sums (`Rows`),
so the same code walks over sketches of k numbers and over whole gradients that are never materialised.

State per epoch: the running sum s, and the gradient of one example that still waits for its partner (pairs) or the
mean of the epoch before and the one being summed (mean). `end_epoch` clears what belongs to one epoch.

- `PairBalancer` signs differences of consecutive examples: one goes to the front, its partner to the back. No mean
  that could be stale. The default.
- `MeanBalancer` signs gradients centred by the mean of the epoch before (zero in the first). The next mean is summed
  from the *uncentred* gradients: from the centred ones it would alternate between the mean and zero.
- `TreeBalancer` splits each half again by balancers of its own.
- `SharedPairBalancer` is one running sum over the pairs of several workers, worker by worker (CD-GraB).
"""

from __future__ import annotations

from typing import Protocol

import numpy
import torch
from torch import Tensor

from headrace.errors import OptionError
from headrace.order.balance import Rule, walk, walk_adaptive, walk_vectors
from headrace.types import State


class Rows(Protocol):
    """The example gradients of one batch, as inner products."""

    def __len__(self) -> int: ...

    def dot(self, vector: Tensor) -> Tensor:
        """⟨vector, g_i⟩ for every example."""
        ...

    def gram(self) -> Tensor:
        """⟨g_i, g_j⟩ for every pair of examples."""
        ...

    def add_to(self, vector: Tensor, weights: Tensor) -> None:
        """vector += Σ weights_i g_i, in place."""
        ...


class VectorRows:
    """Example gradients, or sketches of them, that are there as the rows of a matrix."""

    def __init__(self, vectors_bk: Tensor) -> None:
        self.vectors = vectors_bk

    def __len__(self) -> int:
        return len(self.vectors)

    def dot(self, vector: Tensor) -> Tensor:
        return self.vectors @ vector

    def gram(self) -> Tensor:
        return self.vectors @ self.vectors.T

    def add_to(self, vector: Tensor, weights: Tensor) -> None:
        vector.addmv_(self.vectors.T, weights)


class Walker:
    """Applies a rule, and keeps what the rule remembers: its scale and its random numbers."""

    def __init__(self, rule: Rule, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.rule = rule
        self.scale = torch.zeros((), device=device, dtype=dtype)
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)

    def signs(self, products: Tensor, gram: Tensor) -> Tensor:
        if products.device.type == "cpu" and not numpy.isfinite(products.numpy()).all():
            # A batch whose gradients overflowed (a too large AMP scale) tells nothing; its rows stay unsigned.
            return torch.zeros_like(products)
        if self.rule.name == "greedy":
            return walk(products, gram)
        uniform = torch.rand(
            len(products), generator=self.generator, device=products.device, dtype=products.dtype
        )
        if self.rule.name == "random":
            if len(gram):
                self.scale = torch.maximum(self.scale, gram.diagonal().amax())
            return walk(products, gram, self.rule.scale * self.scale * (1 - 2 * uniform))
        signs, self.scale = walk_adaptive(products, gram, uniform, self.scale)
        return signs

    def walk_vectors(self, vectors_bk: Tensor, running_k: Tensor) -> Tensor:
        """Signs for vectors that are there; moves the running sum along, in place."""
        if self.rule.name == "greedy":
            return walk_vectors(vectors_bk, running_k)
        signs = self.signs(vectors_bk @ running_k, vectors_bk @ vectors_bk.T)
        running_k.addmv_(vectors_bk.T, signs)
        return signs

    def state_dict(self) -> State:
        return {"scale": self.scale.clone(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        self.scale = state["scale"].to(self.scale)
        self.generator.set_state(state["generator"].cpu())


class Balancer:
    """What the balancers share: the running sum, the rule and the state."""

    waits = False
    """True while one example of an earlier batch waits for its partner; its sign then comes first."""
    vectors: tuple[str, ...] = ("running",)

    def __init__(
        self,
        dim: int,
        *,
        rule: Rule | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.walker = Walker(rule or Rule(), torch.device(device), dtype, seed)
        for name in self.vectors:
            setattr(self, name, torch.zeros(dim, device=device, dtype=dtype))

    running: Tensor

    def step(self, rows: Rows) -> Tensor:
        raise NotImplementedError

    def end_epoch(self) -> None:
        self.running.zero_()

    def bytes(self) -> int:
        """What the vectors that live from batch to batch take."""
        return sum(getattr(self, name).nbytes for name in self.vectors)

    def state_dict(self) -> State:
        vectors = {name: getattr(self, name).clone() for name in self.vectors}
        return {**vectors, "waits": self.waits, "walker": self.walker.state_dict()}

    def load_state_dict(self, state: State) -> None:
        for name in self.vectors:
            getattr(self, name).copy_(state[name])
        self.waits = bool(state["waits"])
        self.walker.load_state_dict(state["walker"])


class PairBalancer(Balancer):
    """Signs differences of consecutive examples; signs come for (a waiting example +) the batch, 0 = still waits."""

    vectors = ("running", "carried")
    carried: Tensor

    def step(self, rows: Rows) -> Tensor:
        if isinstance(rows, VectorRows):
            return self._step_on_vectors(rows.vectors)
        products, gram = rows.dot(self.running), rows.gram()
        if self.waits:
            # The waiting example becomes row 0: its products with the batch are one more dot.
            across = rows.dot(self.carried)
            own = self.carried @ self.carried
            gram = torch.cat([torch.cat([own[None], across])[None], torch.cat([across[:, None], gram], 1)])
            products = torch.cat([(self.running @ self.carried)[None], products])
        pairs = len(products) // 2
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        signs = self.walker.signs(
            products[first] - products[second],
            gram[first, first] - gram[first, second] - gram[second, first] + gram[second, second],
        )
        weights = spread(signs, len(products))
        if self.waits and len(weights) > 1:
            self.running.add_(weights[0] * self.carried)
        rows.add_to(self.running, weights[int(self.waits) :])
        self._carry(rows, len(products))
        return weights

    def _step_on_vectors(self, vectors: Tensor) -> Tensor:
        # Differences first: half the rows, a quarter of the Gram matrix.
        if self.waits:
            vectors = torch.cat([self.carried[None], vectors])
        count = len(vectors)
        even = vectors[: count - count % 2]
        differences = even[0::2] - even[1::2]
        signs = self.walker.walk_vectors(differences, self.running)
        self.waits = count % 2 == 1
        if self.waits:
            self.carried.copy_(vectors[-1])
        return spread(signs, count)

    def _carry(self, rows: Rows, count: int) -> None:
        if count % 2 == 0:
            self.waits = False
        elif not (self.waits and count == 1):
            last = torch.zeros(len(rows), device=self.running.device, dtype=self.running.dtype)
            last[-1:] = 1
            self.carried.zero_()
            rows.add_to(self.carried, last)
            self.waits = True

    def end_epoch(self) -> None:
        super().end_epoch()
        self.waits = False


def spread(signs: Tensor, count: int) -> Tensor:
    """Signs of pairs → signs of their examples (+ε, −ε), with 0 for an example without a partner."""
    both = torch.stack([signs, -signs], 1).view(-1)
    return both if len(both) == count else torch.cat([both, both.new_zeros(count - len(both))])


class MeanBalancer(Balancer):
    """Signs gradients centred by the mean of the epoch before."""

    vectors = ("running", "mean", "total")
    mean: Tensor
    total: Tensor

    def __init__(self, dim: int, **options: object) -> None:
        super().__init__(dim, **options)  # type: ignore[arg-type]
        self.count = torch.zeros((), device=self.running.device, dtype=self.running.dtype)

    def step(self, rows: Rows) -> Tensor:
        self.count.add_(len(rows))
        if isinstance(rows, VectorRows):
            self.total.add_(rows.vectors.sum(0))
            return self.walker.walk_vectors(rows.vectors - self.mean, self.running)
        products, gram, with_mean = rows.dot(self.running), rows.gram(), rows.dot(self.mean)
        gram = gram - with_mean[:, None] - with_mean[None, :] + self.mean @ self.mean
        signs = self.walker.signs(products - self.running @ self.mean, gram)
        rows.add_to(self.running, signs)
        self.running.sub_(signs.sum() * self.mean)
        rows.add_to(self.total, torch.ones_like(signs))
        return signs

    def end_epoch(self) -> None:
        super().end_epoch()
        # An epoch without a step leaves the mean as it is.
        self.mean.copy_(torch.where(self.count > 0, self.total / self.count.clamp(min=1), self.mean))
        self.total.zero_()
        self.count.zero_()

    def state_dict(self) -> State:
        return {**super().state_dict(), "count": self.count.clone()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.count.copy_(state["count"])


class SharedPairBalancer(Balancer):
    """One running sum over several workers' pairs: pair 1 of worker 1, pair 1 of worker 2, …, pair 2 of worker 1, …"""

    def step_workers(self, differences_mpk: Tensor) -> Tensor:
        """Signs (m × p) for the differences of p pairs of each of m workers."""
        workers, pairs, _ = differences_mpk.shape
        flat = differences_mpk.transpose(0, 1).reshape(workers * pairs, -1)
        signs = self.walker.walk_vectors(flat, self.running)
        return signs.view(pairs, workers).T


class TreeBalancer:
    """Pairs split at a root, and each half again by a pair balancer of its own, ``depth`` times.

    Needs the vectors themselves. Memory: 2^depth − 1 running sums and as many waiting examples.
    """

    def __init__(
        self,
        dim: int,
        *,
        depth: int = 2,
        rule: Rule | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        if not 1 <= depth <= 8:
            raise OptionError(f"depth={depth!r} was asked for; a tree has 1 to 8 levels")
        self.depth = depth
        self.nodes = [
            PairBalancer(dim, rule=rule, device=device, dtype=dtype, seed=seed + i)
            for i in range(2**depth - 1)
        ]
        self.waiting: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=device) for _ in self.nodes]

    def step(self, vectors_bk: Tensor, indices: Tensor, signs_nd: Tensor) -> None:
        """Write the signs that this batch settles into ``signs_nd`` (n × depth), by index."""
        self._visit(0, 0, vectors_bk, indices, signs_nd)

    def _visit(self, node: int, level: int, vectors: Tensor, indices: Tensor, signs_nd: Tensor) -> None:
        balancer = self.nodes[node]
        carried = balancer.carried[None].clone() if balancer.waits else vectors[:0]
        signs = balancer.step(VectorRows(vectors))
        vectors, indices = torch.cat([carried, vectors]), torch.cat([self.waiting[node], indices])
        self.waiting[node] = indices[-1:] if balancer.waits else indices[:0]
        signs_nd[indices, level] = signs.to(signs_nd.dtype)
        if level + 1 < self.depth:
            for child, chosen in ((2 * node + 1, signs > 0), (2 * node + 2, signs < 0)):
                if bool(chosen.any()):
                    self._visit(child, level + 1, vectors[chosen], indices[chosen], signs_nd)

    def end_epoch(self) -> None:
        for node in self.nodes:
            node.end_epoch()
        self.waiting = [indices[:0] for indices in self.waiting]

    def bytes(self) -> int:
        return sum(node.bytes() for node in self.nodes)

    def state_dict(self) -> State:
        return {"nodes": [n.state_dict() for n in self.nodes], "waiting": [w.clone() for w in self.waiting]}

    def load_state_dict(self, state: State) -> None:
        for node, saved in zip(self.nodes, state["nodes"], strict=True):
            node.load_state_dict(saved)
        self.waiting = [w.to(old) for w, old in zip(state["waiting"], self.waiting, strict=True)]
