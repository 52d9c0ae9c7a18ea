"""What a run asks of the machine, as the record that `headrace.plan` decides on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headrace.engine.chain import Chain
from headrace.engine.options import FitOptions
from headrace.engine.residence import row_bytes
from headrace.engine.task import TorchTask
from headrace.order.balanced import BalancedOrder
from headrace.plan import Workload
from headrace.types import Columns, Source

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
STATE_COPIES = {"sgd": 0, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2, "nadam": 2, "radam": 2}


def describe(
    task: TorchTask,
    source: Source,
    few: Columns,
    options: FitOptions,
    optimizer: torch.optim.Optimizer,
    *,
    updates: int | None,
    chain: bool,
) -> Workload:
    """The workload of this run. ``chain``: its step can be written by hand."""
    module = task.module
    name = type(optimizer).__name__.lower()
    copies = STATE_COPIES.get(name, 2) + (1 if options.momentum and name == "sgd" else 0)
    return Workload(
        rows=len(source),
        row_bytes=max(row_bytes(source), 1.0),
        batch_size=options.batch_size,
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        modules=sum(not any(layer.children()) for layer in module.modules()),
        flops_per_row=_flops_per_row(task, few),
        optimizer_copies=copies,
        updates=updates,
        device=str(task.device),
        capture=options.capture,
        chain=chain,
        capturable=not any(column.sparse for column in source.columns),
        convolutions=any(isinstance(layer, CONVOLUTIONS) for layer in module.modules()),
        bf16=task.bf16,
        deterministic=options.deterministic,
    )


def _flops_per_row(task: TorchTask, few: Columns) -> float:
    """Forward and backward of one row: three times the forward's operations."""
    inputs, target = task.prepare(few)
    was_training = task.module.training
    task.module.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.output(inputs)
    finally:
        task.module.train(was_training)
    return 3.0 * float(counter.get_total_flops()) / len(target)


def why_no_chain(
    task: TorchTask, options: FitOptions, *, sparse: bool, order: Any
) -> tuple[Chain | None, str]:
    """The module as a chain of layers that is stepped by hand, or why it is none."""
    if task.device.type != "cpu":
        return None, "the model is not on the cores"
    if options.accumulate > 1:
        return None, "gradients are accumulated over several batches"
    if task.bf16:
        return None, "bf16 runs through autocast"
    if sparse or len(task.prepare.inputs) != 1:
        return None, "the input is sparse or not a single column"
    if not all(p.requires_grad for p in task.module.parameters()):
        return None, "some parameters are frozen"
    chain, why = Chain.of(task.module, task.loss_of)
    if chain is not None and order is not None:
        chain.listener = order.by_hand(task.module) if isinstance(order, BalancedOrder) else None
        if chain.listener is None:
            return None, "the order watches each batch through hooks"
    return chain, why
