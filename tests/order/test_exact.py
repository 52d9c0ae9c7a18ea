"""Exact signals against materialised per-example gradients: the same permutations, epoch after epoch."""

from __future__ import annotations

import copy

import order_oracle as oracle
import pytest
import torch
from order_models import MODELS, N
from torch import Tensor, nn
from torch.nn import functional as F

from headrace import BalancedSampler
from headrace.order.sketch import join


def library_orders(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    kind: str,
    batch: int,
    epochs: int,
    accumulate: int,
    signal: str,
) -> tuple[list[list[int]], list[Tensor]]:
    data = torch.utils.data.TensorDataset(x, y, torch.arange(len(x)))
    sampler = BalancedSampler(len(x), kind=kind, signal=signal, fallback=False)
    loader = torch.utils.data.DataLoader(data, batch_size=batch, sampler=sampler)
    sampler.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    orders = []
    for _ in range(epochs):
        rows: list[int] = []
        optimizer.zero_grad()
        for number, (xb, yb, indices) in enumerate(loader):
            rows.extend(indices.tolist())
            (F.cross_entropy(model(xb), yb) / accumulate).backward()
            if (number + 1) % accumulate == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        orders.append(rows)
    return orders, [p.detach() for p in model.parameters()]


CASES = [(name, "pair") for name in MODELS] + [
    (name, "mean") for name in ("mlp", "cnn", "embedding-layernorm", "lstm", "attention")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_exact_orders_are_those_of_materialised_gradients(name: str, kind: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(7)
    x, y = inputs(1), torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))
    model = make().double()
    with torch.no_grad():
        model(x[:2])
    twin = copy.deepcopy(model)
    # Batches of 5 make pairs straddle batches; batches of 4 end in one of 3 rows.
    batch = 5 if name in ("mlp", "lstm", "attention") else 4
    orders, trained = library_orders(
        model, x, y, kind=kind, batch=batch, epochs=5, accumulate=2, signal="exact"
    )

    def loss(m: nn.Module, row: int) -> Tensor:
        return F.cross_entropy(m(x[row : row + 1]), y[row : row + 1])

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    expected = oracle.train_and_order(
        twin, loss, optimizer, orders[0], kind=kind, batch=batch, epochs=5, accumulate=2
    )
    assert len({tuple(order) for order in orders}) == 5
    assert orders == expected
    for ours, theirs in zip(trained, twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_sketches_are_projections_of_materialised_gradients(name: str) -> None:
    """Whatever the order of contraction: Σ over parameters of R_oᵀ G R_i, a bias being one more column."""
    make, inputs = MODELS[name]
    torch.manual_seed(7)
    x, y = inputs(1), torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))
    model = make().double()
    with torch.no_grad():
        model(x[:2])
    sampler = BalancedSampler(N)
    sampler.watch(model)
    sampler.begin_batch(torch.arange(N))
    F.cross_entropy(model(x), y).backward()
    learner = sampler.order.learner
    assert learner is not None
    learner.settle_watcher()
    found = torch.cat([join([sketch], [scale]) for _, sketch, scale in learner._chunk])
    sampler.unwatch()
    named = dict(model.named_parameters(remove_duplicate=True))
    biases = bias_to_weight(model)
    for row in range(0, N, 5):
        loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        total = torch.zeros_like(found[0])
        for parameter, g in zip(
            named.values(), torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True
        ):
            weight = biases.get(id(parameter))
            projection = learner.projections.of(parameter if weight is None else weight, found)
            if g is None:
                continue
            if weight is None:
                total += (projection.rows.T @ g.reshape(len(g), -1) @ projection.columns).reshape(-1)
            else:
                total += torch.outer(projection.rows.T @ g, projection.bias).reshape(-1)
        assert torch.allclose(found[row], total, rtol=1e-8, atol=1e-10)


def bias_to_weight(model: nn.Module) -> dict[int, Tensor]:
    """Biases whose sketch is one more column of a weight: those of matrices, not of norms and grouped filters."""
    pairs: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            for name, parameter in module.named_parameters():
                if name.startswith("bias"):
                    pairs[id(parameter)] = getattr(module, name.replace("bias", "weight"))
        elif isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                pairs[id(module.in_proj_bias)] = module.in_proj_weight
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            grouped = not isinstance(module, nn.Linear) and module.groups > 1
            if module.bias is not None and not grouped:
                pairs[id(module.bias)] = module.weight
    return pairs


def test_watching_changes_no_gradient() -> None:
    make, inputs = MODELS["attention"]
    torch.manual_seed(3)
    model = make().double()
    x, y = inputs(4), torch.randint(0, 3, (N,))
    F.cross_entropy(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    sampler = BalancedSampler(N)
    sampler.watch(model)
    sampler.begin_batch(torch.arange(N))
    F.cross_entropy(model(x), y).backward()
    for before, after in zip(plain, [p.grad for p in model.parameters() if p.grad is not None], strict=True):
        assert torch.equal(before, after)
