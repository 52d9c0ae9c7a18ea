"""Signs from steps that are written by hand: no hooks, no autograd.

A chain of linear layers that is stepped without autograd has, for every layer and batch, what a hook would see: the
layer's input and the derivative of its output. `ByHand` takes them batch by batch: `begin` names the rows, `take`
brings one layer's factors, `end` says by what the derivatives are to be multiplied. What is taken is sketched at
once, so the factors may be overwritten afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headrace.order.learner import Learner
from headrace.order.pieces import project_inputs
from headrace.order.sketch import SketchSum


class ByHand:
    """Feeds a learner with the factors of a module's linear layers, named by their weights."""

    def __init__(self, learner: Learner, module: nn.Module, in_force: Callable[[], bool]) -> None:
        self._learner = learner
        self._in_force = in_force
        self._layers = {
            f"{name}.weight" if name else "weight": layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
        }
        self._rows: Tensor | None = None
        self._sum: SketchSum | None = None

    def begin(self, indices: Tensor) -> None:
        """The rows of the next batch, in their order in it."""
        if self._in_force():
            self._rows, self._sum = indices, SketchSum(len(indices), self._learner.projections)
        else:
            self._rows = self._sum = None

    def take(self, weight: str, delta_ob: Tensor, input_bi: Tensor) -> None:
        """One layer's input, and the derivative of its output with the examples last."""
        if self._sum is not None:
            layer = self._layers[weight]
            projection = self._learner.projections.of(layer.weight, delta_ob)
            left = torch.mm(projection.rows_t, delta_ob)
            self._sum.add_outer(left, project_inputs(input_bi, projection, layer._parameters["bias"]))

    def end(self, scale: float) -> None:
        """All layers were taken; ``scale`` times their derivatives is what autograd would have found."""
        if self._sum is not None and self._rows is not None:
            self._learner.take_sketch(self._rows, self._sum, scale)
            self._rows = self._sum = None
