"""A worker's own training: a module, its shard of the source, and the engine's steppers.

Optimizer state (momentum, Adam's moments) belongs to the worker and is not sent. A worker that is started again
begins with fresh optimizer state, from the batch after its last merged push.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.cluster.layout import Layout
from headrace.cluster.transport import Done
from headrace.engine.capture import StepParts, choose_stepper
from headrace.engine.loader import Loader
from headrace.engine.losses import resolve_loss
from headrace.engine.optimizers import base_rates, make_optimizer
from headrace.engine.options import FitOptions
from headrace.engine.planning import why_no_chain
from headrace.engine.residence import resolve_device
from headrace.engine.schedules import make_schedule
from headrace.engine.setup import open_data, target_of
from headrace.engine.steps import Stretch
from headrace.engine.task import TorchTask, make_preparation
from headrace.types import Buffer, Decision, Source


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker is told; the same for all. A `headrace.cluster.transport.Work`."""

    module: nn.Module
    data: Any
    options: FitOptions
    world_size: int
    passes: int | None
    """Passes over its shard after which a worker has finished."""
    total_steps: int | None
    compress: Any = None
    seed: int = 0

    def values(self) -> Tensor:
        return Layout.of(self.module).gather()

    def statistics_from(self) -> int | None:
        return Layout.of(self.module).statistics_from

    def take(self, vector: Tensor) -> None:
        Layout.of(self.module).scatter(vector)

    def local(self, rank: int) -> TrainingSteps:
        return TrainingSteps(self, rank)


class TrainingSteps:
    """`LocalSteps` of one worker."""

    def __init__(self, job: Job, rank: int) -> None:
        options = job.options
        self.job, self.rank = job, rank
        device = resolve_device(options.device)
        source, _, _ = open_data(job.data, replace(options, validation=_share(options.validation)))
        module = job.module.to(device).train()
        loss, _ = resolve_loss(options.loss, target_of(source))
        prepare = make_preparation(source.columns, loss, module, options.transform)
        self.task = TorchTask(module, loss, prepare, bf16=options.precision == "bf16")
        self.layout = Layout.of(module)
        self.optimizer = make_optimizer(options, module, device=device)
        self.rates = base_rates(self.optimizer)
        self.loader = Loader(
            source,
            batch_size=options.batch_size,
            order=options.order,
            buffer=options.buffer,
            rounds=options.rounds,
            device=str(device),
            seed=options.seed,
            rank=rank,
            world_size=job.world_size,
        )
        self.stepper = self._stepper(source)
        per_pass = -(-len(source) // (options.batch_size * options.accumulate))
        self.schedule = make_schedule(
            options.schedule,
            options.schedule_options,
            total_steps=job.total_steps,
            steps_per_epoch=per_pass,
        )
        self.steps = 0
        self._buffers: Iterator[Buffer] = iter(())
        self._buffer: Buffer | None = None
        self._at = 0

    def _stepper(self, source: Source) -> Any:
        sparse = any(column.sparse for column in source.columns)
        chain, why = why_no_chain(self.task, self.job.options, sparse=sparse, watched=False)
        ways = [Decision(name="capture", value="eager", reason="the plain way")]
        if chain is not None and self.job.options.capture in ("auto", "chain"):
            ways.insert(0, Decision(name="capture", value="chain", reason="a chain of layers"))
        parts = StepParts(
            task=self.task,
            optimizer=self.optimizer,
            clip=self.job.options.clip,
            window=1,
            longest_order=len(source),
            before_batch=None,
            chain=chain,
            why_no_chain=why,
        )
        return choose_stepper(ways, parts, lambda name, reason: None)

    def resume(self, place: Any) -> None:
        if place is not None:
            self.loader.load_state_dict(place["loader"])
            self.steps = int(place["steps"])

    def advance(self, vector: Tensor, steps: int) -> Done:
        self.layout.scatter(vector)
        losses: list[Tensor] = []
        counts: list[int] = []
        while len(counts) < steps and not self._finished and self._next_buffer():
            self._stretch(steps - len(counts), losses, counts)
        rows = sum(counts)
        total = 0.0
        if counts:
            total = float(torch.cat(losses).cpu().double() @ torch.tensor(counts, dtype=torch.float64))
        return Done(
            vector=self.layout.gather(),
            steps=len(counts),
            rows=rows,
            loss=total / max(1, rows),
            place={"loader": self.loader.state_dict(), "steps": self.steps},
            finished=self._finished,
        )

    @property
    def _finished(self) -> bool:
        return self.job.passes is not None and self.loader.epoch >= self.job.passes

    def _next_buffer(self) -> bool:
        """Have a buffer with rows left; False when the last pass is over."""
        empty_passes = 0
        while self._buffer is None or self._at >= len(self._buffer.order):
            self._buffer = next(self._buffers, None)
            if self._buffer is not None:
                self._at = self._buffer.cursor
                continue
            if self._finished or empty_passes > 1:
                return False
            empty_passes += 1
            self._buffers = self.loader.buffers()
        return True

    def _stretch(self, most: int, losses: list[Tensor], counts: list[int]) -> None:
        """Up to ``most`` updates on the buffer at hand."""
        buffer, options = self._buffer, self.job.options
        assert buffer is not None
        group = options.batch_size * options.accumulate
        updates = min(most, -(-(len(buffer.order) - self._at) // group))
        stop = min(self._at + updates * group, len(buffer.order))
        # A worker sees only its own steps; all workers together are about so many times further.
        factors = [self.schedule((self.steps + i) * self.job.world_size) for i in range(updates)]
        stretch = Stretch(
            buffer=buffer,
            start=self._at,
            stop=stop,
            batch_size=options.batch_size,
            accumulate=options.accumulate,
            rates=tuple(tuple(rate * factor for rate in self.rates) for factor in factors),
            losses=torch.empty(updates, device=self.task.device),
        )
        self.stepper.run(stretch)
        losses.append(stretch.losses)
        counts.extend(min(group, stop - first) for first in range(self._at, stop, group))
        self.loader.consumed(stop - self._at)
        self._at = stop
        self.steps += updates
        if stop == len(buffer.order):  # only asking for the next buffer closes the pass
            self._buffer = next(self._buffers, None)
            self._at = self._buffer.cursor if self._buffer is not None else 0


def _share(validation: Any) -> Any:
    """Rows that are held out are left out by every worker; other validation data is the driver's business."""
    return validation if isinstance(validation, float) else None
