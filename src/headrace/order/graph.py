"""Attention's projections, found in the autograd graph.

`torch.nn.MultiheadAttention` uses its weights inside one function, where no module hook sees them. Its output's graph
does hold a matrix product for each weight, and that product has both factors: its incoming gradient is the δ, its
saved left operand the input. Self-attention with packed weights is read this way at no cost; whenever the graph does
not look as expected (other keys, compiled code, another version of torch) the caller falls back to replaying
(`headrace.order.replay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.order.pieces import Factors, Piece

_STEPS = 80  # nodes between an attention's output and its first projection: about 40 in torch 2.11 to 2.13
_OPERAND = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}


@dataclass
class WeightNode:
    """The product that uses a weight, and the parameters it stands for."""

    node: Any
    """None once its gradient has come."""
    weight: Tensor | None
    bias: Tensor | None

    def pieces(self, deltas: list[Tensor | None], batch: int) -> list[Piece]:
        """Rows of the operands run over positions, and over examples within a position."""
        delta = deltas[0]
        if delta is None or self.node is None:
            return []
        right: Tensor = getattr(self.node, _OPERAND[self.node.name()])
        left = delta.view(-1, batch, delta.shape[-1]).transpose(0, 1)
        return [Factors(self.weight, self.bias, left, right.view(-1, batch, right.shape[-1]).transpose(0, 1))]


def attention_nodes(
    module: nn.Module, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int
) -> list[WeightNode] | None:
    """The products of the in- and the output projection; None when they are not found."""
    if not isinstance(module, nn.MultiheadAttention) or module.in_proj_weight is None:
        return None
    inputs = [*args[:3], *(kwargs[n] for n in ("query", "key", "value")[len(args) :] if n in kwargs)]
    if len(inputs) != 3 or not inputs[0] is inputs[1] is inputs[2] or inputs[0].dim() != 3:
        return None
    if inputs[0].shape[0 if module.batch_first else 1] != batch:
        return None
    out = module.out_proj
    wanted: dict[int, Tensor | None] = {
        id(out.weight): out.bias,
        id(module.in_proj_weight): module.in_proj_bias,
    }
    if not (out.weight.requires_grad and module.in_proj_weight.requires_grad):
        return None
    found: dict[int, WeightNode] = {}
    waiting, seen = [output.grad_fn], 0
    while waiting and seen < _STEPS and len(found) < 2:
        node = waiting.pop()
        seen += 1
        if node is None:
            continue
        weight = _weight_of(node, wanted)
        if weight is not None and id(weight) not in found:
            found[id(weight)] = WeightNode(node, weight, _trained(wanted[id(weight)]))
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values()) if len(found) == 2 else None


def _trained(bias: Tensor | None) -> Tensor | None:
    return bias if bias is not None and bias.requires_grad else None


def _weight_of(node: Any, wanted: dict[int, Tensor | None]) -> Tensor | None:
    """The wanted weight whose transpose this product multiplies by."""
    if node.name() not in _OPERAND:
        return None
    transposed = node.next_functions[-1][0]
    if transposed is None or transposed.name() != "TBackward0":
        return None
    leaf = transposed.next_functions[0][0]
    variable: torch.Tensor | None = getattr(leaf, "variable", None)
    return variable if variable is not None and id(variable) in wanted else None
