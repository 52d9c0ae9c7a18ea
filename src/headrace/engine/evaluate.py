"""Loss and metrics on held-out data, accumulated on the device and read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine.loader import Loader
from headrace.engine.losses import takes_classes
from headrace.engine.residence import gather
from headrace.engine.task import TorchTask
from headrace.types import Columns


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of examples whose largest output is the target's class."""
    return (output.argmax(1) == target).float().mean()


def binary_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of right signs, for logits against targets of 0 and 1."""
    return ((output > 0) == (target > 0.5)).float().mean()


def usual_metrics(task: TorchTask, output: Any) -> dict[str, Callable[..., Any]]:
    """What is reported unasked: accuracy for class losses."""
    if takes_classes(task.loss_of) and isinstance(output, Tensor) and output.ndim == 2:
        return {"accuracy": accuracy}
    if task.loss_of is F.binary_cross_entropy_with_logits:
        return {"accuracy": binary_accuracy}
    return {}


def _batches(loader: Loader) -> Iterator[Columns]:
    for buffer in loader.buffers():
        for index in buffer.order.split(loader.batch_size):
            yield gather(buffer.columns, index)


def evaluate(task: TorchTask, loader: Loader, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Mean loss over all rows, and each metric: a function's example-weighted mean, or an object's compute()."""
    sums: dict[str, Any] = {}
    count = 0
    objects = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
    for metric in objects.values():
        metric.reset()
    was_training = task.module.training
    task.module.eval()
    try:
        with torch.no_grad():
            for batch in _batches(loader):
                inputs, target = task.prepare(batch)
                output = task.output(inputs)
                size = len(target)
                values = {"loss": task.loss_of(output, target)}
                for name, metric in metrics.items():
                    if name in objects:
                        metric.update(output, target)
                    else:
                        values[name] = metric(output, target)
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + value * size
                count += size
    finally:
        task.module.train(was_training)
    result = {name: float(total) / max(count, 1) for name, total in sums.items()}
    result.update({name: float(metric.compute()) for name, metric in objects.items()})
    return result
