"""A torch module and a loss as a Task: what one forward and backward does.

Inputs are prepared on the device after the gather: uint8 becomes floats in [0, 1], floats become the
parameters' type, sparse rows become dense. Integers other than uint8 (tokens, indices) stay as they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.losses import Loss, is_bce, takes_classes, target_dtype
from headrace.errors import DataError, ModelError
from headrace.types import Column, Columns


@dataclass(frozen=True)
class Preparation:
    """What happens to each column between gather and model."""

    inputs: tuple[str, ...]
    target: str
    floating: torch.dtype
    target_type: torch.dtype
    transform: Callable[..., Any] | None = None

    def __call__(self, batch: Columns) -> tuple[tuple[Tensor, ...], Tensor]:
        inputs = tuple(self._input(batch[name]) for name in self.inputs)
        if self.transform is not None:
            changed = self.transform(*inputs)
            inputs = changed if isinstance(changed, tuple) else (changed,)
        target = batch[self.target]
        return inputs, target if target.dtype == self.target_type else target.to(self.target_type)

    def _input(self, x: Tensor) -> Tensor:
        if x.layout != torch.strided:
            x = x.to_dense()
        if x.dtype == torch.uint8:
            return x.to(self.floating).mul_(1 / 255)
        if x.is_floating_point() and x.dtype != self.floating:
            return x.to(self.floating)
        return x


class TorchTask:
    """Forward, loss and their backward for batches of columns."""

    def __init__(self, module: nn.Module, loss: Loss, prepare: Preparation, *, bf16: bool = False) -> None:
        self.module = module
        self.forward = module
        """What a step calls: the module, or its layers in a cheaper order with the same values."""
        self.loss_of = loss
        self.prepare = prepare
        self.bf16 = bf16

    @property
    def device(self) -> torch.device:
        first = next(self.module.parameters(), None)
        return first.device if first is not None else torch.device("cpu")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def output(self, inputs: tuple[Tensor, ...]) -> Any:
        with self.autocast():
            return self.forward(*inputs)

    def loss(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Mean loss of one batch, with its graph."""
        with self.autocast():
            return self.loss_of(self.forward(*inputs), target)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


def make_preparation(
    columns: tuple[Column, ...], loss: Loss, module: nn.Module, transform: Callable[..., Any] | None
) -> Preparation:
    """Which columns feed the model, and in which types."""
    targets = [c for c in columns if c.role == "target"]
    if not targets:
        names = ", ".join(c.name for c in columns)
        raise DataError(f"no target column among {names}; name one with target= (or --target)")
    floating = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return Preparation(
        inputs=tuple(c.name for c in columns if c.role == "input"),
        target=targets[0].name,
        floating=floating,
        target_type=target_dtype(loss, targets[0], floating),
        transform=transform,
    )


def probe(task: TorchTask, batch: Columns, targets: Tensor) -> Any:
    """Run one small batch through model and loss, in evaluation mode and without a gradient.

    A mismatch is answered here, with all shapes, and not by a traceback in the first step. ``targets`` are the
    targets of all rows, or of as many as can be had.
    """
    inputs, target = task.prepare(batch)
    shapes = " and ".join(f"{tuple(x.shape)} {_type(x)}" for x in inputs)
    was_training = task.module.training
    task.module.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                output = task.output(inputs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ModelError(
                    f"the model does not take an input of shape {shapes}: {_first(error)}"
                ) from error
            check_labels(task, output, targets)
            try:
                value = task.loss_of(output, target)
            except (RuntimeError, TypeError, ValueError, IndexError, UserWarning) as error:
                raise ModelError(_mismatch(shapes, output, target, error)) from error
    finally:
        task.module.train(was_training)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"the loss must return one number, the mean over the batch; it returned {found}")
    return output


def check_labels(task: TorchTask, output: Any, target: Tensor, whose: str = "") -> None:
    """Integer targets of a class loss must lie between 0 and the number of outputs, those of bce in [0, 1]."""
    if is_bce(task.loss_of) and target.numel() and (target.min() < 0 or target.max() > 1):
        raise DataError(
            f"bce takes targets from 0 to 1, {whose}targets run from {target.min():g} to {target.max():g}; "
            "loss='cross_entropy' takes the numbers of classes"
        )
    if not takes_classes(task.loss_of) or target.is_floating_point() or not isinstance(output, Tensor):
        return
    ignored = getattr(task.loss_of, "ignore_index", -100)
    values = target[target != ignored]
    if values.numel() == 0:
        return
    low, high, classes = int(values.min()), int(values.max()), output.shape[1]
    if low < 0 or high >= classes:
        wrong = int(((values < 0) | (values >= classes)).sum())
        raise DataError(
            f"{whose}labels run from {low} to {high}, the model has {classes} outputs for the classes 0 to "
            f"{classes - 1}: {wrong} labels lie outside"
        )


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _mismatch(shapes: str, output: Any, target: Tensor, error: BaseException) -> str:
    found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    hint = ""
    if isinstance(output, Tensor) and output.shape[:-1] == target.shape and output.shape[-1] == 1:
        hint = "; drop the model's last dimension or give the target one"
    elif isinstance(output, Tensor) and output.ndim == target.ndim + 1 and target.is_floating_point():
        hint = "; integer class labels fit cross_entropy, floats fit mse"
    return (
        f"for an input of shape {shapes} the model returns {found} and the target has shape {tuple(target.shape)} "
        f"{_type(target)}; the loss does not take that pair: {_first(error)}{hint}"
    )
