"""BalancedOrder under the Order protocol: what the loader and the engine rely on, and how good the orders are."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from headrace.errors import DataError, UsageError
from headrace.order import BalancedOrder
from headrace.order.balance import drift, reorder
from headrace.order.cost import Sizes, choose_gram, choose_sketch, choose_tokens_gram, split_k
from headrace.order.layers import maker_for
from headrace.order.sketch import Projections, SketchSum, draw_side, draw_taps, join
from headrace.types import Evidence, Order

N = 24


def vectors(n: int = N) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(1))


def learn(order: BalancedOrder, rows: Tensor, given: Tensor) -> None:
    for part in rows.split(6):
        evidence = Evidence(loss=torch.zeros(()), count=len(part), signals_bk=given[part])
        order.observe(part, evidence)


def test_it_is_an_order_and_every_epoch_is_a_permutation() -> None:
    order = BalancedOrder(N)
    assert isinstance(order, Order)
    seen = []
    for _ in range(4):
        rows = torch.cat(list(order.epoch()))
        assert sorted(rows.tolist()) == list(range(N))
        learn(order, rows, vectors())
        seen.append(rows.tolist())
    order.end_epoch()
    assert len(order.drift) == 4
    assert len({tuple(rows) for rows in seen}) == 4


def test_a_state_in_mid_epoch_serves_both_ways_of_resuming() -> None:
    """Asking for the epoch again gives the order in force; going on with the old permutation closes it as usual."""
    straight = BalancedOrder(N)
    rows = torch.cat(list(straight.epoch()))
    learn(straight, rows[:12], vectors())
    state = straight.state_dict()
    learn(straight, rows[12:], vectors())
    second = torch.cat(list(straight.epoch()))
    asks, goes_on = BalancedOrder(N, seed=8), BalancedOrder(N, seed=9)
    asks.load_state_dict(state)
    assert torch.equal(torch.cat(list(asks.epoch())), rows)
    goes_on.load_state_dict(state)
    for order in (asks, goes_on):
        learn(order, rows[12:], vectors())
        assert torch.equal(torch.cat(list(order.epoch())), second)


def test_inside_a_buffer_rows_keep_their_order_and_exchange_ranks() -> None:
    order = BalancedOrder(N)
    rows = torch.cat(list(order.epoch()))
    held = torch.tensor([3, 17, 5, 8, 21, 0, 12, 9])
    places = order.within(held)
    assert held[places].tolist() == [r for r in rows.tolist() if r in held.tolist()]
    learn(order, held[places], vectors())
    again = order.within(held, close=True)
    signs = BalancedOrder(N)
    list(signs.epoch())
    learn(signs, held[places], vectors())
    assert signs.learner is not None
    signs.learner.settle()
    expected = reorder(held[places], signs.learner.signs[held[places], 0])
    assert held[again].tolist() == expected.tolist()
    renewed = order.rows()
    assert [r for r in renewed.tolist() if r not in held.tolist()] == [
        r for r in rows.tolist() if r not in held.tolist()
    ]
    assert torch.equal(held[order.within(held)], held[again])


def test_rows_without_a_name_are_an_error_with_the_missing_line() -> None:
    order = BalancedOrder(4)
    net = nn.Linear(3, 2)
    order.watch(net)
    with pytest.raises(UsageError, match="begin_batch"):
        F.cross_entropy(net(torch.randn(4, 3)), torch.zeros(4, dtype=torch.int64)).backward()
    with pytest.raises(DataError, match="one per row"):
        order.observe(torch.arange(3), torch.zeros(2, 2))


def test_fit_learns_an_order() -> None:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    order = BalancedOrder(96, fallback=False)
    run = headrace.fit(
        net,
        (x, (x[:, 0] > 0).long()),
        loss=F.cross_entropy,
        lr=0.05,
        epochs=3,
        batch_size=8,
        order=order,
        seed=0,
    )
    order.end_epoch()
    assert len(order.drift) == 3
    assert run.metrics[-1]["loss"] < 0.75


def orders_of(
    net: nn.Module, kind: str, capture: str, **options: Any
) -> tuple[list[list[int]], BalancedOrder, Any]:
    """The rows of four epochs of a run, in the order in which they came, the order itself and the run."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(45, 6, generator=generator, dtype=torch.float64), torch.arange(45) % 3
    order = BalancedOrder(45, kind=kind, fallback=False)
    epochs: list[list[int]] = []
    rows = order.rows

    def told() -> Tensor:
        epochs.append(rows().tolist())
        return rows()

    order.rows = told  # type: ignore[method-assign]
    run = headrace.fit(
        net, (x, y), loss=F.cross_entropy, lr=0.05, epochs=4, batch_size=8, order=order, seed=0, workers="single",
        progress=False, device="cpu", capture=capture, **options,
    )  # fmt: skip
    return epochs, order, run


@pytest.mark.parametrize("kind", ["pair", "mean", "recursive"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_by_hand_sign_the_rows_that_hooks_sign(kind: str, optimizer: str) -> None:
    """Layers with and without a bias, a short last batch, both ways in which a chain makes its gradient."""
    found = []
    for capture in ("chain", "eager"):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)
        ).double()
        epochs, order, run = orders_of(net, kind, capture, optimizer=optimizer)
        assert [d.value for d in run.plan.decisions if d.name == "capture"][-1] == capture
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        order.end_epoch()
        found.append((epochs, order.drift))
    assert len({tuple(rows) for rows in found[0][0]}) == 4
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("capture", ["chain", "eager"])
def test_a_run_with_a_learned_order_goes_on_as_if_it_had_not_stopped(tmp_path: Path, capture: str) -> None:
    """Stopped in the middle of the second epoch, the weights at the end are the same to the last bit."""
    x, y = torch.randn(90, 6, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3

    def weights(folder: str, steps: int, resume: bool = False) -> Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        run = headrace.fit(
            net, (x, y), loss=F.cross_entropy, lr=0.05, steps=steps, batch_size=8, order="balanced", seed=0,
            workers="single", progress=False, device="cpu", out=tmp_path / folder, resume=resume, capture=capture,
        )  # fmt: skip
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    whole = weights("whole", 40)
    weights("parts", 17)
    assert torch.equal(weights("parts", 40, resume=True), whole)


def test_an_order_that_gave_up_learns_nothing_from_steps_by_hand() -> None:
    net = nn.Sequential(nn.Linear(6, 3)).double()
    order = BalancedOrder(45)
    hand = order.by_hand(net)
    assert hand is not None
    order.kind_in_force = "shuffled"
    hand.begin(torch.arange(8))
    hand.take("0.weight", torch.ones(3, 8, dtype=torch.float64), torch.ones(8, 6, dtype=torch.float64))
    hand.end(1.0)
    assert order.learner is not None
    assert order.learner.seen == 0
    assert BalancedOrder(45, signal="exact").by_hand(net) is None


def test_pools_come_first_beside_a_learned_order_too() -> None:
    """Hooks sit on the layers in the order in which they run, and leave with the run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    order = BalancedOrder(32, fallback=False)
    run = headrace.fit(
        net, (torch.randn(32, 1, 8, 8), torch.arange(32) % 2), loss=F.cross_entropy, lr=0.01, epochs=2, batch_size=8,
        order=order, workers="single", progress=False, device="cpu",
    )  # fmt: skip
    assert run.plan["pooling"] == "before ReLU"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    order.end_epoch()
    assert len(order.drift) == 2


def test_a_loader_names_its_rows() -> None:
    """The user's own loop over a Loader: one line, and the signs go to the right rows."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    loader = headrace.Loader((x, y), batch_size=8, order="balanced", device="cpu", seed=0)
    net = nn.Linear(6, 2)
    assert isinstance(loader.order, BalancedOrder)
    loader.order.watch(net)
    used = []
    for _ in range(3):
        for xb, yb in loader:
            used.append([int((x == row).all(1).nonzero()[0, 0]) for row in xb])
            F.cross_entropy(net(xb), yb).backward()
    loader.order.end_epoch()
    assert len(loader.order.drift) == 3
    epochs = [[row for rows in used[4 * e : 4 * e + 4] for row in rows] for e in range(3)]
    assert all(sorted(rows) == list(range(32)) for rows in epochs)
    by_hand = BalancedOrder(32)
    by_hand.watch(net)
    by_hand._order = torch.tensor(epochs[0])
    for expected in epochs:
        rows = next(by_hand.epoch())
        assert rows.tolist() == expected
        for part in rows.split(8):
            by_hand.begin_batch(part)
            F.cross_entropy(net(x[part]), y[part]).backward()


def test_only_static_steps_are_said_to_be_capturable() -> None:
    assert BalancedOrder(8).capturable(4)
    assert not BalancedOrder(8).capturable(3)
    assert BalancedOrder(8, kind="mean").capturable(3)
    assert not BalancedOrder(8, kind="recursive").capturable(4)
    assert BalancedOrder(8, kind="shuffled").capturable(3)


def digits(n: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A slightly trained MLP 64-64-10 (d = 4810) and the example gradients at its weights."""
    data, target = load_digits(return_X_y=True)
    x, y = torch.tensor(data[:n] / 16, dtype=torch.float32), torch.tensor(target[:n])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in torch.arange(n).split(16):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()

    def loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, values, (a[None],)), b[None])

    values = {name: p.detach() for name, p in net.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, x, y)
    return net, x, y, torch.cat([g.flatten(1) for g in found.values()], 1)


def test_sketched_orders_are_nearly_as_good_as_exact_ones() -> None:
    """H after eight rounds on frozen gradients: ≤ 1.3 of exact's and ≤ 0.4 of a shuffle's."""
    net, x, y, gradients = digits(1600)
    heights = {}
    for signal in ("sketch", "exact"):
        order = BalancedOrder(len(x), signal=signal, fallback=False)
        order.watch(net)
        for _ in range(8):
            for rows in next(order.epoch()).split(64):
                order.begin_batch(rows)
                F.cross_entropy(net(x[rows]), y[rows]).backward()
        order.unwatch()
        heights[signal] = drift(gradients, next(order.epoch()))
    shuffles = [
        drift(gradients, torch.randperm(len(x), generator=torch.Generator().manual_seed(s))) for s in range(5)
    ]
    assert heights["sketch"] <= 1.3 * heights["exact"]
    assert heights["sketch"] <= 0.4 * sum(shuffles) / 5


def test_sketches_keep_inner_products() -> None:
    """Short sides are isometric; long ones are right in the mean over 400 draws (within five standard errors)."""
    generator = torch.Generator().manual_seed(0)
    short = draw_side(10, 32, generator)
    assert torch.allclose(short @ short.T, torch.eye(10, dtype=torch.float64), atol=1e-12)
    a, b = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    draws = torch.stack([(a @ r) @ (r.T @ b) for r in (draw_side(50, 8, generator) for _ in range(400))])
    assert abs(float(draws.mean() - a @ b)) < 5 * float(draws.std()) / 20
    signs = draw_side(70000, 4, generator)
    assert set(signs.abs().unique().tolist()) == {0.5}


def test_taps_keep_inner_products() -> None:
    """Filters of 3 channels and 2 × 3 places, and the bias: right in the mean over 2,000 draws, and few numbers."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 19, dtype=torch.float64, generator=generator)
    draws = []
    for _ in range(2000):
        matrix, taps = draw_taps((3, 2, 3), 4, generator)
        assert len(set(taps.places)) == 4
        assert matrix.shape == (19, 4)
        assert int((matrix[:-1] != 0).sum()) == 4 * 3
        draws.append(torch.stack([(u @ matrix) @ (matrix.T @ v) for u, v in ((a, b), (a, a))]))
    found = torch.stack(draws)
    wanted = torch.stack([a @ b, a @ a])
    assert bool(((found.mean(0) - wanted).abs() < 5 * found.std(0) / 2000**0.5).all())


@pytest.mark.parametrize("scales", [(2.0, 2.0), (2.0, 3.0), (2.0, torch.tensor(3.0))])
@pytest.mark.parametrize("summed", [False, True])
def test_joined_batches_are_the_batches_one_after_another(scales: tuple[float, float], summed: bool) -> None:
    """Whatever their scales, and with layers as factors alone or beside sums."""

    def sums() -> list[SketchSum]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for batch in (5, 3):
            one = SketchSum(batch, Projections(16, 0))
            for _ in range(2):
                one.add_outer(
                    torch.randn(8, batch, generator=generator), torch.randn(2, batch, generator=generator)
                )
            if summed:
                one.add(torch.randn(batch, 8, 2, generator=generator))
            made.append(one)
        return made

    apart = torch.cat([join([one], [scale]) for one, scale in zip(sums(), scales, strict=True)])
    assert torch.allclose(join(sums(), scales), apart, rtol=1e-6)
    first = sums()[0]
    row = sum(torch.outer(left[:, 1], right[:, 1]) for left, right in first.factors)
    expected = 2.0 * row.reshape(-1)  # type: ignore[union-attr]
    if not summed:
        assert torch.allclose(apart[1], expected, rtol=1e-5, atol=1e-6)


def test_a_projection_depends_on_the_name_and_the_seed_alone() -> None:
    weight = nn.Parameter(torch.zeros(5, 6))
    drawn = []
    for seed, name in ((0, "a"), (0, "module.a"), (1, "a"), (0, "b")):
        projections = Projections(64, seed)
        projections.name([(name, weight)])
        drawn.append(projections.of(weight, weight).columns)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])


def test_costs_choose_what_a_reader_would() -> None:
    assert choose_gram(Sizes(64, 1, 256, 784)) == "ghost"
    assert choose_gram(Sizes(8, 784, 6, 25)) == "materialise"
    assert choose_sketch(Sizes(64, 784, 6, 75), 64, 4, unfold=True) == "inputs"
    assert choose_sketch(Sizes(64, 512, 4, 4), 32, 8) == "materialise"
    # One product over all positions, then a small one per example: 1.0 against 2.4 ms at 32 positions of 512 × 128.
    assert choose_sketch(Sizes(64, 32, 512, 128), 32, 8) == "sketch"
    assert choose_sketch(Sizes(64, 784, 64, 75), 64, 4, unfold=True, touched=3) == "inputs"
    assert choose_sketch(Sizes(64, 32, 384, 128), 8, 32) == "sketch"
    assert choose_tokens_gram(8, 4, 30, 64) == "ghost"
    assert choose_tokens_gram(8, 512, 20, 64) == "materialise"
    assert split_k(256, 128, 784) == (32, 8)
    assert split_k(256, 6, 75, convolution=True) == (64, 4)
    assert split_k(256, 512, 128) == (8, 32)
    assert split_k(256, 512, 128, table=True) == (32, 8)
    assert split_k(256, 128, 1) == (32, 8)
    for k in (1, 7, 16, 100):
        rows, columns = split_k(k, 10, 10)
        assert rows * columns == k


def test_layers_that_cannot_be_split_are_not_taken() -> None:
    assert maker_for(nn.Embedding(3, 2, sparse=True)) is None
    assert maker_for(nn.MultiheadAttention(4, 2, add_bias_kv=True)) is None
    assert maker_for(nn.Sequential(nn.Linear(2, 2))) is None
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert maker_for(frozen) is None


def test_a_backward_pass_leaves_no_graph_behind() -> None:
    """A hook on an attention's node that held the node kept every layer's activations until the next collection, and a
    capture waiting for the stream of the first update."""
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    order = BalancedOrder(4, fallback=False)
    order.watch(net)
    rows = next(order.epoch())

    def nodes() -> int:
        return sum(type(o).__name__ == "AddmmBackward0" for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = nodes()  # what other tests hold
        order.begin_batch(rows)
        net(torch.randn(4, 3, 8)).square().mean().backward()
        assert nodes() == before
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_captured_step_signs_the_same_rows() -> None:
    """One epoch by graph replays and one by eager steps give the same next order."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    x, y = torch.randn(64, 6, device="cuda"), torch.randint(0, 2, (64,), device="cuda")
    results = []
    for captured in (False, True):
        order = BalancedOrder(64, device="cuda", fallback=False)
        order.watch(net)
        rows = next(order.epoch())
        index = rows[:8].clone()

        def step(order: BalancedOrder = order, index: Tensor = index) -> None:
            order.begin_batch(index)
            F.cross_entropy(net(x[index]), y[index]).backward()

        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())  # the rows were drawn there
            assert order.learner is not None
            before = order.learner.state_dict()
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            order.learner.load_state_dict(before)  # what warming up taught
        for part in rows.split(8):
            index.copy_(part)
            graph.replay() if captured else step()
        order.unwatch()
        results.append(next(order.epoch()).tolist())
    assert results[0] == results[1]
