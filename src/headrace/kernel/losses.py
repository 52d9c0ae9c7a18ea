"""Losses as the gradient that one batch contributes, scaled so that the curvature is at most one.

Both losses become the same problem for the solver: rows of G that vanish at the optimum, and a ridge.
Squared loss minimises ½Σ w (f−y)² + ½ ridge‖f‖², which is scikit-learn's ``KernelRidge(alpha=ridge)``.
Logistic loss minimises Σ w ℓ(f, y) + ½ ridge‖f‖²; its curvature is at most ¼ (two classes) or ½ (softmax),
so the gradient and the ridge are divided by that and the step sizes of the squared loss are safe for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.errors import unknown

LossName = Literal["squared", "logistic"]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss for ``outputs`` columns."""

    name: str
    outputs: int

    @property
    def curvature(self) -> float:
        if self.name == "squared":
            return 1.0
        return 0.25 if self.outputs == 1 else 0.5

    def gradient(self, values_mc: Tensor, targets_mc: Tensor) -> Tensor:
        """The gradient by the values, over the curvature; overwrites ``values_mc``."""
        if self.name == "squared":
            return values_mc.sub_(targets_mc)
        if self.outputs == 1:
            return values_mc.sigmoid_().sub_(targets_mc).mul_(4)
        return torch.softmax(values_mc, dim=1).sub_(targets_mc).mul_(2)

    def probabilities(self, values_nc: Tensor) -> Tensor:
        """Class probabilities, one column for each class (two for a single output)."""
        if self.name == "logistic":
            if self.outputs > 1:
                return torch.softmax(values_nc, dim=1)
            positive = values_nc.sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        if self.outputs == 1:
            positive = values_nc.add(1).mul(0.5).clamp(0, 1)
            return torch.cat([1 - positive, positive], dim=1)
        return project_to_simplex(values_nc)


def find_loss(name: object, outputs: int) -> Loss:
    if name not in ("squared", "logistic"):
        raise unknown("loss", name, ("squared", "logistic"))
    return Loss(name=str(name), outputs=outputs)


def project_to_simplex(values_nc: Tensor) -> Tensor:
    """The nearest probability vector to each row; keeps the order of the entries."""
    ordered = values_nc.sort(dim=1, descending=True).values
    count = torch.arange(1, values_nc.shape[1] + 1, dtype=values_nc.dtype, device=values_nc.device)
    excess = (ordered.cumsum(dim=1) - 1) / count
    last = (ordered > excess).sum(dim=1, keepdim=True) - 1
    return (values_nc - excess.gather(1, last)).clamp_(min=0)
