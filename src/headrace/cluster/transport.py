"""Between the master's decisions and whatever carries messages: the same conversation over every transport.

`converse` is a worker's side as a generator: it yields a `Message` and is sent the `Answer`. `Service` is the
master's side: it obeys what `headrace.cluster.machine` decides about parameters and checkpoints and returns the
instructions that concern others. A transport moves the two between machines; Ray is one
(`headrace.cluster.actors`), `headrace.cluster.simulation` is another, on a fake clock and with faults on purpose.

A transport may repeat, delay, reorder and lose messages. A sender that gets no answer sends the same message again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.cluster.compress import Compressor, Packed
from headrace.cluster.holder import Holder
from headrace.cluster.machine import (
    Apply,
    Checkpoint,
    Event,
    Ignore,
    Instruction,
    Joined,
    Key,
    Left,
    Master,
    Push,
)
from headrace.errors import DivergenceError
from headrace.types import Learned, State


@dataclass(frozen=True)
class Message:
    """From a worker to the master."""

    event: Joined | Push | Left
    packed: Packed | None = None

    @property
    def key(self) -> Key:
        return self.event.key


@dataclass(frozen=True)
class Answer:
    """From the master to a worker, under the key of the message that it answers."""

    key: Key
    version: int = 0
    grant: int = 0
    """Steps the worker may take next; 0 ends its work."""
    vector: Tensor | None = None
    place: Any = None
    dismissed: bool = False
    """A later life of this worker has taken over."""


class LocalSteps(Protocol):
    """A worker's own training: lock-free threads, a GPU, or a task's own loop."""

    def resume(self, place: Any) -> None:
        """Go on where an earlier life's last merged push had ended; None is the beginning."""
        ...

    def advance(self, vector: Tensor, steps: int) -> Learned:
        """Take up to ``steps`` steps from ``vector``, which may be changed in place or left alone."""
        ...


class Work(Protocol):
    """What a cluster trains: a module (`headrace.cluster.training.Job`), or another room's parameters and steps.

    It is sent to every worker, so what it refers to must be importable there.
    """

    @property
    def world_size(self) -> int:
        """Workers, each with its shard; set by the driver with ``dataclasses.replace``."""
        ...

    @property
    def total_steps(self) -> int | None: ...

    @property
    def passes(self) -> int | None:
        """Passes of every worker over its shard; None for no limit."""
        ...

    @property
    def compress(self) -> Any: ...

    @property
    def seed(self) -> int: ...

    def values(self) -> Tensor:
        """The first parameters, as one flat vector in CPU memory."""
        ...

    def statistics_from(self) -> int | None:
        """Where running statistics begin, which are averaged; None when there are none."""
        ...

    def take(self, vector: Tensor) -> None:
        """Called in the driver at the end: these are the trained parameters."""
        ...

    def local(self, rank: int) -> LocalSteps:
        """The training of one worker, in its process."""
        ...


Conversation: TypeAlias = Generator[Message, Answer, None]


def converse(worker: str, life: int, local: LocalSteps, compressor: Compressor) -> Conversation:
    """One life of a worker: join, then pull, B steps and push, until the grant or the shard is used up."""
    sequence, exchange_s = 0, 0.0
    answer = yield Message(Joined(Key(worker, life)))
    local.resume(answer.place)
    while answer.grant and not answer.dismissed:
        assert answer.vector is not None
        base = answer.vector
        began_s = time.perf_counter()
        done = local.advance(base.clone(), answer.grant)
        ended_s = time.perf_counter()
        if done.steps:
            sequence += 1
            if not _is_finite(done.vector):
                raise DivergenceError(
                    f"{worker} reached values that are not finite within {done.steps} local steps from version "
                    f"{answer.version}; lower lr, take fewer local steps or set clip="
                )
            push = Push(
                Key(worker, life, sequence),
                answer.version,
                done.steps,
                done.rows,
                done.loss,
                done.place,
                ended_s - began_s,
                exchange_s,
            )
            answer = yield Message(push, compressor.pack(base, done.vector, done.decay))
            exchange_s = time.perf_counter() - ended_s
        if done.finished:
            break
    if not answer.dismissed:
        yield Message(Left(Key(worker, life, sequence + 1)))


def _is_finite(vector: Tensor) -> bool:
    """Every entry. The sum is a quick witness; where finite entries overflow it, each is looked at."""
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())


@dataclass
class Service:
    """The master's decisions, carried out on one holder."""

    master: Master
    holder: Holder
    save: Callable[[State], None] | None = None
    losses: list[tuple[int, float, int]] = field(default_factory=list)
    """Steps so far, mean loss and rows of each merged push."""
    _pending: dict[Key, Push] = field(default_factory=dict)

    def handle(self, event: Event, packed: Packed | None = None) -> list[Instruction]:
        """Feed one event; returns the instructions that are the transport's business."""
        if isinstance(event, Push) and event.key not in self.holder.held:
            self.holder.hold(event.key, packed)
            self._pending[event.key] = event
        for_others: list[Instruction] = []
        for instruction in self.master.handle(event):
            match instruction:
                case Apply():
                    self.holder.apply(instruction)
                    self._note(instruction)
                case Ignore(key):
                    self.holder.drop(key)
                    self._pending.pop(key, None)
                case Checkpoint():
                    if self.save is not None:
                        self.save(self.state_dict())
                case _:
                    for_others.append(instruction)
        return for_others

    def answer(self, key: Key, version: int, grant: int) -> Answer:
        """The answer with the parameters as they are now."""
        place = self.master.members[key.worker].place
        return Answer(key, version, grant, self.holder.vector() if grant else None, place)

    def _note(self, order: Apply) -> None:
        for key, _ in order.parts:
            push = self._pending.pop(key)
            self.losses.append((self.master.steps, push.loss, push.rows))

    def state_dict(self) -> State:
        return {"master": self.master.state_dict(), "values": self.holder.vector()}

    def load_state_dict(self, state: State) -> None:
        self.master.load_state_dict(state["master"])
        self.holder.restore(state["values"], self.master.version)
        self._pending.clear()
