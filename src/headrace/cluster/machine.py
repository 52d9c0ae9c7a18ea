"""What the master of a cluster decides: events in, instructions out; no clock, no network, no tensor.

Workers pull the parameters (version t), take up to B local steps and push the difference. The master merges
differences in arrival order, M at a time: v ← v + ρ_t ΣwΔ, t ← t + 1.

Invariants, whatever is delayed, repeated, lost or reordered:

- A push is named by (worker, life, sequence) and is merged at most once. A life is one start of a worker; a later
  life has a larger number, and nothing of an earlier life is merged after a later one has joined.
- A worker whose push is merged is answered exactly then; a repeated push is answered again and not merged again.
- A group is never waited for beyond the workers that are alive, so the loss of a worker cannot stop the others.
- With ``stale="wait"`` no merged push is older than ``staleness`` versions: merging waits while it would leave a
  worker that is still computing further behind. With ``"scale"`` an older push counts ``staleness / age``.
- With a limit on steps, no more steps are granted than the limit. (A master that comes back from a checkpoint has
  forgotten what it had granted since, so that what was under way then may come on top.)

What is merged but not yet in a checkpoint is lost with the master: at most ``checkpoint_every`` pushes and those of
one group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from headrace.errors import OptionError, unknown
from headrace.types import State

MERGES = ("sum", "mean", "decayed")
STALE = ("scale", "wait")


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """How the master merges."""

    accept: int = 1
    """M: merge when so many workers have pushed; 1 is fully asynchronous."""
    merge: str = "sum"
    """``"sum"`` adds the differences, ``"mean"`` their mean, ``"decayed"`` (1 + t/decay_after)^(−decay) times the
    sum."""
    decay: float = 0.6
    """The power of ``"decayed"``; above 0.5 and at most 1 for stochastic approximation."""
    decay_after: float = 100.0
    """Versions after which ``"decayed"`` begins to bite."""
    staleness: int | None = None
    """The oldest push, in versions, that counts in full; None for no bound."""
    stale: str = "scale"
    """What happens beyond the bound: the push is scaled down, or the others wait so that none gets there."""
    local_steps: int = 16
    """B: steps between two pushes."""
    steps: int | None = None
    """Steps of all workers together; None for no limit."""
    checkpoint_every: int = 100
    """Pushes between two checkpoints."""
    silent_s: float | None = None
    """A worker from which nothing was heard for so long counts as lost; None leaves that to the transport."""

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise unknown("merge", self.merge, MERGES)
        if self.stale not in STALE:
            raise unknown("stale", self.stale, STALE)
        for name in ("accept", "local_steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.staleness is not None and self.staleness < 0:
            raise OptionError(f"staleness={self.staleness}: 0 or more versions, or None for no bound")
        if not 0 <= self.decay <= 1 or self.decay_after <= 0:
            raise OptionError(
                f"decay={self.decay:g}, decay_after={self.decay_after:g}: a power from 0 to 1 and a positive "
                "number of versions are needed"
            )


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, order=True)
class Key:
    """One message of one life of a worker."""

    worker: str
    life: int
    sequence: int = 0


@dataclass(frozen=True)
class Joined:
    """A worker is there and wants parameters."""

    key: Key


@dataclass(frozen=True)
class Pull:
    """A worker wants newer parameters without having pushed."""

    key: Key


@dataclass(frozen=True)
class Push:
    """A difference has arrived and is held under its key."""

    key: Key
    based_on: int
    """The version from which the worker started."""
    steps: int = 1
    rows: int = 0
    loss: float = 0.0
    """Mean over the rows."""
    place: Any = None
    """Where the worker's shard goes on after this push."""
    compute_s: float = 0.0
    """Time that the steps took."""
    exchange_s: float = 0.0
    """Time that the push before this one took, from packing to the answer."""


@dataclass(frozen=True)
class Left:
    """A worker has finished its shard."""

    key: Key


@dataclass(frozen=True)
class Lost:
    """A life of a worker ended without a word."""

    worker: str
    life: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now_s: float


@dataclass(frozen=True)
class Stop:
    """Training is to end: nobody is granted another step."""


@dataclass(frozen=True)
class Replan:
    """B is another number from now on."""

    local_steps: int


Event: TypeAlias = Joined | Pull | Push | Left | Lost | Tick | Stop | Replan

# --------------------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Apply:
    """Add the held differences with these weights; the result is ``version``."""

    parts: tuple[tuple[Key, float], ...]
    version: int
    share: float
    """The weight of running statistics, which are averaged over workers and never summed."""


@dataclass(frozen=True)
class Reply:
    """Answer this message with the parameters of ``version``."""

    key: Key
    version: int
    grant: int
    """Steps the worker may take next; 0 ends its work."""


@dataclass(frozen=True)
class Ignore:
    """Drop what came under this key: it is merged already, or never will be."""

    key: Key
    why: str


@dataclass(frozen=True)
class Wait:
    """The push is held; its worker is answered when the group is merged."""

    key: Key


@dataclass(frozen=True)
class Dismiss:
    """This life has been replaced: tell it to end."""

    key: Key


@dataclass(frozen=True)
class Checkpoint:
    """Save parameters and the machine's state now."""

    version: int


@dataclass(frozen=True)
class Restart:
    """Start the worker anew, as this life."""

    worker: str
    life: int


Instruction: TypeAlias = Apply | Reply | Ignore | Wait | Dismiss | Checkpoint | Restart


# --------------------------------------------------------------------------- the machine


@dataclass
class Member:
    """What the master knows of one worker, over all its lives."""

    life: int
    alive: bool = True
    """Counted on. False as well for workers of a checkpoint that have not been heard since."""
    ended: bool = False
    """This life was lost or has finished; nothing of it is taken any more."""
    finished: bool = False
    sequence: int = 0
    """The newest merged push of this life."""
    based_on: int | None = None
    """The oldest version on which the worker may be computing; None while its push is held."""
    granted: int = 0
    heard_s: float = 0.0
    place: Any = None
    pushes: int = 0
    steps: int = 0
    rows: int = 0


@dataclass
class Master:
    """The machine; `handle` is all there is to it."""

    options: MasterOptions
    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    queue: list[Push] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    """Age in versions of every merged push; about the number of other workers when all are equally fast."""
    steps: int = 0
    unsaved: int = 0
    now_s: float = 0.0

    def handle(self, event: Event) -> list[Instruction]:
        """What to do now."""
        out: list[Instruction]
        match event:
            case Joined(key) | Pull(key):
                out = self._asked(key)
            case Push():
                out = self._pushed(event)
            case Left(key):
                out = self._left(key)
            case Lost(worker, life):
                out = self._lost(worker, life)
            case Tick(now_s):
                out = self._ticked(now_s)
            case Stop():
                self.options, out = replace(self.options, steps=0), []
            case Replan(local_steps):
                self.options, out = replace(self.options, local_steps=local_steps), []
        if self._ready():
            out = [*(i for i in out if not isinstance(i, Wait)), *self._merge()]
        return out

    @property
    def alive(self) -> int:
        return sum(member.alive for member in self.members.values())

    # ------------------------------------------------------------------ one event each

    def _asked(self, key: Key) -> list[Instruction]:
        """A worker joins, or wants newer parameters."""
        if self._is_past(key):
            return [Dismiss(key)]
        out = self._admit(key)
        if any(push.key.worker == key.worker for push in self.queue):
            # A late copy of an earlier message: its worker waits and computes nothing. A grant would make the
            # others wait for it while its push waits for the others.
            return [*out, Reply(key, self.version, self.members[key.worker].granted)]
        return [*out, self._grant(key)]

    def _pushed(self, push: Push) -> list[Instruction]:
        key = push.key
        if self._is_past(key):
            return [Ignore(key, "of a life that has ended"), Dismiss(key)]
        out = self._admit(key)
        member = self.members[key.worker]
        if key.sequence <= member.sequence:
            return [*out, Ignore(key, "merged already"), Reply(key, self.version, member.granted)]
        if any(held.key == key for held in self.queue):
            return [*out, Wait(key)]
        self.queue.append(push)
        member.based_on = None
        return [*out, Wait(key)]

    def _left(self, key: Key) -> list[Instruction]:
        member = self.members.get(key.worker)
        if member is not None and member.life == key.life and member.finished:
            return [Reply(key, self.version, 0)]
        if self._is_past(key):
            return [Dismiss(key)]
        out = self._admit(key)
        member = self.members[key.worker]
        member.alive, member.ended, member.finished = False, True, True
        member.based_on, member.granted = None, 0
        return [*out, Reply(key, self.version, 0)]

    def _lost(self, worker: str, life: int) -> list[Instruction]:
        member = self.members.get(worker)
        if member is None:
            return [Restart(worker, life + 1)]
        if life != member.life or member.ended:
            return []
        member.alive, member.ended, member.based_on, member.granted = False, True, None, 0
        return [*self._drop_held(worker), Restart(worker, life + 1)]

    def _ticked(self, now_s: float) -> list[Instruction]:
        self.now_s = now_s
        limit = self.options.silent_s
        if limit is None:
            return []
        # A worker whose push is held is waiting for us: its silence is our doing.
        waiting = {push.key.worker for push in self.queue}
        silent = [
            (name, member.life)
            for name, member in self.members.items()
            if member.alive and name not in waiting and now_s - member.heard_s > limit
        ]
        return [instruction for name, life in silent for instruction in self._lost(name, life)]

    # ------------------------------------------------------------------ lives

    def _is_past(self, key: Key) -> bool:
        member = self.members.get(key.worker)
        return member is not None and (key.life < member.life or (key.life == member.life and member.ended))

    def _admit(self, key: Key) -> list[Instruction]:
        """The worker's present life, which may be new to us: it joined, or we have forgotten it."""
        member = self.members.get(key.worker)
        if member is not None and member.life == key.life:
            member.alive, member.heard_s = True, self.now_s
            return []
        dropped = self._drop_held(key.worker)
        fresh = Member(life=key.life, heard_s=self.now_s)
        if member is not None:
            fresh = replace(
                member, life=key.life, alive=True, ended=False, finished=False, sequence=0, based_on=None,
                granted=0, heard_s=self.now_s,
            )  # fmt: skip
        self.members[key.worker] = fresh
        return dropped

    def _drop_held(self, worker: str) -> list[Instruction]:
        """Forget pushes that were not merged: the next life repeats their rows."""
        held = [push.key for push in self.queue if push.key.worker == worker]
        self.queue = [push for push in self.queue if push.key.worker != worker]
        return [Ignore(key, "its worker was lost before the group was complete") for key in held]

    def _grant(self, key: Key) -> Reply:
        """Answer with the present version and as many steps as the limit leaves."""
        member = self.members[key.worker]
        if member.based_on is None:
            member.based_on = self.version
            member.granted = self.options.local_steps
            if self.options.steps is not None:
                promised = sum(m.granted for m in self.members.values() if m is not member and m.alive)
                member.granted = max(0, min(member.granted, self.options.steps - self.steps - promised))
        return Reply(key, self.version, member.granted)

    # ------------------------------------------------------------------ merging

    def _ready(self) -> bool:
        if not self.queue or len(self.queue) < min(self.options.accept, self.alive):
            return False
        if self.options.staleness is None or self.options.stale == "scale":
            return True
        computing = [
            m.based_on for m in self.members.values() if m.alive and m.based_on is not None and m.granted
        ]
        return all(self.version + 1 - based_on <= self.options.staleness for based_on in computing)

    def _merge(self) -> list[Instruction]:
        """Merge everything that is held: what stayed behind would only grow older."""
        group, self.queue = self.queue, []
        rate = self._rate(len(group))
        parts = []
        for push in group:
            age = max(0, self.version - push.based_on)  # negative after a master came back from a checkpoint
            self.staleness[age] += 1
            parts.append((push.key, rate * self._discount(age)))
            self._count(push)
        self.version += 1
        out: list[Instruction] = [Apply(tuple(parts), self.version, 1 / max(1, self.alive))]
        out.extend(self._grant(push.key) for push in group)
        self.unsaved += len(group)
        if self.unsaved >= self.options.checkpoint_every:
            self.unsaved = 0
            out.append(Checkpoint(self.version))
        return out

    def _rate(self, pushes: int) -> float:
        """ρ_t."""
        if self.options.merge == "mean":
            return 1 / pushes
        if self.options.merge == "decayed":
            return float((1 + self.version / self.options.decay_after) ** -self.options.decay)
        return 1.0

    def _discount(self, age: int) -> float:
        bound = self.options.staleness
        return 1.0 if bound is None or age <= bound else bound / age

    def _count(self, push: Push) -> None:
        member = self.members[push.key.worker]
        member.sequence = push.key.sequence
        member.place = push.place
        member.granted = 0
        member.pushes += 1
        member.steps += push.steps
        member.rows += push.rows
        self.steps += push.steps

    # ------------------------------------------------------------------ state

    def state_dict(self) -> State:
        """Everything but what is held: senders repeat what was not answered."""
        return {
            "version": self.version,
            "steps": self.steps,
            "staleness": {str(age): count for age, count in self.staleness.items()},
            "members": {name: asdict(member) for name, member in self.members.items()},
        }

    def load_state_dict(self, state: State) -> None:
        self.version, self.steps = int(state["version"]), int(state["steps"])
        self.staleness = Counter({int(age): int(count) for age, count in state["staleness"].items()})
        self.members = {
            name: Member(**{**values, "alive": False, "based_on": None, "granted": 0, "heard_s": 0.0})
            for name, values in state["members"].items()
        }
        self.queue, self.unsaved = [], 0
