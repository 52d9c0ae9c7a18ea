"""A worker's own training: a module, its shard of the source, and the engine's steppers.

Optimizer state (momentum, Adam's moments) belongs to the worker and is not sent. A worker that is started again
begins with fresh optimizer state, from the batch after its last merged push. With several cores each has a share of
the steps between two pushes, and optimizer state of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace.cluster.layout import Layout
from headrace.engine.capture import StepParts, choose_stepper
from headrace.engine.loader import Loader
from headrace.engine.losses import resolve_loss
from headrace.engine.optimizers import base_rates, make_optimizer
from headrace.engine.options import FitOptions
from headrace.engine.planning import why_no_chain
from headrace.engine.residence import resolve_device
from headrace.engine.schedules import make_schedule
from headrace.engine.served import Orders, ServedOrder
from headrace.engine.setup import open_data, target_of
from headrace.engine.steps import Stepper, Stretch
from headrace.engine.task import TorchTask, make_preparation
from headrace.errors import OptionError
from headrace.types import Buffer, Decision, Learned, Source, State


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
    cores: int = 1
    """Threads of each worker, which step on the same parameters without locks."""
    rows: int = 0
    """Rows that the workers share; needed for a balanced order."""
    orders: Orders | None = None
    """The service of balanced orders; set by the driver where one is asked for."""

    def values(self) -> Tensor:
        return Layout.of(self.module).gather()

    def statistics_from(self) -> int | None:
        return Layout.of(self.module).statistics_from

    def take(self, vector: Tensor) -> None:
        Layout.of(self.module).scatter(vector)

    def local(self, rank: int) -> TrainingSteps:
        return TrainingSteps(self, rank)


def twin_of(module: nn.Module) -> nn.Module:
    """The module once more, with the same parameters and statistics in memory and gradients of its own."""
    twin = copy.deepcopy(module)
    for own, shared in zip(
        (*twin.parameters(), *twin.buffers()), (*module.parameters(), *module.buffers()), strict=True
    ):
        own.data = shared.data
    return twin


@dataclass(frozen=True)
class Lane:
    """One thread of a worker: its steps read and write the parameters of all, without a lock."""

    stepper: Stepper
    rates: tuple[float, ...]

    @classmethod
    def of(
        cls, job: Job, source: Source, module: nn.Module, device: torch.device, order: ServedOrder | None
    ) -> Lane:
        options = job.options
        loss, _ = resolve_loss(options.loss, target_of(source))
        prepare = make_preparation(source.columns, loss, module, options.transform)
        task = TorchTask(module, loss, prepare, bf16=options.precision == "bf16")
        optimizer = make_optimizer(options, module, device=device)
        sparse = any(column.sparse for column in source.columns)
        chain, why = why_no_chain(task, options, sparse=sparse, order=order)
        ways = [Decision(name="capture", value="eager", reason="the plain way")]
        if chain is not None and options.capture in ("auto", "chain"):
            ways.insert(0, Decision(name="capture", value="chain", reason="a chain of layers"))
        parts = StepParts(
            task=task,
            optimizer=optimizer,
            clip=options.clip,
            window=1,
            longest_order=len(source),
            before_batch=order.begin_batch if order is not None else None,
            chain=chain,
            why_no_chain=why,
        )
        return cls(choose_stepper(ways, parts, lambda name, reason: None), tuple(base_rates(optimizer)))


class TrainingSteps:
    """`LocalSteps` of one worker."""

    def __init__(self, job: Job, rank: int) -> None:
        options = job.options
        self.job, self.rank = job, rank
        device = resolve_device(options.device)
        source, _, _ = open_data(job.data, replace(options, validation=_share(options.validation)))
        module = job.module.to(device).train()
        self.layout = Layout.of(module)
        self.order = self._served(source, module)
        twins = [module, *(twin_of(module) for _ in range(job.cores - 1))]
        self.lanes = [Lane.of(job, source, twin, device, self.order) for twin in twins]
        self.loader = Loader(
            source,
            batch_size=options.batch_size,
            order=self.order or options.order,
            buffer=options.buffer,
            rounds=options.rounds,
            device=str(device),
            seed=options.seed,
            rank=rank,
            world_size=job.world_size,
        )
        if self.order is not None and self.loader.plan["residence"] == "buffered":
            raise OptionError("order='balanced' on a cluster needs data that fit into each worker's memory")
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
        self._threads = None
        if job.cores > 1:
            self._threads = ThreadPoolExecutor(job.cores, initializer=torch.set_num_threads, initargs=(1,))

    def _served(self, source: Source, module: nn.Module) -> ServedOrder | None:
        """The order that the service makes for this worker, when a balanced one is asked for."""
        if self.job.orders is None:
            return None
        world, seed = self.job.world_size, self.job.options.seed
        order = ServedOrder(len(source), self.rank, world, self.job.orders, seed=seed)
        order.watch(module)
        return order

    def resume(self, place: Any) -> None:
        if place is None:
            return
        state = dict(place["loader"])
        if self.order is not None:
            self.order.load_state_dict(state["order"])
            state["permutation"] = self.order.whole() if place["in_pass"] else None
        self.loader.load_state_dict(state)
        self.steps = int(place["steps"])

    def _place(self) -> State:
        """Where this shard goes on. A permutation of all rows stays here: the worker's own part is enough."""
        state = self.loader.state_dict()
        in_pass, state["permutation"] = state["permutation"] is not None, None
        return {"loader": state, "steps": self.steps, "in_pass": in_pass}

    def advance(self, vector: Tensor, steps: int) -> Learned:
        self.layout.scatter(vector)
        losses: list[Tensor] = []
        counts: list[int] = []
        while len(counts) < steps and not self._finished and self._next_buffer():
            self._stretch(steps - len(counts), losses, counts)
        rows = sum(counts)
        total = 0.0
        if counts:
            total = float(torch.cat(losses).cpu().double() @ torch.tensor(counts, dtype=torch.float64))
        return Learned(
            vector=self.layout.gather(),
            steps=len(counts),
            rows=rows,
            loss=total / max(1, rows),
            place=self._place(),
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
        rates = self.lanes[0].rates
        stretch = Stretch(
            buffer=buffer,
            start=self._at,
            stop=stop,
            batch_size=options.batch_size,
            accumulate=options.accumulate,
            rates=tuple(tuple(rate * factor for rate in rates) for factor in factors),
            losses=torch.empty(updates, device=buffer.order.device),
        )
        self._run(stretch)
        losses.append(stretch.losses)
        counts.extend(min(group, stop - first) for first in range(self._at, stop, group))
        self.loader.consumed(stop - self._at)
        self._at = stop
        self.steps += updates
        if stop == len(buffer.order):  # only asking for the next buffer closes the pass
            self._buffer = next(self._buffers, None)
            self._at = self._buffer.cursor if self._buffer is not None else 0

    def _run(self, stretch: Stretch) -> None:
        """The stretch's updates, divided among the threads; all of them rest when it ends."""
        if self._threads is None:
            self.lanes[0].stepper.run(stretch)
            return
        edges = [stretch.updates * i // len(self.lanes) for i in range(len(self.lanes) + 1)]
        parts = [stretch.part(first, last) for first, last in pairwise(edges)]
        futures = [
            self._threads.submit(lane.stepper.run, part)
            for lane, part in zip(self.lanes, parts, strict=True)
            if part.updates
        ]
        for future in futures:
            future.result()


def _share(validation: Any) -> Any:
    """Rows that are held out are left out by every worker; other validation data is the driver's business."""
    return validation if isinstance(validation, float) else None
