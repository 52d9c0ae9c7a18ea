"""Bias gradients of convolutions in two sums: the same gradients, and torch's own sum is not asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine import bias
from headrace.engine.bias import BiasInTwoSums


class Asked(TorchDispatchMode):
    """Notes what convolutions were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.masks.append(list(args[-1]))
        return func(*args, **(kwargs or {}))


def gradients(net: nn.Module, x: Tensor, two_sums: bool) -> tuple[list[Tensor | None], list[list[bool]]]:
    net.zero_grad()
    asked = Asked()
    with asked:
        if two_sums:
            with BiasInTwoSums():
                net(x).square().sum().backward()
        else:
            net(x).square().sum().backward()
    return [p.grad for p in net.parameters()], asked.masks


NETS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "lenet": (
        nn.Sequential(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.Conv2d(6, 16, 3, stride=2, groups=2)),
        (4, 1, 12, 12),
        2,
    ),
    "one dimension": (nn.Conv1d(3, 4, 3), (5, 3, 9), 1),
    "no bias": (nn.Conv2d(2, 3, 3, bias=False), (2, 2, 5, 5), 0),
    "transposed": (nn.ConvTranspose2d(2, 3, 3), (2, 2, 5, 5), 1),
    "many channels": (nn.Conv2d(2, bias.MOST_CHANNELS + 1, 3), (2, 2, 5, 5), 0),
}


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_torchs(name: str) -> None:
    net, shape, taken = NETS[name]
    net, x = net.double(), torch.randn(shape, dtype=torch.float64)
    plain, asked = gradients(net, x, False)
    plain = [g.clone() if g is not None else None for g in plain]
    mine, asked_less = gradients(net, x, True)
    for a, b in zip(plain, mine, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert sum(mask[2] for mask in asked) - sum(mask[2] for mask in asked_less) == taken


def test_what_it_serves() -> None:
    """Nothing is gained without convolutions of few channels, and a compiled module must stay compiled."""
    small = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU())
    assert bias.serves(small)
    assert not bias.serves(nn.Sequential(nn.Linear(3, 2)))
    assert not bias.serves(nn.Conv2d(1, 6, 5, bias=False))
    assert not bias.serves(nn.Conv2d(1, bias.MOST_CHANNELS + 1, 5))
    assert not bias.serves(torch.compile(small))
    small[0].compile()
    assert not bias.serves(small)
