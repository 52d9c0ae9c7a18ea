"""The pure part: walks, reordering and the theorem that makes them work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import NaiveMean, NaivePair, naive_drift, naive_reorder
from torch import Tensor

from headrace.errors import OptionError
from headrace.order import balance
from headrace.order.balance import Rule, drift, reorder, reorder_tree, walk, walk_in_torch, walk_vectors
from headrace.order.balancers import MeanBalancer, PairBalancer, TreeBalancer, VectorRows
from headrace.order.drift import DriftMeter, fails_to_fall
from headrace.order.herding import greedy_order, herding_order

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**20)


def cloud(n: int, d: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(d, generator=generator, dtype=torch.float64) * 3
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * spread + 1.0


def signed_bound(vectors: Tensor, signs: Tensor) -> float:
    """The largest norm of a prefix sum of the signed vectors."""
    return float((vectors * signs[:, None]).cumsum(0).norm(dim=1).max())


@given(sizes, st.integers(1, 6), seeds)
@settings(max_examples=150, deadline=None)
def test_harvey_samadi_bound(n: int, d: int, seed: int) -> None:
    """H of the next order ≤ (H of this order + the largest signed prefix sum) / 2, for centred vectors."""
    vectors = cloud(n, d, seed)
    centred = vectors - vectors.mean(0)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1))
    visited = centred[order]
    signs = walk(torch.zeros(n, dtype=torch.float64), visited @ visited.T)
    after = drift(vectors, reorder(order, signs))
    assert after <= (drift(vectors, order) + signed_bound(visited, signs)) / 2 + 1e-9


@given(st.integers(0, 40), seeds)
@settings(max_examples=150, deadline=None)
def test_reorder_is_a_permutation_with_plus_in_order_and_minus_reversed(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    signs = torch.randint(-1, 2, (n,), generator=generator, dtype=torch.int8)
    expected = naive_reorder(order.tolist(), {int(r): int(s) for r, s in zip(order, signs, strict=True) if s})
    assert reorder(order, signs).tolist() == expected


@given(sizes, st.integers(1, 5), seeds, st.sampled_from([0.0, 1.0]))
@settings(max_examples=80, deadline=None)
def test_all_walks_agree(n: int, d: int, seed: int, height: float) -> None:
    vectors = cloud(n, d, seed)
    generator = torch.Generator().manual_seed(seed)
    bar = height * torch.randn(n, generator=generator, dtype=torch.float64)
    running = torch.randn(d, generator=generator, dtype=torch.float64)
    expected, s = [], running.clone()
    for z, threshold in zip(vectors, bar, strict=True):
        sign = 1.0 if float(s @ z) < float(threshold) else -1.0
        s = s + sign * z
        expected.append(sign)
    products, gram = vectors @ running, vectors @ vectors.T
    assert walk(products, gram, bar).tolist() == expected
    assert walk_in_torch(products, gram, bar).tolist() == expected
    assert walk_vectors(vectors, running, bar).tolist() == expected
    assert torch.allclose(running, s)


def test_a_tie_gives_minus() -> None:
    assert walk(torch.zeros(1), torch.ones(1, 1)).tolist() == [-1.0]
    assert walk_in_torch(torch.zeros(1), torch.ones(1, 1)).tolist() == [-1.0]
    assert walk_vectors(torch.ones(1, 2), torch.zeros(2)).tolist() == [-1.0]


def run_epochs(
    balancer: PairBalancer | MeanBalancer, vectors: Tensor, batch: int, epochs: int
) -> list[list[int]]:
    """Orders of a balancer that sees the same vectors in every epoch."""
    orders = [torch.arange(len(vectors))]
    for _ in range(epochs):
        signs = torch.zeros(len(vectors))
        waiting: list[int] = []
        for rows in orders[-1].split(batch):
            found = balancer.step(VectorRows(vectors[rows]))
            indices = waiting + rows.tolist()
            waiting = indices[-1:] if balancer.waits else []
            signs[indices] = found.float()
        balancer.end_epoch()
        orders.append(reorder(orders[-1], signs[orders[-1]]))
    return [order.tolist() for order in orders]


def run_naive(walk: NaivePair | NaiveMean, vectors: Tensor, epochs: int) -> list[list[int]]:
    orders = [list(range(len(vectors)))]
    for _ in range(epochs):
        walk.begin()
        for row in orders[-1]:
            walk.see(row, vectors[row])
        orders.append(naive_reorder(orders[-1], walk.signs))
    return orders


@given(sizes, st.integers(1, 9), seeds)
@settings(max_examples=60, deadline=None)
def test_pairs_across_batches_are_the_naive_ones(n: int, batch: int, seed: int) -> None:
    vectors = cloud(n, 4, seed)
    assert run_epochs(PairBalancer(4, dtype=torch.float64), vectors, batch, 3) == run_naive(
        NaivePair(4), vectors, 3
    )


@given(sizes, st.integers(1, 9), seeds)
@settings(max_examples=60, deadline=None)
def test_means_are_the_naive_ones(n: int, batch: int, seed: int) -> None:
    vectors = cloud(n, 4, seed)
    assert run_epochs(MeanBalancer(4, dtype=torch.float64), vectors, batch, 4) == run_naive(
        NaiveMean(4), vectors, 4
    )


# Planted bugs: each is a mistake found in published code, and each must be caught by the theorem or the oracle.


def reorder_without_reversal(order: Tensor, signs: Tensor) -> Tensor:
    return torch.cat([order[signs > 0], order[signs < 0]])


def bound_holds(
    make_order: Callable[[Tensor, Tensor], Tensor] = reorder,
    transform: Callable[[Tensor], Tensor] = lambda v: v - v.mean(0),
    tie: float = 0.0,
    by_position: bool = False,
) -> bool:
    """Harvey–Samadi over 200 clouds, with the parts of a planted bug put in.

    The signed prefix sum of a right walk over n vectors of norm ≤ r is itself at most r√n: that catches a wrong rule.
    """
    for seed in range(200):
        n = 2 + seed % 30
        vectors = cloud(n, 3, seed)
        centred = vectors - vectors.mean(0)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        visited = transform(vectors)[order]
        running = torch.zeros(3, dtype=torch.float64)
        signs = walk_vectors(visited, running, torch.full((n,), tie, dtype=torch.float64))
        if by_position:
            signs = signs[order]
        right = float(centred.norm(dim=1).max()) * n**0.5
        signed = signed_bound(
            centred[order], walk(torch.zeros(n, dtype=torch.float64), centred[order] @ centred[order].T)
        )
        if (
            signed > right + 1e-9
            or drift(vectors, make_order(order, signs)) > (drift(vectors, order) + signed) / 2 + 1e-9
        ):
            return False
    return True


def test_the_bound_catches_planted_bugs() -> None:
    assert bound_holds()
    assert not bound_holds(make_order=reorder_without_reversal)
    assert not bound_holds(transform=lambda v: v)  # no mean
    assert not bound_holds(tie=5.0)  # a wrong threshold
    assert not bound_holds(by_position=True)


def test_the_oracle_catches_a_mean_of_centred_gradients() -> None:
    class Wrong(MeanBalancer):
        def step(self, rows: VectorRows) -> Tensor:  # type: ignore[override]
            signs = super().step(rows)
            self.total.sub_(len(rows) * self.mean)
            return signs

    vectors = cloud(24, 4, 3)
    expected = run_naive(NaiveMean(4), vectors, 4)
    assert run_epochs(MeanBalancer(4, dtype=torch.float64), vectors, 4, 4) == expected
    assert run_epochs(Wrong(4, dtype=torch.float64), vectors, 4, 4) != expected


def test_the_oracle_catches_a_wrong_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = cloud(12, 4, 1)
    expected = run_naive(NaivePair(4), vectors, 1)

    def wrong(running: object, gram: object, bars: object, signs: object) -> None:
        original(running, gram, [1e-300] * len(gram), signs)  # type: ignore[arg-type]

    original = balance._walk_rows
    monkeypatch.setattr(balance, "_walk_rows", wrong)
    assert run_epochs(PairBalancer(4, dtype=torch.float64), vectors, 4, 1) != expected


def test_drift_is_the_naive_one() -> None:
    vectors = cloud(20, 3, 5)
    order = torch.randperm(20).tolist()
    assert drift(vectors, torch.tensor(order)) == pytest.approx(naive_drift(list(vectors), order))


def test_the_meter_measures_the_drift_of_a_short_epoch_exactly() -> None:
    vectors = cloud(64, 3, 6).float()
    meter = DriftMeter(64, 3)
    for part in vectors.split(10):
        meter.update(part)
    height, ratio = meter.finish()
    centred = vectors - vectors.mean(0)
    assert float(height) == pytest.approx(drift(vectors), rel=1e-4)
    assert float(ratio) == pytest.approx(drift(vectors) / float(centred.norm()), rel=1e-4)
    assert float(meter.sums.abs().sum()) == 0.0


def test_balancing_beats_shuffling_on_fixed_vectors() -> None:
    vectors = cloud(256, 8, 0)
    start = drift(vectors, torch.randperm(256, generator=torch.Generator().manual_seed(1)))
    last = run_epochs(PairBalancer(8, dtype=torch.float64), vectors, 16, 8)[-1]
    assert drift(vectors, torch.tensor(last)) < 0.5 * start
    assert drift(vectors, greedy_order(vectors)) < 0.5 * start
    assert drift(vectors, herding_order(vectors, torch.randperm(256))) < 0.5 * start


@given(st.integers(1, 33), st.integers(1, 3), seeds)
@settings(max_examples=40, deadline=None)
def test_a_tree_gives_permutations_and_a_tree_of_depth_one_is_pairs(n: int, depth: int, seed: int) -> None:
    vectors = cloud(n, 3, seed)
    tree = TreeBalancer(3, depth=depth, dtype=torch.float64)
    signs = torch.zeros(n, depth, dtype=torch.int8)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for rows in order.split(5):
        tree.step(vectors[rows], rows, signs)
    renewed = reorder_tree(order, signs[order])
    assert sorted(renewed.tolist()) == list(range(n))
    if depth == 1:
        naive = NaivePair(3)
        for row in order.tolist():
            naive.see(row, vectors[row])
        assert renewed.tolist() == naive_reorder(order.tolist(), naive.signs)


def test_probabilities_follow_the_rule() -> None:
    """At ⟨s, z⟩ = c/2 the chance of + is ¼: 2,000 draws, five standard deviations."""
    balancer = PairBalancer(1, rule=Rule(name="random", scale=1.0), dtype=torch.float64)
    balancer.walker.scale = torch.tensor(4.0, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    signs = [float(balancer.walker.signs(torch.tensor([2.0], dtype=torch.float64), one)) for _ in range(2000)]
    share = sum(s > 0 for s in signs) / 2000
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 2000) ** 0.5


def test_the_adaptive_rule_is_certain_at_its_scale() -> None:
    balancer = PairBalancer(1, rule=Rule(name="adaptive"), dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    for value in (3.0, 5.0, 9.0):
        assert float(balancer.walker.signs(torch.tensor([value], dtype=torch.float64), one)) == -1.0
        assert float(balancer.walker.scale) == value


def test_falling_is_judged_against_the_first_epoch() -> None:
    assert not fails_to_fall([0.8, 0.8, 0.8])
    assert fails_to_fall([0.8, 0.8, 0.75, 0.9])
    assert not fails_to_fall([0.8, 0.9, 0.3, 0.9])
    assert fails_to_fall([0.8, 0.3, float("nan"), 0.9, 0.8])


def test_wrong_options_are_sentences() -> None:
    with pytest.raises(OptionError, match="known are greedy"):
        Rule(name="gredy")
    with pytest.raises(OptionError, match="above 0"):
        Rule(name="random", scale=0.0)
    with pytest.raises(OptionError, match="1 to 8 levels"):
        TreeBalancer(2, depth=0)
