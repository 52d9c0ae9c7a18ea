"""Agents on a cluster: the same numbers as here with one machine, and the right sums with several that fail.

Messages are carried by the simulated transport of `headrace.cluster`; one slow test carries them by Ray.

Planted once, and each caught here: counters that are not pushed, a rate that falls with a machine's own updates instead
of all machines', parameters that are forgotten when an environment is made anew, and a V-trace rollout that is acted
after the newest parameters were taken over.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_worlds import Breaks, Match

import headrace as hr
from headrace.agents.goal import Goal
from headrace.agents.loop import Loop
from headrace.agents.machines import COUNTERS, AgentSteps, AgentWork, _Rows, options_of, pack, unpack
from headrace.agents.worker import Spec
from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.transport import Service, converse
from headrace.errors import OptionError, WorkerError


def work_of(agent: hr.ActorCritic, steps: int) -> AgentWork:
    spec = Spec(
        config=agent.config, goal=Goal(steps=steps), env=agent.env, env_options=agent.env_options,
        vectorization=agent.vectorization,
    )  # fmt: skip
    loop = Loop(agent.config, agent._driver, agent._learner)
    per_update = agent.config.n_steps * agent.config.n_envs
    return AgentWork(
        spec=spec, start=pack(loop, np.zeros(len(COUNTERS))), total_steps=-(-steps // per_update)
    )


def simulate(
    agent: hr.ActorCritic, steps: int, workers: int = 1, **conditions: Any
) -> tuple[Service, np.ndarray]:
    """Learn on simulated machines; the agent's own learner takes over the result."""
    work = work_of(agent, steps)
    service = Service(
        Master(MasterOptions(steps=work.total_steps, local_steps=4)), Holder(work.values().clone())
    )
    names = [f"worker-{rank}" for rank in range(workers)]

    def start(name: str, life: int) -> Any:
        return converse(name, life, work.local(names.index(name)), Compressor(None))

    Simulation(service, start, names, Conditions(**conditions), 0, max_s=1e6).run()
    loop = Loop(agent.config, agent._driver, agent._learner)
    return service, unpack(loop, service.holder.vector().numpy())


def test_one_machine_is_the_synchronous_run_bit_for_bit() -> None:
    options: dict[str, Any] = {
        "n_envs": 4, "seed": 3, "hidden": (16,), "normalize_observations": True, "normalize_rewards": True
    }  # fmt: skip
    alone = hr.ActorCritic("CartPole-v1", **options).learn(steps=4_000)
    machine = hr.ActorCritic("CartPole-v1", mode="hybrid", **options)
    _, counts = simulate(machine, 4_000)
    for name, array in alone.parameters().items():
        assert np.array_equal(array, machine.parameters()[name]), name
    assert np.array_equal(alone._learner.moment_list[0].sums, machine._learner.moment_list[0].sums)
    last = alone.metrics_[-1]
    assert counts.tolist()[:2] == [200, last["episodes"]] and counts[COUNTERS.index("restarts")] == 0


@pytest.mark.parametrize("correction", ["none", "vtrace"])
def test_machines_that_fail_learn_together_and_count_every_merged_update_once(correction: str) -> None:
    agent = hr.ActorCritic(
        Match, n_envs=4, mode="hybrid", lr=0.005, hidden=(16,), schedule="constant", correction=correction
    )
    service, counts = simulate(
        agent, 12_000, workers=3, loss=0.05, duplicate=0.1, spread=0.5, delay_s=(0.1, 2.0), retry_s=20.0,
        deaths=((60.0, "worker-1"),),
    )  # fmt: skip
    assert service.master.steps >= 600 and max(service.master.staleness) >= 1
    assert counts[COUNTERS.index("updates")] == service.master.steps
    # Every episode is ten steps; those under way at the end and at a death are not counted.
    assert 0 < counts[COUNTERS.index("lengths")] == 10 * counts[COUNTERS.index("episodes")]
    assert agent.evaluate(20).mean > 9.0


def test_with_vtrace_a_rollout_is_acted_before_the_newest_parameters_are_taken_over() -> None:
    agent = hr.ActorCritic(Match, n_envs=2, mode="hybrid", correction="vtrace")
    steps = work_of(agent, 1_000).local(0)
    vector = work_of(agent, 1_000).values()
    steps.advance(vector, 1)
    seen: list[np.ndarray] = []
    learner: Any = steps.loop.learner
    finish = learner.finish
    learner.finish = lambda: (finish(), seen.append(learner.theta.copy()))[0]
    moved = vector.clone()
    moved[:-5] += 0.5
    before = learner.theta.copy()
    steps.advance(moved, 2)
    assert np.array_equal(seen[0], before) and not np.array_equal(seen[1], before)


def breaking(tmp_path: Path, times: int, most: int) -> AgentSteps:
    allowance = tmp_path / "allowance"
    allowance.write_bytes(b"x" * times)
    agent = hr.ActorCritic(
        Breaks,
        env_options={"allowance": str(allowance), "how": "raise"},
        n_envs=2,
        mode="hybrid",
        max_restarts=most,
    )
    return work_of(agent, 10_000).local(0)


def test_an_environment_that_raises_is_made_anew_and_counted(tmp_path: Path) -> None:
    steps = breaking(tmp_path, 2, most=2)
    vector = steps.work.values()
    start = vector.clone()
    for _ in range(20):
        done = steps.advance(vector, 10)
        vector = done.vector
    assert vector[-1] == 2 == steps.restarts and vector[-len(COUNTERS)] == 200
    # Fresh parameters would be those of another seed; these have moved from where they were, and not jumped.
    assert 0.0 < float((vector - start)[: -len(COUNTERS)].abs().max()) < 0.5


def test_restarts_on_a_machine_are_bounded(tmp_path: Path) -> None:
    steps = breaking(tmp_path, 3, most=1)
    with pytest.raises(WorkerError, match="the simulator fell over"):
        for _ in range(200):
            steps.advance(steps.work.values(), 10)
    assert steps.restarts == 1


def test_the_rate_falls_with_all_machines_updates() -> None:
    agent = hr.ActorCritic(Match, n_envs=2, mode="hybrid")
    work = work_of(agent, 1_000)
    steps, vector = work.local(0), work.values().clone()
    vector[-len(COUNTERS)] = 50  # of 100, by others
    rates: list[float] = []
    update = steps.loop.update
    steps.loop.update = lambda lr: (rates.append(lr), update(lr))[1]  # type: ignore[assignment, misc]
    steps.advance(vector, 2)
    assert rates == pytest.approx([agent.config.lr * 0.5, agent.config.lr * 0.49])


def test_means_are_of_the_newest_hundred_episodes_or_a_few_more() -> None:
    told: list[dict[str, Any]] = []
    rows = _Rows(Goal(target_return=6.0), told.append, lambda: 0.0)
    for episodes, returns in ((60, 0.0), (120, 60.0), (160, 260.0), (220, 660.0)):
        ended = rows.row(10 * episodes, 1.0, np.array([0.0, episodes, returns, 10.0 * episodes, 0.0]))
    # Between 120 and 220 lie exactly a hundred episodes, of 6 each.
    assert [row["return"] for row in told] == [0.0, 0.5, 2.6, 6.0]
    assert told[-1]["episode_length"] == 10.0 and ended == "the mean return reached 6"


def test_what_cluster_may_be() -> None:
    agent = hr.ActorCritic(Match, mode="hybrid", max_staleness=3)
    spec = work_of(agent, 100).spec
    assert options_of("3", spec) == {"workers": 3, "local_steps": 4, "staleness": 3}
    assert options_of({"workers": 2, "local_steps": 9}, spec)["local_steps"] == 9
    assert options_of("auto", spec)["address"] == "auto"
    at_once = dataclasses.replace(spec, config=dataclasses.replace(spec.config, mode="asynchronous"))
    assert options_of(2, at_once)["local_steps"] == 1
    for wrong in ("somewhere", True, 2.5):
        with pytest.raises(OptionError, match="give a number of workers"):
            options_of(wrong, spec)
    with pytest.raises(OptionError, match="several"):
        hr.ActorCritic(Match, cluster=2, mode="synchronous")
    with pytest.raises(OptionError, match="each can make"):
        from gymnasium.vector import SyncVectorEnv

        hr.ActorCritic(SyncVectorEnv([Match] * 2), cluster=2)


@pytest.mark.slow
def test_an_agent_learns_on_ray() -> None:
    pytest.importorskip("ray")
    agent = hr.ActorCritic("CartPole-v1", n_envs=8, cluster=2, seed=0)
    agent.learn(steps=20_000)
    last = agent.metrics_[-1]
    assert agent.plan["mode"] == "hybrid" and agent.plan["local_steps"] == 4
    assert last["step"] >= 20_000 and last["pushes"] == 125 and last["staleness"] <= last["staleness_max"]
    # An untrained agent falls after some 20 steps.
    assert agent.evaluate(20).mean > 60.0 and agent.steps_ == last["step"]
    agent.close()
