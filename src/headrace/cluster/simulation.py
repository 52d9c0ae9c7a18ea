"""A cluster in one thread on a fake clock, with delays, losses, repetitions and deaths on purpose.

Everything random comes from one seed, so a run can be repeated exactly. The workers' local steps are real
computations; only their time, and that of the messages, is made up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cluster.machine import Dismiss, Lost, Push, Reply, Restart, Tick
from headrace.cluster.transport import Answer, Conversation, Message, Service


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How long things take and how often they fail."""

    step_s: float = 1.0
    """One local step."""
    spread: float = 0.0
    """Steps take up to this share longer, at random."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """One message, from least to most."""
    merge_s: float = 0.0
    """The master's time for one push, one after the other."""
    loss: float = 0.0
    """Share of messages that never arrive, each way."""
    duplicate: float = 0.0
    """Share of messages that arrive twice."""
    retry_s: float = 1000.0
    """Without an answer for so long, a worker sends its message again."""
    restart_s: float = 1.0
    deaths: tuple[tuple[float, str], ...] = ()
    """Times at which a worker dies."""
    master_deaths: tuple[float, ...] = ()
    """Times at which the master loses everything since its last checkpoint."""
    slow: dict[str, float] = field(default_factory=dict)
    """Worker → how many times slower than the others."""


@dataclass
class _Actor:
    """One life of a worker."""

    name: str
    life: int
    talk: Conversation
    sent: Message | None = None
    """What it waits to be answered; None while it computes or has ended."""


class Simulation:
    """Runs conversations against a service until nothing is left to happen."""

    def __init__(
        self,
        service: Service,
        start: Callable[[str, int], Conversation],
        workers: Sequence[str],
        conditions: Conditions,
        seed: int = 0,
        max_s: float = 1e9,
    ) -> None:
        self.service = service
        self.start = start
        self.workers = workers
        self.conditions = conditions
        self.random = random.Random(seed)
        self.max_s = max_s
        self.now_s = 0.0
        self.messages = 0
        self._actors: dict[str, _Actor] = {}
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._free_at_s = 0.0
        self._saved = service.state_dict() if conditions.master_deaths else None
        if conditions.master_deaths:
            service.save = self._save

    def run(self) -> float:
        """Returns the time at which the last thing happened."""
        for name in self.workers:
            self._begin(name, 1)
        for time_s, name in self.conditions.deaths:
            self._at(time_s, self._die, name)
        for time_s in self.conditions.master_deaths:
            self._at(time_s, self._master_dies)
        last_s = 0.0
        while self._agenda:
            self.now_s, _, action, arguments = heapq.heappop(self._agenda)
            if self.now_s > self.max_s:
                raise TimeoutError(f"the simulated cluster did not finish within {self.max_s:g} s")
            action(*arguments)
            if action not in (self._retry, self._die):
                last_s = self.now_s
        return last_s

    def _at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1  # equal times happen in the order in which they were planned
        heapq.heappush(self._agenda, (time_s, self._count, action, arguments))

    # ------------------------------------------------------------------ workers

    def _begin(self, name: str, life: int) -> None:
        actor = _Actor(name, life, self.start(name, life))
        self._actors[name] = actor
        self._send(actor, next(actor.talk))

    def _die(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is None:
            return
        del self._actors[name]
        self._carry(Lost(name, actor.life), None)

    def _send(self, actor: _Actor, message: Message) -> None:
        if self._actors.get(actor.name) is not actor:
            return
        actor.sent = message
        self._transmit(self._arrive, message)
        self._at(self.now_s + self.conditions.retry_s, self._retry, actor, message)

    def _retry(self, actor: _Actor, message: Message) -> None:
        if actor.sent is message:
            self._send(actor, message)

    def _answered(self, answer: Answer) -> None:
        actor = self._actors.get(answer.key.worker)
        if actor is None or actor.sent is None or actor.sent.key != answer.key:
            return  # an answer that came before, or to a life that is over
        actor.sent = None
        try:
            message = actor.talk.send(answer)
        except StopIteration:
            del self._actors[actor.name]
            return
        self._at(self.now_s + self._work_s(actor.name, message), self._send, actor, message)

    def _work_s(self, name: str, message: Message) -> float:
        if not isinstance(message.event, Push):
            return 0.0
        stretch = 1 + self.conditions.spread * self.random.random()
        return message.event.steps * self.conditions.step_s * stretch * self.conditions.slow.get(name, 1.0)

    # ------------------------------------------------------------------ the wire

    def _transmit(self, action: Callable[..., None], what: Message | Answer) -> None:
        copies = 1 + (self.random.random() < self.conditions.duplicate)
        for _ in range(copies):
            self.messages += 1
            if self.random.random() >= self.conditions.loss:
                self._at(self.now_s + self.random.uniform(*self.conditions.delay_s), action, what)

    # ------------------------------------------------------------------ the master

    def _arrive(self, message: Message) -> None:
        if isinstance(message.event, Push) and self.conditions.merge_s:
            self._free_at_s = max(self._free_at_s, self.now_s) + self.conditions.merge_s
            self._at(self._free_at_s, self._carry, message.event, message)
        else:
            self._carry(message.event, message)

    def _carry(self, event: Any, message: Message | None) -> None:
        out = self.service.handle(Tick(self.now_s))
        out += self.service.handle(event, message.packed if message else None)
        for instruction in out:
            match instruction:
                case Reply(key, version, grant):
                    self._transmit(self._answered, self.service.answer(key, version, grant))
                case Dismiss(key):
                    self._transmit(self._answered, Answer(key, dismissed=True))
                case Restart(worker, life):
                    self._actors.pop(worker, None)
                    self._at(self.now_s + self.conditions.restart_s, self._begin, worker, life)

    def _save(self, state: Any) -> None:
        self._saved = state

    def _master_dies(self) -> None:
        self.service.load_state_dict(self._saved)  # type: ignore[arg-type]
