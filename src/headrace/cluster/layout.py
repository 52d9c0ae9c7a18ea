"""A module as one flat vector: what is pulled and pushed.

Trainable parameters come first; running statistics (floating buffers, as those of batch norm) follow, since the
master averages them and never sums them. Other buffers, such as counters, stay each worker's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """Which tensors of a module stand where."""

    tensors: tuple[Tensor, ...]
    statistics_from: int | None
    """Where running statistics begin; None when there are none."""
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        parameters = [p for p in module.parameters() if p.requires_grad]
        statistics = [b for b in module.buffers() if b.is_floating_point()]
        tensors = [t.detach() for t in (*parameters, *statistics)]
        if any(t.is_complex() for t in tensors):
            raise ModelError("a model with complex parameters cannot be trained on a cluster")
        wide = any(t.dtype == torch.float64 for t in tensors)
        split = sum(p.numel() for p in parameters) if statistics else None
        return cls(tuple(tensors), split, torch.float64 if wide else torch.float32)

    @property
    def size(self) -> int:
        return sum(t.numel() for t in self.tensors)

    def gather(self) -> Tensor:
        """The module's values as a new vector in CPU memory."""
        parts = [t.reshape(-1).to("cpu", self.dtype) for t in self.tensors]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def scatter(self, vector: Tensor) -> None:
        """Set the module's values, in place."""
        start = 0
        for tensor in self.tensors:
            part = vector[start : start + tensor.numel()]
            tensor.copy_(part.view(tensor.shape))
            start += tensor.numel()
