"""From what the user gave to what a session needs: device, sources, module, loss, checks. Everything that can be
wrong with a run is found here, before the first update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.losses import resolve_loss, takes_classes
from headrace.engine.models import make_model
from headrace.engine.options import FitOptions
from headrace.engine.residence import left_out_of, resolve_device
from headrace.engine.split import hold_out
from headrace.engine.task import TorchTask, make_preparation, probe
from headrace.errors import DataError, OptionError
from headrace.source import open_source
from headrace.source.check import check_finite
from headrace.types import Column, Columns, InMemory, Plan, Source

CHECKED_BYTES = 4 << 30  # larger data is checked up to here: one pass costs a second or two
LABELS_LOOKED_AT = 100_000  # rows of a source that is not in memory


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device, and why."""
    device = resolve_device(name)
    if name != "auto":
        return device, "asked for"
    return device, "a CUDA device is there" if device.type == "cuda" else "no CUDA device is there"


def open_data(data: Any, options: FitOptions) -> tuple[Source, Source | None, Plan]:
    """Training source, validation source if any, and what was decided about them."""
    plan = Plan()
    source: Source = open_source(data, input=options.input, target=options.target, on_error=options.on_error)
    for d in left_out_of(source):
        plan = plan.with_(d.name, d.value, d.reason)
    plan = _check_values(source, plan)
    validation = options.validation
    if validation is None:
        return source, None, plan
    if isinstance(validation, float):
        training, held = hold_out(source, validation, options.seed)
        reason = f"{validation:g} of the rows held out at random by the seed"
        return training, held, plan.with_("validation_rows", len(held), reason)
    if isinstance(validation, bool | int):
        raise OptionError(f"validation={validation!r}: data, or a share of the rows such as 0.1, is needed")
    held = open_source(validation, input=options.input, target=options.target)
    check_finite(held, max_rows=_rows_within(held, CHECKED_BYTES))
    _check_same(source, held)
    return source, held, plan.with_("validation_rows", len(held), "given")


def _check_values(source: Source, plan: Plan) -> Plan:
    rows = _rows_within(source, CHECKED_BYTES)
    check_finite(source, max_rows=rows)
    if rows is None:
        return plan.with_("checked_rows", len(source), "no NaN and no infinite value in any row")
    return plan.with_(
        "checked_rows", rows, "no NaN in the first rows; the data is too large to read whole beforehand"
    )


def _rows_within(source: Source, size: int) -> int | None:
    """How many rows have so many bytes; None when all have."""
    per_row = sum(c.dtype.itemsize * torch.Size(c.shape).numel() for c in source.columns if not c.sparse) or 1
    rows = max(1, size // per_row)
    return None if rows >= len(source) else rows


def _check_same(source: Source, other: Source) -> None:
    """Validation data must have the training data's columns."""
    for mine, theirs in zip(source.columns, other.columns, strict=False):
        if mine.shape != theirs.shape or mine.role != theirs.role:
            raise DataError(
                f"validation column {theirs.name!r} has rows of shape {theirs.shape}, "
                f"the training column {mine.name!r} has {mine.shape}"
            )
    if len(source.columns) != len(other.columns):
        raise DataError(
            f"the validation data has {len(other.columns)} columns, the training data {len(source.columns)}"
        )


def target_of(source: Source) -> Column:
    """The target column."""
    for column in source.columns:
        if column.role == "target":
            return column
    names = ", ".join(c.name for c in source.columns)
    raise DataError(f"no target column among {names}; name one with target= (or --target)")


def sample_target(source: Source) -> Tensor:
    """The target of all rows when it lies in memory, else of the first and last rows."""
    name = target_of(source).name
    if isinstance(source, InMemory):
        return source.tensors()[name]
    if len(source) <= LABELS_LOOKED_AT:
        return source.read(range(len(source)))[name]
    half = LABELS_LOOKED_AT // 2
    ends = range(half), range(len(source) - half, len(source))
    return torch.cat([source.read(rows)[name] for rows in ends])


def make_task(
    model: Any, source: Source, options: FitOptions, device: torch.device
) -> tuple[TorchTask, str, Columns, Any]:
    """The task, the loss's name, two rows and what the model returns for them; all mismatches are found here."""
    target = target_of(source)
    values = sample_target(source)
    loss, loss_name = resolve_loss(options.loss, target)
    inputs = [c for c in source.columns if c.role == "input"]
    if not inputs:
        raise DataError(
            f"no input column beside the target {target.name!r}; name one with input= (or --input)"
        )
    module = make_model(
        model,
        input_shape=inputs[0].shape,
        outputs=_outputs(target, values, takes_classes(loss)),
        seed=options.seed,
    ).to(device)
    preparation = make_preparation(source.columns, loss, module, options.transform)
    task = TorchTask(module, loss, preparation, bf16=options.precision == "bf16")
    few = {name: column.to(device) for name, column in source.read(range(min(2, len(source)))).items()}
    output = probe(task, few, values)
    _check_trainable(module)
    return task, loss_name, few, output


def _outputs(target: Column, values: Tensor, classes: bool) -> int | None:
    """How many numbers a named model gives: classes, components of a vector, or None for one number."""
    if classes and not target.dtype.is_floating_point:
        return max(len(target.classes), int(values.max()) + 1, 2)
    if target.shape == ():
        return None
    return int(torch.Size(target.shape).numel())


def _check_trainable(module: nn.Module) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        raise OptionError("the model has no parameter that requires a gradient: there is nothing to train")
