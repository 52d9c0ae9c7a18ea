"""Pooling images of few channels that lie with the channels last, on a CPU.

torch's own kernel takes vectors along the channels; of six channels none is full, and each number is compared
alone. Two passes over whole rows fill the vectors: the larger of every two rows, then of every two columns.
LeNet's first pool, 64 images on one core: 650 µs with torch's kernel, forward and backward, 250 with this one.

Outputs are those of torch to the last bit. Of several equal largest values torch's kernel gives the gradient to
the first, this one to the upper one in the left column: the same unless just two that stand diagonally are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEW_CHANNELS = 16
"""As many float32 as a vector of 512 bits holds; from here on torch's kernel is the faster one."""
LEAST_NUMBERS = 150_000
"""Two passes are a dozen operations, about 200 µs to begin with: LeNet gains from 32 images on and loses at 16."""


class PoolOfFewChannels(nn.Module):
    """The same as ``pool``, in two passes where the images have few channels and these lie last."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Whether the layer takes the largest of every 2 × 2 numbers, each once."""
        return type(layer) is nn.MaxPool2d and (
            _both(layer.kernel_size) == _both(layer.stride) == (2, 2)
            and _both(layer.padding) == (0, 0)
            and _both(layer.dilation) == (1, 1)
            and not (layer.ceil_mode or layer.return_indices)
        )

    def forward(self, x: Tensor) -> Tensor:
        fits = (
            x.dim() == 4
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.shape[1] < FEW_CHANNELS
            and x.shape[2] % 2 == x.shape[3] % 2 == 0
            and x.numel() >= LEAST_NUMBERS
            and x.is_contiguous(memory_format=torch.channels_last)
        )
        pooled: Tensor = _TwoPasses.apply(x) if fits else self.pool(x)  # type: ignore[no-untyped-call]
        return pooled


def _both(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


class _TwoPasses(torch.autograd.Function):
    """Rows, then columns; the comparisons are kept as numbers 1 and 0, so that backward multiplies."""

    @staticmethod
    def forward(ctx: Any, x_nchw: Tensor) -> Tensor:
        n, c, h, w = x_nchw.shape
        rows = x_nchw.permute(0, 2, 3, 1).reshape(n, h // 2, 2, w // 2, 2, c)
        taller = torch.maximum(rows[:, :, 0], rows[:, :, 1])
        upper = torch.empty_like(taller)
        torch.ge(rows[:, :, 0], rows[:, :, 1], out=upper)
        # What is returned is no view: a ReLU behind the pool may write into it.
        pooled = torch.empty((n, c, h // 2, w // 2), memory_format=torch.channels_last)
        left = taller.new_empty(n, h // 2, w // 2, c)
        torch.maximum(taller[..., 0, :], taller[..., 1, :], out=pooled.permute(0, 2, 3, 1))
        torch.ge(taller[..., 0, :], taller[..., 1, :], out=left)
        ctx.save_for_backward(upper, left)
        return pooled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nchw: Tensor) -> Tensor:
        upper, left = ctx.saved_tensors
        n, h2, w2, _, c = upper.shape
        grad = grad_nchw.permute(0, 2, 3, 1)
        columns = torch.empty_like(upper)
        torch.mul(grad, left, out=columns[..., 0, :])
        torch.sub(grad, columns[..., 0, :], out=columns[..., 1, :])
        rows = torch.empty((n, h2, 2, w2, 2, c))
        torch.mul(columns, upper, out=rows[:, :, 0])
        torch.sub(columns, rows[:, :, 0], out=rows[:, :, 1])
        return rows.view(n, 2 * h2, 2 * w2, c).permute(0, 3, 1, 2)
