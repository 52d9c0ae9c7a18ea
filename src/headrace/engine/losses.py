"""Losses by name, and what a loss expects of a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.engine.options import describe_object
from headrace.errors import OptionError, unknown
from headrace.types import Column

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}
OF_CLASSES = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
BCE = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy, nn.BCEWithLogitsLoss, nn.BCELoss)
OF_FLOATS = (
    F.mse_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.l1_loss, F.huber_loss, F.smooth_l1_loss,
    nn.MSELoss, nn.BCEWithLogitsLoss, nn.BCELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss,
)  # fmt: skip


def resolve_loss(loss: str | Loss, target: Column) -> tuple[Loss, str]:
    """The loss function and its name; ``"auto"`` follows the target's type."""
    if loss == "auto":
        loss = "mse" if target.dtype.is_floating_point else "cross_entropy"
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        return LOSSES[loss], loss
    if not callable(loss):
        raise OptionError(f"loss={loss!r} is neither a name nor a callable loss(output, target)")
    if getattr(loss, "reduction", "mean") == "none":
        raise OptionError(
            "the loss has reduction='none'; training needs the mean over the batch: reduction='mean'"
        )
    return loss, describe_object(loss).strip("<>")


def _is_one_of(loss: Loss, kinds: tuple[Any, ...]) -> bool:
    return any(isinstance(loss, kind) if isinstance(kind, type) else loss is kind for kind in kinds)


def takes_classes(loss: Loss) -> bool:
    """True for losses whose integer target names a class."""
    return _is_one_of(loss, OF_CLASSES)


def is_bce(loss: Loss) -> bool:
    """True for losses of probabilities: their targets lie between 0 and 1."""
    return _is_one_of(loss, BCE)


def target_dtype(loss: Loss, target: Column, floating: torch.dtype) -> torch.dtype:
    """The type a target must have for the loss: int64 for classes, the parameters' type for the others."""
    if takes_classes(loss):
        return floating if target.dtype.is_floating_point else torch.int64
    if _is_one_of(loss, OF_FLOATS):
        return floating
    if target.dtype.is_floating_point:
        return floating
    return target.dtype if target.dtype in (torch.int64, torch.bool) else torch.int64
