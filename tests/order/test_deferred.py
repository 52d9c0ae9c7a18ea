"""What a CUDA graph would leave for later, seen on a CPU: the same signs, and nothing learned from warming up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from order_models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from headrace.order import BalancedOrder
from headrace.order import learner as learner_module

N, BATCH = 12, 4


def use(order: BalancedOrder, net: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> None:
    for part in rows.split(BATCH):
        if len(part) == len(rows[-BATCH:]) and torch.equal(part, rows[-BATCH:]):
            order.flush()  # as the engine does before the last update of a captured stretch
        order.begin_batch(part)
        F.cross_entropy(net(x[part]), y[part]).backward()


def setup(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, inputs = MODELS[name]
    torch.manual_seed(3)
    net = make().double()
    x, y = inputs(1)[:N], torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        net(x[:2])
    return net, x, y


@pytest.mark.parametrize("kind", ["pair", "mean"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [8, 512])
def test_deferred_batches_get_the_same_signs(
    name: str, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, y = setup(name)
    found = []
    for deferred in (False, True):
        order = BalancedOrder(N, kind=kind, fallback=False)
        order.watch(net)
        rows = next(order.epoch())
        learner = order.learner
        assert learner is not None
        if deferred:
            monkeypatch.setattr(learner_module, "CHUNK", chunk)
            with order.capturing(BATCH, [N]):
                use(order, net, x, y, rows)
                order.settle()
                found.append(learner.signs.clone())
        else:
            use(order, net, x, y, rows)
            order.settle()
            found.append(learner.signs.clone())
        order.unwatch()
    assert torch.equal(found[0], found[1])
    assert int(found[0].abs().sum()) == N


def rows_of(order: BalancedOrder) -> Tensor:
    return torch.cat(list(order.epoch()))


@pytest.mark.parametrize("kind", ["pair", "mean"])
@pytest.mark.parametrize("before", [0, 3, 4])
def test_what_is_learned_while_capturing_is_forgotten(kind: str, before: int) -> None:
    """With and without batches before it (one of them odd, so that a row waits for its partner)."""
    net, x, y = setup("mlp")
    results = []
    for capture in (False, True):
        order = BalancedOrder(N, kind=kind, fallback=False)
        order.watch(net)
        for _ in range(3):
            rows = rows_of(order)
            use(order, net, x, y, rows[:before])
            if capture:
                with order.capturing(BATCH, [N, BATCH]):
                    for _ in range(3):
                        use(order, net, x, y, rows[:BATCH])
                        order.settle()
                    use(order, net, x, y, rows)
                    order.settle()
            use(order, net, x, y, rows[before:])
        results.append((rows_of(order).tolist(), order.drift))
        order.unwatch()
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1])


def test_pieces_that_do_not_match_are_signed_batch_by_batch() -> None:
    """A model that leaves a layer out for some batches: other layers than the batch before."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.skip = nn.Linear(6, 6), nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            self.skip = not self.skip
            return self.b(x if self.skip else self.a(x))

    net, x, y = setup("mlp")
    net = Sometimes().double()
    found: list[Tensor] = []
    act: Callable[[BalancedOrder], object]
    for act in (lambda o: o.settle(), lambda o: o.capturing(BATCH, [8]).__enter__()):
        order = BalancedOrder(8, fallback=False)
        order.watch(net)
        rows = rows_of(order)
        act(order)
        use(order, net, x, y, rows)
        order.settle()
        assert order.learner is not None
        found.append(order.learner.signs.clone())
        order.unwatch()
    assert torch.equal(found[0], found[1])


@pytest.mark.gpu
def test_fit_captures_a_learned_order_and_lowers_the_drift_as_eager_steps_do() -> None:
    """Frozen weights, 3 epochs: the drift of captured and of eager steps agree, and the plan names the graph."""
    torch.manual_seed(0)
    x, y = torch.randn(1024, 20), torch.randint(0, 4, (1024,))
    ratios = []
    for capture in ("eager", "graph"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        order = BalancedOrder(1024, device="cuda:0", fallback=False)
        run = headrace.fit(
            net, (x, y), loss=F.cross_entropy, lr=1e-12, epochs=3, batch_size=16, order=order, seed=0,
            device="cuda:0", capture=capture, workers="single", progress=False,
        )  # fmt: skip
        order.end_epoch()
        assert sorted(order.rows().tolist()) == list(range(1024))
        ratios.append(order.drift_ratio)
        chosen = [d.value for d in run.plan.decisions if d.name == "capture"]
        assert chosen[-1] == capture
    assert ratios[0] == pytest.approx(ratios[1], rel=0.05)
    assert ratios[1][-1] < 0.7 * ratios[1][0]
