"""The operations a `Chain` is made of, their derivatives, and how a module becomes a list of them.

Every operation works on 2-d tensors of one dtype and writes where it is told (``out=``), so that a step
allocates nothing. ``b`` rows, ``d`` features in, ``c`` features out.

Shortcomings: only the layers named in `ELEMENTWISE`, `nn.Linear`, `nn.Dropout` and a leading `nn.Flatten`
are known, in `nn.Sequential` (nested as deep as you like).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ModelError

_aten = torch.ops.aten


@dataclass(frozen=True)
class Elementwise:
    """A function of each number on its own.

    ``forward(z, out)`` may be called with ``out is z``. ``backward(delta, kept)`` multiplies ``delta`` in
    place by the derivative; ``kept`` is the function's output, or its input when ``keeps_input``.
    """

    name: str
    forward: Callable[[Tensor, Tensor], object]
    backward: Callable[[Tensor, Tensor], object]
    keeps_input: bool = False
    slope: float = 0.0
    """Of a LeakyReLU."""


@dataclass(frozen=True)
class Linear:
    """``out = x Wᵀ + bias``; the parameters are named as in the module's `named_parameters`."""

    weight: str
    bias: str | None
    features_in: int
    features_out: int


@dataclass(frozen=True)
class Dropout:
    """Zeroes each number with probability ``p`` while the module it stands for is in training mode.

    Draws from torch's generator exactly as `nn.Dropout` does on a CPU, so the same seed gives the same mask.
    """

    module: nn.Dropout

    @property
    def active(self) -> bool:
        return self.module.training and self.module.p > 0.0

    def draw(self, mask: Tensor) -> None:
        p = self.module.p
        if p >= 1.0:
            mask.zero_()
        else:
            mask.bernoulli_(1.0 - p).div_(1.0 - p)


Operation = Elementwise | Linear | Dropout


def _relu(module: nn.Module) -> Elementwise:
    return Elementwise(
        "relu",
        lambda z, out: torch.clamp_min(z, 0, out=out),
        lambda delta, kept: _aten.threshold_backward.grad_input(delta, kept, 0, grad_input=delta),
    )


def _sigmoid(module: nn.Module) -> Elementwise:
    return Elementwise(
        "sigmoid",
        lambda z, out: torch.sigmoid(z, out=out),
        lambda delta, kept: _aten.sigmoid_backward.grad_input(delta, kept, grad_input=delta),
    )


def _tanh(module: nn.Module) -> Elementwise:
    return Elementwise(
        "tanh",
        lambda z, out: torch.tanh(z, out=out),
        lambda delta, kept: _aten.tanh_backward.grad_input(delta, kept, grad_input=delta),
    )


def _gelu(module: nn.Module) -> Elementwise:
    assert isinstance(module, nn.GELU)
    kind = module.approximate
    return Elementwise(
        "gelu",
        lambda z, out: _aten.gelu.out(z, approximate=kind, out=out),
        lambda delta, kept: _aten.gelu_backward.grad_input(delta, kept, approximate=kind, grad_input=delta),
        keeps_input=True,
    )


def _silu(module: nn.Module) -> Elementwise:
    return Elementwise(
        "silu",
        lambda z, out: _aten.silu.out(z, out=out),
        lambda delta, kept: _aten.silu_backward.grad_input(delta, kept, grad_input=delta),
        keeps_input=True,
    )


def _leaky_relu(module: nn.Module) -> Elementwise:
    assert isinstance(module, nn.LeakyReLU)
    slope = module.negative_slope
    # The sign of the output tells the sign of the input only while the slope is positive.
    by_output = slope > 0
    return Elementwise(
        "leaky_relu",
        lambda z, out: _aten.leaky_relu.out(z, slope, out=out),
        lambda delta, kept: _aten.leaky_relu_backward.grad_input(
            delta, kept, slope, by_output, grad_input=delta
        ),
        keeps_input=not by_output,
        slope=slope,
    )


ELEMENTWISE: dict[type[nn.Module], Callable[[nn.Module], Elementwise]] = {
    nn.ReLU: _relu,
    nn.Sigmoid: _sigmoid,
    nn.Tanh: _tanh,
    nn.GELU: _gelu,
    nn.SiLU: _silu,
    nn.LeakyReLU: _leaky_relu,
}


class NotAChainError(ModelError):
    """Why a module or a loss is not a chain; `Chain.of` turns it into a reason for the plan."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested `nn.Sequential` in order of use, with their names."""
    hooked = next((kind for kind in _HOOKS if getattr(module, kind, None)), None)
    if hooked:
        raise NotAChainError(f"{prefix or 'the module'} carries hooks, which only autograd would call")
    if type(module) is nn.Sequential:
        for name, child in module.named_children():
            yield from leaves(child, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, module


def operations(module: nn.Module) -> tuple[list[Operation], bool]:
    """The module as a list of operations, and whether its input is to be flattened; or `NotAChainError`."""
    found: list[Operation] = []
    flattens = False
    leaf: Any
    for name, leaf in leaves(module):
        kind: type[nn.Module] = type(leaf)
        if kind is nn.Linear:
            found.append(_linear(name, leaf))
        elif kind in ELEMENTWISE:
            found.append(ELEMENTWISE[kind](leaf))
        elif kind is nn.Dropout:
            found.append(Dropout(leaf))
        elif kind is nn.Flatten and not found and (leaf.start_dim, leaf.end_dim) == (1, -1):
            flattens = True
        elif kind is not nn.Identity:
            where = f"{name} is" if name else "the module is"
            raise NotAChainError(
                f"{where} a {kind.__name__}, which is not a Linear, an activation or a leading Flatten"
            )
    _check(module, found)
    return found, flattens


def _linear(name: str, leaf: Any) -> Linear:
    prefix = f"{name}." if name else ""
    bias = f"{prefix}bias" if leaf.bias is not None else None
    return Linear(f"{prefix}weight", bias, leaf.in_features, leaf.out_features)


def _check(module: nn.Module, found: list[Operation]) -> None:
    linears = [op for op in found if isinstance(op, Linear)]
    if not linears:
        raise NotAChainError("the module holds no Linear layer")
    for before, after in itertools.pairwise(linears):
        if before.features_out != after.features_in:
            raise NotAChainError(
                f"{before.weight} gives {before.features_out} features "
                f"and {after.weight} takes {after.features_in}"
            )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len({p.data_ptr() for p in parameters.values()}) < len(parameters):
        raise NotAChainError("two layers share one parameter")
    if len({(p.dtype, p.device) for p in parameters.values()}) > 1:
        raise NotAChainError("its parameters differ in dtype or device")
    first = next(iter(parameters.values()))
    if first.dtype not in (torch.float32, torch.float64):
        raise NotAChainError(
            f"its parameters are {first.dtype}, and only float32 and float64 are updated in place"
        )
