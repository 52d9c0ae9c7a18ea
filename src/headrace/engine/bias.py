"""Bias gradients of convolutions in two sums, for steps that are captured.

torch sums the gradient of a convolution's output over examples and pixels in one kernel with one block a channel:
with LeNet's 6 and 16 channels an H200 is then almost empty, and the two sums took a sixth of a captured step. Summed
over pixels first and over examples then, each is a tenth of that. A dispatch mode costs the host some microseconds a
call, so it is only worth it where a call is recorded once and replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_BACKWARD = torch.ops.aten.convolution_backward.default
MOST_CHANNELS = 64
"""Above this one block a channel keeps a device busy; a guess."""


def serves(module: nn.Module) -> bool:
    """Whether there is something to gain. A module that its owner compiled would run uncompiled inside the mode."""
    parts = list(module.modules())
    compiled = any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts
    )
    return not compiled and any(
        isinstance(part, nn.modules.conv._ConvNd)
        and part.bias is not None
        and part.out_channels <= MOST_CHANNELS
        for part in parts
    )


class BiasInTwoSums(TorchDispatchMode):
    """Inside, the bias gradients of convolutions with few channels are summed in two steps."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _BACKWARD or kwargs or not _fits(*args):
            return func(*args, **kwargs)
        given, weights, _ = func(*args[:-1], [*args[-1][:2], False])
        return given, weights, args[0].flatten(2).sum(2).sum(0)


def _fits(gradient: Tensor, *rest: Any) -> bool:
    wanted = rest[-1]
    return bool(
        wanted[2] and gradient.dim() > 2 and gradient.shape[1] <= MOST_CHANNELS and gradient.is_contiguous()
    )
