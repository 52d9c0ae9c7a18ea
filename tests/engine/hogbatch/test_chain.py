"""A chain against autograd and `torch.optim.SGD`, and what it refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.products import Products
from headrace.errors import DataError, ModelError

ACTIVATIONS = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "leaky-negative": lambda: nn.LeakyReLU(-0.3),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.4),
}
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "l1": nn.L1Loss(),
    "huber": nn.HuberLoss(delta=0.3),
    "smooth_l1": nn.SmoothL1Loss(beta=0.5),
}


def batch(
    loss: str, b: int, d: int, c: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, d, generator=g, dtype=dtype)
    if loss in ("cross_entropy", "CrossEntropyLoss"):
        return x, torch.randint(0, c, (b,), generator=g)
    if loss == "bce":
        return x, torch.randint(0, 2, (b, c), generator=g).to(dtype)
    return x, torch.randn(b, c, generator=g, dtype=dtype)


def chain_of(module: nn.Module, loss: object) -> Chain:
    chain, reason = Chain.of(module, loss)
    assert chain is not None, reason
    return chain


def worst(module: nn.Module, other: nn.Module) -> float:
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@settings(max_examples=150, deadline=None)
@given(
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    between=st.lists(st.lists(st.sampled_from(sorted(ACTIVATIONS)), max_size=3), min_size=5, max_size=5),
    bias=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    decay=st.sampled_from([0.0, 0.1]),
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_step_is_autograd_and_sgd(
    widths: list[int],
    between: list[list[str]],
    bias: bool,
    loss: str,
    sizes: list[int],
    decay: float,
    fused: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [ACTIVATIONS[name]() for name in between[number]]
        layers.append(nn.Linear(a, b, bias=bias))
    layers += [ACTIVATIONS[name]() for name in between[-1]]
    module = nn.Sequential(*layers).double()
    other = copy.deepcopy(module)
    chain = chain_of(module, LOSSES[loss])
    if fused:
        assert ("use compiled loops" in chain.fuse()) == bias
    optimiser = torch.optim.SGD(other.parameters(), lr=0.05, weight_decay=decay)
    for number, b in enumerate(sizes):
        x, y = batch(loss, b, widths[0], widths[-1], seed + number)
        torch.manual_seed(number)
        mine = chain.step(x, y, lr=0.05, weight_decay=decay)
        torch.manual_seed(number)
        optimiser.zero_grad()
        theirs = LOSSES[loss](other(x), y)
        theirs.backward()
        optimiser.step()
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)
        assert worst(module, other) < 1e-12


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_the_gradient_is_autograds(loss: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, 9),
        nn.Sequential(nn.GELU(), nn.Dropout(0.3)),
        nn.Linear(9, 5),
        nn.ReLU(),
        nn.Linear(5, 4),
    ).double()
    chain = chain_of(module, LOSSES[loss])
    x, y = batch(loss, 6, 12, 4, 1)
    x = x.reshape(6, 3, 4)
    grads = {name: torch.full_like(p, float("nan")) for name, p in module.named_parameters()}
    torch.manual_seed(5)
    mine = chain.gradient(x, y, grads)
    torch.manual_seed(5)
    theirs = LOSSES[loss](module(x), y)
    theirs.backward()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-12, atol=1e-13)


def test_forward_and_loss_are_the_modules() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    chain = chain_of(module, F.cross_entropy)
    for b in (5, 2, 9):
        x, y = batch("cross_entropy", b, 4, 3, b)
        torch.testing.assert_close(chain.forward(x), module(x))
        torch.testing.assert_close(chain.loss(x, y), F.cross_entropy(module(x), y))


def test_probabilities_as_targets() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    other = copy.deepcopy(module)
    x, y = torch.randn(5, 4).double(), torch.rand(5, 3).double()
    chain_of(module, F.cross_entropy).step(x, y, lr=0.5)
    F.cross_entropy(other(x), y).backward()
    for p in other.parameters():
        assert p.grad is not None
        p.data.sub_(p.grad, alpha=0.5)
    assert worst(module, other) < 1e-12


def test_bound_tensors_are_updated_and_the_module_is_not() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    before = copy.deepcopy(module)
    elsewhere = {name: p.detach().clone() for name, p in module.named_parameters()}
    chain = chain_of(module, F.mse_loss).bind(elsewhere)
    chain.step(torch.ones(2, 4).double(), torch.zeros(2, 3).double(), lr=0.1)
    assert worst(module, before) == 0.0
    assert not torch.equal(elsewhere["weight"], module.weight)
    with pytest.raises(ModelError, match="bound as weight"):
        chain.bind({"weight": torch.zeros(3, 3).double(), "bias": elsewhere["bias"]})


def test_a_frozen_parameter_stays() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    before = copy.deepcopy(module)
    chain_of(module, F.cross_entropy).step(torch.randn(3, 4), torch.tensor([0, 1, 1]), lr=0.5)
    assert torch.equal(module[0].weight, before[0].weight)
    assert not torch.equal(module[2].weight, before[2].weight)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "loss", "why"),
    [
        (Own(), F.cross_entropy, "Own"),
        (nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 2)), F.cross_entropy, "0 is a Conv2d"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), F.cross_entropy, "BatchNorm1d"),
        (nn.ReLU(), F.cross_entropy, "no Linear"),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 2)), F.cross_entropy, "gives 4 features"),
        (tied(), F.cross_entropy, "share one parameter"),
        (hooked(), F.cross_entropy, "hooks"),
        (nn.Linear(3, 3).half(), F.cross_entropy, "float16"),
        (nn.Linear(3, 3), F.cosine_similarity, "cosine_similarity"),
        (nn.Linear(3, 3), nn.MSELoss(reduction="sum"), "sum"),
        (nn.Linear(3, 3), nn.CrossEntropyLoss(label_smoothing=0.1), "smoothing"),
        (nn.Linear(3, 3), nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), "weights"),
        (nn.Linear(3, 3), nn.KLDivLoss(), "KLDivLoss"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(module: nn.Module, loss: object, why: str) -> None:
    chain, reason = Chain.of(module, loss)
    assert chain is None
    assert why in reason


def test_bad_batches_are_refused_before_any_update() -> None:
    module = nn.Linear(4, 3)
    before = copy.deepcopy(module)
    chain = chain_of(module, F.cross_entropy)
    y = torch.tensor([0, 1])
    for x, target, error, words in [
        (torch.ones(2, 5), y, DataError, "rows of 4"),
        (torch.ones(0, 4), y[:0], DataError, r"\(0, 4\)"),
        (torch.ones(2, 4).double(), y, DataError, "float64"),
        (torch.ones(2, 4), torch.ones(2), ModelError, "class numbers"),
        (torch.ones(2, 4), torch.tensor([0, 3]), IndexError, "out of bounds"),
    ]:
        with pytest.raises(error, match=words):
            chain.step(x, target, lr=0.1)
    with pytest.raises(ModelError, match="number by number"):
        chain_of(module, F.mse_loss).step(torch.ones(2, 4), torch.ones(2), lr=0.1)
    assert worst(module, before) == 0.0


def test_a_step_allocates_nothing_large_after_the_first() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    chain = chain_of(module, F.cross_entropy)
    chain.products = Products(wide=False)  # oneDNN, which some processors prefer, returns new tensors
    x, y = torch.randn(32, 64), torch.randint(0, 2, (32,))
    chain.step(x, y, lr=0.1)
    with torch.profiler.profile(
        acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        chain.step(x, y, lr=0.1)
        chain.step(x[:7], y[:7], lr=0.1)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert taken < 4 * 256 * 2  # one row of outputs is 1 KiB; parameters are 200 times that


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_compiled_loops_are_autograd_and_sgd(b: int, activation: type[nn.Module]) -> None:
    pytest.importorskip("numba")
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 3)
    ).double()
    other = copy.deepcopy(module)
    chain = chain_of(module, F.cross_entropy)
    assert chain.fuse() == "steps on one or two rows use compiled loops"
    optimiser = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(5):
        x, y = batch("cross_entropy", b, 5, 3, number)
        chain.clone().step(x, y, lr=0.1)
        optimiser.zero_grad()
        F.cross_entropy(other(x), y).backward()
        optimiser.step()
        assert worst(module, other) < 1e-12
    chain.step(torch.full((b, 5), float("nan")).double(), torch.zeros(b).long(), lr=0.1)
    assert all(bool(p.isnan().all()) for p in module[4].parameters())
