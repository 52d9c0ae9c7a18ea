"""Workers: exactly the synchronous run when there is one, and a run that survives what happens to them.

Planted once, and each caught here: a difference pushed in float32, a base that is not renewed after an exchange, a
worker that starts from its own first parameters, and a failed worker that is not counted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_worlds import Breaks, Match, Waits, hold_the_lock
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.agents.board import Board, Slot
from headrace.agents.config import Config
from headrace.agents.exchange import staleness_scale
from headrace.agents.moments import round_to_32_bits
from headrace.agents.supervisor import judge
from headrace.errors import OptionError, WorkerError

SLOW = pytest.mark.slow  # each starts processes that import torch; the quick ones cover the same paths


def test_one_hybrid_worker_is_the_synchronous_run_bit_for_bit() -> None:
    options: dict[str, Any] = {
        "n_envs": 4, "seed": 3, "hidden": (16,), "normalize_observations": True, "normalize_rewards": True
    }  # fmt: skip
    alone = hr.ActorCritic("CartPole-v1", **options).learn(steps=4_000)
    worker = hr.ActorCritic("CartPole-v1", mode="hybrid", workers=1, **options).learn(steps=4_000)
    for name, array in alone.parameters().items():
        assert np.array_equal(array, worker.parameters()[name]), name
    for mine, its in zip(alone._learner.moment_list, worker._learner.moment_list, strict=True):
        assert np.array_equal(mine.sums, its.sums)
    assert worker.metrics_[-1]["staleness"] == 0.0 and worker.metrics_[-1]["pushes"] == 200


def test_a_killed_worker_is_replaced_and_the_run_reaches_its_target(tmp_path: Path) -> None:
    """Two workers; one is killed from outside in mid-run. Guessing has mean 5, the target is 9.

    The environments wait after 50 steps until the death was noticed: otherwise a run on a machine that is busy with
    other work may reach its target before the watching process looks at it for the first time.
    """
    import multiprocessing

    gate, killed = tmp_path / "gate", []

    def interfere(row: dict[str, Any]) -> None:
        # Two workers with four environments each: 50 steps and 5 resets.
        if not killed and row["step"] == 2 * 4 * 55:
            (victim,) = (p for p in multiprocessing.active_children() if p.name == "agent-worker-1")
            assert victim.pid is not None
            os.kill(victim.pid, 9)
            killed.append(victim.pid)
        if row["restarts"] == 1:
            gate.touch()

    agent = hr.ActorCritic(
        Waits, env_options={"gate": str(gate), "before": 50}, n_envs=4, workers=2, lr=0.005, hidden=(16,),
        schedule="constant",
    )  # fmt: skip
    agent.learn(steps=20_000_000, target_return=9.0, callback=interfere)
    assert killed and agent.stopped_ is not None and agent.metrics_[-1]["restarts"] == 1
    assert float(agent.stopped_.removeprefix("the mean return reached ")) >= 9.0


@pytest.mark.parametrize("how", ["hang", pytest.param("raise", marks=SLOW), pytest.param("die", marks=SLOW)])
def test_a_failing_environment_is_restarted_and_counted(tmp_path: Path, how: str) -> None:
    allowance = tmp_path / "allowance"
    allowance.write_bytes(b"x")
    agent = hr.ActorCritic(
        Breaks,
        env_options={"allowance": str(allowance), "how": how},
        n_envs=2,
        workers=1,
        mode="hybrid",
        hang_s=5.0,
    )
    agent.learn(steps=3_000)
    assert agent.metrics_[-1]["restarts"] == 1
    assert agent.metrics_[-1]["step"] >= 3_000


def test_restarts_are_bounded_and_the_last_error_is_told(tmp_path: Path) -> None:
    allowance = tmp_path / "allowance"
    allowance.write_bytes(b"x" * 100)
    agent = hr.ActorCritic(
        Breaks, env_options={"allowance": str(allowance), "how": "raise"}, n_envs=2, workers=1, mode="hybrid",
        max_restarts=1,
    )  # fmt: skip
    with pytest.raises(WorkerError, match=r"(?s)worker 0.*1 restarts.*the simulator fell over"):
        agent.learn(steps=10_000)
    assert allowance.stat().st_size == 98


def test_asynchronous_workers_learn_and_log_their_staleness() -> None:
    agent = hr.ActorCritic(
        Match, n_envs=4, workers=2, mode="asynchronous", lr=0.005, hidden=(16,), correction="vtrace"
    )
    agent.learn(steps=12_000)
    last = agent.metrics_[-1]
    assert agent.evaluate(20).mean > 9.0
    assert (
        last["pushes"] == last["step"] / 5
    )  # one environment each, five steps an update, every update pushed
    assert 0.0 <= last["staleness"] <= last["staleness_max"]


def test_what_cannot_be_sent_to_workers_is_refused() -> None:
    from gymnasium.vector import SyncVectorEnv

    with pytest.raises(OptionError, match="give an id or a function"):
        hr.ActorCritic(SyncVectorEnv([Match] * 2), workers=2)
    with pytest.raises(OptionError, match="one learner"):
        hr.ActorCritic(Match, workers=2, mode="synchronous")
    local = hr.ActorCritic(lambda: Match(), workers=2)
    with pytest.raises(OptionError, match="top level of a module"):
        local.learn(steps=100)
    with pytest.raises(OptionError, match="open_store"):
        hr.ActorCritic(Match, workers=2, cluster="somewhere").learn(steps=100)


BASE: dict[str, Any] = {
    "exit_code": None, "beat_s": 105.0, "now_s": 110.0, "started_s": 100.0, "hang_s": 10.0, "restarts_left": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "keep"),
        ({"exit_code": 0}, "done"),
        ({"exit_code": -9}, "restart"),
        ({"exit_code": 3, "restarts_left": 0}, "give up"),
        ({"now_s": 116.0}, "kill"),
        ({"now_s": 116.0, "restarts_left": 0}, "give up"),
        # Before its first step a worker may take long: it is importing.
        ({"beat_s": 0.0, "now_s": 150.0}, "keep"),
        ({"beat_s": 0.0, "now_s": 250.0}, "kill"),
    ],
)
def test_what_to_do_about_a_worker(changes: dict[str, Any], verdict: str) -> None:
    assert judge(**{**BASE, **changes}) == verdict


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((1e-6, 1.0, 1e6)))
def test_a_difference_takes_the_store_exactly_to_the_worker_s_parameters(seed: int, scale: float) -> None:
    """v + (u - v) is u after rounding, also where u and v differ in sign and size."""
    rng = np.random.default_rng(seed)
    v, u = (
        (rng.choice([-1, 1], 50) * scale * 10 ** rng.uniform(-2.5, 2.5, 50)).astype(np.float32) for _ in "vu"
    )
    stored = v.astype(np.float64) + (u.astype(np.float64) - v.astype(np.float64))
    assert np.array_equal(stored.astype(np.float32), u)
    a, b = (rng.choice([-1, 1], 50) * scale * 10 ** rng.uniform(-2.5, 2.5, 50) for _ in "ab")
    round_to_32_bits(a)
    round_to_32_bits(b)
    moved = a + (b - a)
    round_to_32_bits(moved)
    assert np.array_equal(moved, b)


def test_the_store_adds_and_its_lock_dies_with_its_holder() -> None:
    import multiprocessing

    from headrace.agents.store import SharedStore

    context = multiprocessing.get_context("spawn")
    store = SharedStore(context, {"theta": np.ones(3, np.float32), "pushes": np.zeros(1)})
    holder = context.Process(target=hold_the_lock, args=(store,))
    holder.start()
    holder.join()
    assert holder.exitcode == 7
    store.push(
        {"theta": torch.full((3,), 0.5, dtype=torch.float64), "pushes": torch.ones(1, dtype=torch.float64)}
    )
    pulled = store.pull()
    assert pulled["theta"].tolist() == [1.5] * 3 and pulled["pushes"].tolist() == [1.0]
    store.close()
    assert not Path(store._path).exists()


def test_staleness_scales_only_what_is_too_stale() -> None:
    assert staleness_scale(100, 0) == 1.0
    assert staleness_scale(4, 4) == 1.0
    assert staleness_scale(8, 4) == 0.5


def test_the_board_keeps_the_newest_returns_of_each_worker() -> None:
    import multiprocessing

    board = Board(multiprocessing.get_context("spawn"), 2)
    slots = [Slot(board, worker) for worker in range(2)]
    for i in range(150):
        slots[0].episode(float(i), i)
    slots[1].episode(-1.0, 7)
    slots[1].count(steps=40, updates=1)
    recent = board.recent()
    assert sorted(recent[:, 0]) == [-1.0, *map(float, range(50, 150))]
    assert board.total("steps") == 40 and board.total("episodes") == 151
    board.write_error(1, "x" * 10_000)
    assert board.error(1) == "x" * 4095 and board.error(0) == ""


def test_modes_follow_from_workers() -> None:
    assert Config().mode == "synchronous"
    agent = hr.ActorCritic(Match, workers=2)
    assert agent.config.mode == "hybrid" and agent.plan["mode"] == "hybrid"


class PlainStore:
    """The two calls over a dict of float64 arrays: any store that adds will do."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = {name: np.asarray(array, np.float64).copy() for name, array in values.items()}

    def pull(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array.copy()) for name, array in self.values.items()}

    def push(self, difference: Any) -> None:
        for name, change in difference.items():
            self.values[name] += change.numpy()


def test_a_worker_takes_over_what_it_finds_and_adds_what_it_learned() -> None:
    from headrace.agents.exchange import Exchange, shared_values
    from headrace.agents.goal import Goal
    from headrace.agents.worker import Spec, make_loop

    config = Config(n_envs=2, hidden=(4,), normalize_observations=True)
    spec = Spec(config=config, goal=Goal(steps=1), env=Match, env_options={}, vectorization="auto")
    loops = [make_loop(spec, worker, 0) for worker in range(2)]
    store = PlainStore(shared_values(loops[0]))
    store.values["theta"] += 0.25
    found = store.values["theta"].copy()
    exchanges = [Exchange(loop, store, 1.0, 0) for loop in loops]
    for loop in loops:
        np.testing.assert_array_equal(loop.learner.theta, found.astype(np.float32))
        loop.collect()
        loop.update(0.1)
    moved = [loop.learner.theta - found for loop in loops]
    rows = [loop.learner.moment_list[0].sums[0] for loop in loops]
    assert [exchange.exchange() for exchange in exchanges] == [0, 1]
    np.testing.assert_allclose(store.values["theta"], found + sum(moved), atol=1e-6)
    np.testing.assert_allclose(loops[1].learner.theta, store.values["theta"], atol=1e-6)
    assert store.values["pushes"][0] == 2 and store.values["sums.0"][0] == sum(rows)
    assert [exchange.exchange() for exchange in exchanges] == [1, 1]
    np.testing.assert_allclose(store.values["theta"], found + sum(moved), atol=1e-6)
