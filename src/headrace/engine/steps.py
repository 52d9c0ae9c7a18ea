"""Steppers: run a stretch of updates over a buffer that lies on the device.

A `Stretch` names positions of a buffer's order, a step size per update, and where the losses go. Every stepper
does the same arithmetic; they differ in how much of it waits for Python. None of them synchronises with the
device: losses stay in ``stretch.losses`` until somebody reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.optimizers import set_rates, stepper_of
from headrace.engine.residence import gather
from headrace.engine.task import TorchTask
from headrace.types import Buffer


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Some consecutive updates on one buffer."""

    buffer: Buffer
    start: int
    """First position of the buffer's order."""
    stop: int
    """One past the last position."""
    batch_size: int
    accumulate: int
    rates: tuple[tuple[float, ...], ...]
    """Step size per update and parameter group."""
    losses: Tensor
    """One element per update, on the device; filled by the stepper."""

    @property
    def group(self) -> int:
        """Examples per update."""
        return self.batch_size * self.accumulate

    @property
    def updates(self) -> int:
        return -(-(self.stop - self.start) // self.group)

    def part(self, first: int, last: int) -> Stretch:
        """The updates from ``first`` up to, not including, ``last``."""
        return replace(
            self,
            start=self.start + first * self.group,
            stop=min(self.start + last * self.group, self.stop),
            rates=self.rates[first:last],
            losses=self.losses[first:last],
        )


class Stepper(Protocol):
    """Runs stretches."""

    @property
    def name(self) -> str: ...

    def run(self, stretch: Stretch) -> None: ...


BatchHook = Callable[[Tensor], None]
"""Called with the rows of a batch before its forward; balanced orders listen."""


class Listener(Protocol):
    """A learned order, as a stepper that captures graphs sees it."""

    def begin_batch(self, indices: Tensor) -> None: ...

    def capturable(self, batch_size: int) -> bool: ...

    def settle(self) -> None: ...

    def flush(self) -> None:
        """Before the last update of a captured stretch: what it leaves is little then, and soon done."""
        ...

    def capturing(self, batch: int, stretches: Sequence[int]) -> contextlib.AbstractContextManager[None]: ...


@contextlib.contextmanager
def plain_convolutions() -> Iterator[None]:
    """torch's own convolutions instead of oneDNN's, forward and backward."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was


class EagerStepper:
    """Autograd and torch.optim, one operation at a time."""

    name = "eager"

    def __init__(
        self,
        task: TorchTask,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        before_batch: BatchHook | None = None,
        loss: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None,
        convolutions: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.clip = clip
        self.before_batch = before_batch
        self.loss = loss or task.loss
        self.convolutions = convolutions
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.apply_gradients = stepper_of(optimizer)
        self._rates: tuple[float, ...] | None = None

    def run(self, stretch: Stretch) -> None:
        with self.convolutions():
            for update in range(stretch.updates):
                first = stretch.start + update * stretch.group
                last = min(first + stretch.group, stretch.stop)
                self.set_rates(stretch.rates[update])
                stretch.losses[update] = self.update(stretch, first, last)

    def set_rates(self, rates: tuple[float, ...]) -> None:
        if rates != self._rates:
            set_rates(self.optimizer, rates)
            self._rates = rates

    def update(self, stretch: Stretch, first: int, last: int) -> Tensor:
        """One update from the positions first..last; returns the mean loss."""
        for parameter in self.parameters:
            parameter.grad = None
        total = self.backward(stretch, first, last)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.apply_gradients()
        return total

    def backward(self, stretch: Stretch, first: int, last: int) -> Tensor:
        """Gradients of the mean loss over the positions, batch by batch; returns that mean."""
        order = stretch.buffer.order
        total: Tensor | None = None
        for begin in range(first, last, stretch.batch_size):
            index = order[begin : min(begin + stretch.batch_size, last)]
            share = len(index) / (last - first)
            inputs, target = self.task.prepare(gather(stretch.buffer.columns, index))
            if self.before_batch is not None:
                ids = stretch.buffer.row_ids
                self.before_batch(index if ids is None else ids[index])
            loss = self.loss(inputs, target)
            if share != 1.0:
                loss = loss * share
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


class CompiledStepper(EagerStepper):
    """The same with forward, loss and backward compiled; a short last batch runs eagerly."""

    name = "compile"

    def __init__(self, task: TorchTask, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(task, optimizer, **options)
        self.compiled = torch.compile(task.loss, dynamic=False)

    def run(self, stretch: Stretch) -> None:
        self.loss = lambda inputs, target: (
            self.compiled(inputs, target)
            if len(target) == stretch.batch_size
            else self.task.loss(inputs, target)
        )
        super().run(stretch)


class ChainStepper:
    """Linear layers and activations by hand: matrix products into place, no autograd."""

    name = "chain"

    def __init__(
        self,
        task: TorchTask,
        chain: Chain,
        optimizer: torch.optim.Optimizer,
        *,
        fused: bool,
        clip: float | None,
    ) -> None:
        self.task = task
        self.chain = chain
        self.optimizer = optimizer
        self.fused = fused
        self.clip = clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.grads: dict[str, Tensor] = {}
        if not fused:
            for name, parameter in task.module.named_parameters():
                parameter.grad = self.grads[name] = torch.zeros_like(parameter)

    def run(self, stretch: Stretch) -> None:
        decay = self.optimizer.param_groups[0]["weight_decay"] if self.fused else 0.0
        for update, (x, y) in enumerate(self.batches(stretch)):
            if self.fused:
                lr = stretch.rates[update][0]
                stretch.losses[update] = self.chain.step(x, y, lr=lr, weight_decay=decay)
                continue
            stretch.losses[update] = self.chain.gradient(x, y, self.grads)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, self.clip)
            set_rates(self.optimizer, stretch.rates[update])
            self.optimizer.step()

    def batches(self, stretch: Stretch) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(stretch.start, stretch.stop, stretch.batch_size):
            index = stretch.buffer.order[begin : min(begin + stretch.batch_size, stretch.stop)]
            if self.chain.listener is not None:
                ids = stretch.buffer.row_ids
                self.chain.listener.begin(index if ids is None else ids[index])
            inputs, target = self.task.prepare(gather(stretch.buffer.columns, index))
            yield inputs[0], target
