"""Cheaper ways through convolutions: pooling before ReLU has the same bits, plain convolutions the same sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.engine import pools
from headrace.engine.pools import PoolOfFewChannels
from headrace.engine.reorder import pools_first

CASES = {
    "lenet": lambda: [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3), nn.ReLU(),
                      nn.MaxPool2d(3, stride=2, padding=1)],
    "in place": lambda: [nn.Conv2d(1, 6, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)],
    "nested": lambda: [nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), nn.ReLU()],
}  # fmt: skip


@pytest.mark.parametrize("layers", CASES.values(), ids=CASES)
@pytest.mark.parametrize("background", [0.0, 1.0])
def test_outputs_and_gradients_are_equal_to_the_last_bit(layers, background) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*layers(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(8, 1, 12, 12)
    x[:, :, 4:] = background  # equal values in a window: which of them gets the gradient must not change
    module(x)
    other = copy.deepcopy(module)
    changed = pools_first(other)
    assert changed is not other
    kinds = [type(layer) for layer in changed.modules()]
    assert all(nn.ReLU not in kinds[i - 1 : i] for i, kind in enumerate(kinds) if kind is nn.MaxPool2d)

    outputs = module(x), changed(x)
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_what_somebody_looks_into_keeps_its_order() -> None:
    pairs = nn.ReLU(), nn.MaxPool2d(2)
    hooked = nn.Sequential(*pairs)
    hooked[0].register_forward_hook(lambda *_: None)
    assert pools_first(hooked) is hooked
    for other in (nn.Tanh(), nn.MaxPool2d(2)), (nn.ReLU(), nn.AvgPool2d(2)), pairs[::-1]:
        module = nn.Sequential(*other)
        assert pools_first(module) is module

    class Mine(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    mine = Mine(nn.ReLU(), nn.MaxPool2d(2))
    assert pools_first(mine) is mine


def test_fit_says_so_and_trains_the_module_it_was_given() -> None:
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    make = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
    module = nn.Sequential(*make)
    hooked = copy.deepcopy(module)
    hooked.register_forward_hook(lambda *_: None)
    options = {"epochs": 2, "lr": 0.1, "progress": False, "deterministic": True}
    run, plain = hr.fit(module, (x, y), **options), hr.fit(hooked, (x, y), **options)
    assert run.model is module
    assert run.plan["pooling"] == "before ReLU"
    assert not any(d.name == "pooling" for d in plain.plan.decisions)
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in plain.metrics]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), hooked.parameters(), strict=True))


def test_plain_convolutions_take_the_same_updates_and_are_switched_back() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    other = copy.deepcopy(module)
    seen = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return nn.functional.cross_entropy(output, target)

    run = hr.fit(
        module, (x, y), loss=loss, batch_size=2, lr=0.05, steps=60, order="sequential", progress=False
    )
    assert run.plan["convolutions"] == "plain"
    assert not any(seen[-60:])
    assert torch.backends.mkldnn.enabled
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    for step in range(60):
        rows = torch.arange(2) + 2 * (step % 20)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x[rows]), y[rows]).backward()
        optimizer.step()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3, 6, 15, 16])
@pytest.mark.parametrize("behind", [nn.Identity, lambda: nn.ReLU(inplace=True)])
def test_pools_of_few_channels_equal_torchs_to_the_last_bit(
    channels: int, behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LEAST_NUMBERS", 1)
    pool = nn.MaxPool2d(2)
    assert PoolOfFewChannels.replaces(pool)
    x = torch.randn(5, channels, 12, 10, generator=torch.Generator().manual_seed(1))
    x[:, :, 6:] = 1.0  # four equal values in a window: the first of them gets the gradient
    x[0, 0, 0, 0] = torch.inf
    x = x.contiguous(memory_format=torch.channels_last)
    weights = torch.randn(5, channels, 6, 5)
    found, names = [], []
    for layer in (pool, PoolOfFewChannels(pool)):
        mine = x.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled = layer(mine)
        names.append(type(pooled.grad_fn).__name__)
        output = behind()(pooled)
        output.mul(weights).sum().backward()
        found.append((output.detach(), mine.grad))
    assert ("TwoPasses" in names[1]) == (channels < 16) and "TwoPasses" not in names[0]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "other",
    [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True),
     nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2), nn.MaxPool2d((2, 1))],
    ids=str,
)  # fmt: skip
def test_other_pools_are_left_alone(other: nn.Module) -> None:
    assert not PoolOfFewChannels.replaces(other)
    module = nn.Sequential(other)
    assert pools_first(module, few_channels=True) is module


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (2, 3, 8, 9), (0, 3, 4, 4), (3, 4, 4)])
def test_images_that_do_not_fit_go_to_torchs_pool(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LEAST_NUMBERS", 1)
    x = torch.randn(*shape, requires_grad=True)
    pooled = PoolOfFewChannels(nn.MaxPool2d(2))(x)
    assert torch.equal(pooled, nn.functional.max_pool2d(x, 2))
    assert "TwoPasses" not in type(pooled.grad_fn).__name__


def test_few_images_go_to_torchs_pool() -> None:
    few, many = (
        torch.randn(n, 6, 28, 28, requires_grad=True).contiguous(memory_format=torch.channels_last)
        for n in (16, 64)
    )
    pool = PoolOfFewChannels(nn.MaxPool2d(2))
    assert "TwoPasses" not in type(pool(few).grad_fn).__name__
    assert "TwoPasses" in type(pool(many).grad_fn).__name__


def test_a_network_with_two_passes_trains_as_with_torchs_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "LEAST_NUMBERS", 1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(216, 3))
    module.to(memory_format=torch.channels_last)
    other = copy.deepcopy(module)
    changed = pools_first(module, few_channels=True)
    assert any(isinstance(layer, PoolOfFewChannels) for layer in changed)
    x = torch.randn(8, 1, 16, 16)
    for model in (changed, other):
        model(x).square().sum().backward()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
