"""The master's decisions: rules one by one, and invariants over arbitrary interleavings."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.machine import (
    Apply,
    Checkpoint,
    Dismiss,
    Event,
    Ignore,
    Instruction,
    Joined,
    Key,
    Left,
    Lost,
    Master,
    MasterOptions,
    Push,
    Reply,
    Restart,
    Tick,
    Wait,
)
from headrace.errors import OptionError


def joined(master: Master, *workers: str) -> None:
    for worker in workers:
        master.handle(Joined(Key(worker, 1)))


def only(instructions: list[Instruction], kind: type) -> list[Instruction]:
    return [i for i in instructions if isinstance(i, kind)]


def test_one_push_is_merged_and_answered_with_the_next_version() -> None:
    master = Master(MasterOptions(local_steps=4))
    assert master.handle(Joined(Key("a", 1))) == [Reply(Key("a", 1), 0, 4)]
    push = Key("a", 1, 1)
    assert master.handle(Push(push, 0, 4, 40)) == [Apply(((push, 1.0),), 1, 1.0), Reply(push, 1, 4)]


def test_a_repeated_push_is_answered_and_not_merged() -> None:
    master = Master(MasterOptions())
    joined(master, "a")
    push = Push(Key("a", 1, 1), 0)
    master.handle(push)
    again = master.handle(push)
    assert only(again, Apply) == [] and only(again, Ignore) and only(again, Reply)
    assert master.steps == 1


def test_m_of_n_waits_for_m_and_no_longer() -> None:
    master = Master(MasterOptions(accept=2, merge="mean"))
    joined(master, "a", "b", "c")
    assert master.handle(Push(Key("a", 1, 1), 0)) == [Wait(Key("a", 1, 1))]
    out = master.handle(Push(Key("c", 1, 1), 0))
    assert out[0] == Apply(((Key("a", 1, 1), 0.5), (Key("c", 1, 1), 0.5)), 1, 1 / 3)
    assert [i.key.worker for i in only(out, Reply)] == ["a", "c"]  # type: ignore[union-attr]


def test_a_group_is_not_waited_for_beyond_the_living() -> None:
    master = Master(MasterOptions(accept=3))
    joined(master, "a", "b", "c")
    master.handle(Push(Key("a", 1, 1), 0))
    master.handle(Left(Key("b", 1, 1)))
    out = master.handle(Lost("c", 1))
    assert only(out, Apply) and only(out, Restart) == [Restart("c", 2)]


def test_an_old_push_counts_less() -> None:
    master = Master(MasterOptions(staleness=1))
    joined(master, "a", "b")
    for sequence in range(1, 5):
        master.handle(Push(Key("a", 1, sequence), sequence - 1))
    apply = only(master.handle(Push(Key("b", 1, 1), 0)), Apply)[0]
    assert apply.parts == ((Key("b", 1, 1), 1 / 4),)  # type: ignore[union-attr]
    assert master.staleness == Counter({0: 4, 4: 1})


def test_waiting_holds_the_fast_until_the_slow_has_pushed() -> None:
    master = Master(MasterOptions(staleness=1, stale="wait"))
    joined(master, "fast", "slow")
    assert only(master.handle(Push(Key("fast", 1, 1), 0)), Apply)
    assert master.handle(Push(Key("fast", 1, 2), 1)) == [Wait(Key("fast", 1, 2))]
    out = master.handle(Push(Key("slow", 1, 1), 0))
    assert len(only(out, Apply)[0].parts) == 2  # type: ignore[union-attr]


def test_the_waiting_end_when_the_slow_is_lost() -> None:
    master = Master(MasterOptions(staleness=0, stale="wait"))
    joined(master, "fast", "slow")
    assert not only(master.handle(Push(Key("fast", 1, 1), 0)), Apply)
    assert only(master.handle(Lost("slow", 1)), Apply)


def test_a_late_copy_of_a_join_does_not_make_everyone_wait() -> None:
    master = Master(MasterOptions(staleness=0, stale="wait"))
    joined(master, "a", "b")
    master.handle(Push(Key("a", 1, 1), 0))
    master.handle(Joined(Key("a", 1)))
    assert only(master.handle(Push(Key("b", 1, 1), 0)), Apply)


def test_decay_shrinks_with_the_version() -> None:
    master = Master(MasterOptions(merge="decayed", decay=0.5, decay_after=1))
    joined(master, "a")
    weights = [
        only(master.handle(Push(Key("a", 1, n), n - 1)), Apply)[0].parts[0][1]  # type: ignore[union-attr]
        for n in range(1, 4)
    ]
    assert weights == [1.0, 2**-0.5, 3**-0.5]


def test_a_life_that_was_replaced_is_dismissed() -> None:
    master = Master(MasterOptions())
    joined(master, "a")
    assert master.handle(Lost("a", 1)) == [Restart("a", 2)]
    assert master.handle(Lost("a", 1)) == []
    late = Push(Key("a", 1, 1), 0)
    assert only(master.handle(late), Dismiss) and master.steps == 0
    master.handle(Joined(Key("a", 2)))
    assert only(master.handle(late), Dismiss) and master.steps == 0


def test_what_a_lost_worker_had_pushed_is_left_to_its_next_life() -> None:
    master = Master(MasterOptions(accept=2))
    joined(master, "a", "b", "c")
    held = Push(Key("a", 1, 1), 0, place="after")
    master.handle(held)
    assert [i.key for i in only(master.handle(Lost("a", 1)), Ignore)] == [held.key]  # type: ignore[union-attr]
    assert master.queue == [] and master.members["a"].place is None


def test_a_silent_worker_is_lost_and_one_that_waits_for_us_is_not() -> None:
    master = Master(MasterOptions(accept=2, silent_s=10))
    joined(master, "a", "b")
    master.handle(Push(Key("a", 1, 1), 0))
    out = master.handle(Tick(11.0))
    assert only(out, Restart) == [Restart("b", 2)] and only(out, Apply)


def test_checkpoints_come_at_the_interval() -> None:
    master = Master(MasterOptions(checkpoint_every=3))
    joined(master, "a")
    saved = [bool(only(master.handle(Push(Key("a", 1, n), n - 1)), Checkpoint)) for n in range(1, 8)]
    assert saved == [False, False, True, False, False, True, False]


def test_no_more_steps_are_granted_than_asked_for() -> None:
    master = Master(MasterOptions(local_steps=4, steps=10))
    joined(master, "a", "b", "c")
    assert [m.granted for m in master.members.values()] == [4, 4, 2]
    replies = only(master.handle(Push(Key("a", 1, 1), 0, 4)), Reply)
    assert replies[0].grant == 0  # type: ignore[union-attr]
    master.handle(Lost("b", 1))
    assert master.handle(Joined(Key("b", 2))) == [Reply(Key("b", 2), 1, 4)]


def test_a_master_that_comes_back_takes_up_its_workers() -> None:
    master = Master(MasterOptions(accept=2))
    joined(master, "a", "b")
    state = master.state_dict()
    master.handle(Push(Key("a", 1, 1), 0))
    back = Master(MasterOptions(accept=2))
    back.load_state_dict(state)
    assert only(back.handle(Push(Key("a", 1, 1), 0)), Apply), "a worker not heard of is not waited for"
    assert not only(back.handle(Push(Key("a", 1, 1), 0)), Apply)


def test_a_worker_that_died_with_the_master_is_restarted() -> None:
    master = Master(MasterOptions())
    joined(master, "a")
    back = Master(MasterOptions())
    back.load_state_dict(master.state_dict())
    assert back.handle(Lost("a", 1)) == [Restart("a", 2)]


@pytest.mark.parametrize(
    "wrong",
    [{"merge": "summ"}, {"stale": "drop"}, {"accept": 0}, {"staleness": -1}, {"decay": 2.0}],
)
def test_wrong_options_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        MasterOptions(**wrong)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- arbitrary interleavings

WORKERS = ("a", "b", "c")


class World:
    """Honest workers on a dishonest network: anything in flight may arrive late, twice, or never."""

    def __init__(self, options: MasterOptions) -> None:
        self.master = Master(options)
        self.lives = dict.fromkeys(WORKERS, 1)
        self.sequences = dict.fromkeys(WORKERS, 0)
        self.waiting: dict[str, Event | None] = dict.fromkeys(WORKERS)
        self.sent: list[Event] = []
        self.merged: Counter[Key] = Counter()
        self.replied: set[Key] = set()
        for worker in WORKERS:
            self._send(worker, Joined(Key(worker, 1)))

    def _send(self, worker: str, event: Event) -> None:
        self.waiting[worker] = event
        self.sent.append(event)

    def deliver(self, event: Event) -> None:
        before = self.master.version
        out = self.master.handle(event)
        for instruction in out:
            match instruction:
                case Apply(parts, version):
                    self.merged.update(key for key, _ in parts)
                    assert version == before + 1
                case Reply(key, version, grant):
                    self._reply(key, version, grant)
                case Restart(worker, life):
                    self.lives[worker], self.sequences[worker] = life, 0
                    self._send(worker, Joined(Key(worker, life)))

    def _reply(self, key: Key, version: int, grant: int) -> None:
        waiting = self.waiting[key.worker]
        if waiting is None or waiting.key != key:  # type: ignore[union-attr]
            return
        if isinstance(waiting, Push):
            assert key in self.merged, "answered before it was merged"
        self.replied.add(key)
        self.sequences[key.worker] += 1
        if grant:
            push = Push(Key(key.worker, key.life, self.sequences[key.worker]), version, grant)
            self._send(key.worker, push)
        elif isinstance(waiting, Left):
            self.waiting[key.worker] = None
        else:
            self._send(key.worker, Left(Key(key.worker, key.life, self.sequences[key.worker])))

    def settle(self) -> None:
        """From here on the network is honest: every worker repeats what was not answered."""
        for _ in range(40):
            for worker in WORKERS:
                waiting = self.waiting[worker]
                if waiting is not None:
                    self.deliver(waiting)


OPTIONS = st.builds(
    MasterOptions,
    accept=st.integers(1, 4),
    merge=st.sampled_from(["sum", "mean", "decayed"]),
    staleness=st.none() | st.integers(0, 3),
    stale=st.sampled_from(["scale", "wait"]),
    local_steps=st.integers(1, 3),
    steps=st.none() | st.integers(1, 30),
    checkpoint_every=st.integers(1, 5),
)


@settings(max_examples=150, deadline=None)
@given(options=OPTIONS, choices=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 999)), max_size=40))
def test_any_interleaving_keeps_the_invariants(
    options: MasterOptions, choices: list[tuple[int, int]]
) -> None:
    world = World(options)
    for death, choice in choices:
        if death == 9:
            worker = WORKERS[choice % 3]
            world.deliver(Lost(worker, world.lives[worker]))
        else:
            world.deliver(world.sent[choice % len(world.sent)])  # old messages too: late and repeated
    merged_before = sum(world.merged.values())
    world.settle()
    master = world.master
    assert max(world.merged.values(), default=0) <= 1, "a push was merged twice"
    assert sum(master.staleness.values()) == sum(world.merged.values())
    if options.stale == "wait" and options.staleness is not None:
        assert max(master.staleness, default=0) <= options.staleness
    if options.steps is not None:
        assert master.steps == options.steps, "every granted step is taken, and no more"
    else:
        assert sum(world.merged.values()) > merged_before, "nothing moves any more"
