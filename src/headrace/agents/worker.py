"""One worker of the asynchronous and hybrid modes: the synchronous loop, with an exchange after every few updates.

Runs in a process of its own with one thread, or in any process that has a store (`work`). It ends when the
steps of all workers together reach the goal, or when it is told to; what it learned since its last exchange
is pushed first.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from headrace.agents import environments
from headrace.agents.board import Board, Slot
from headrace.agents.build import derive_seeds, make_learner
from headrace.agents.config import Config, scheduled
from headrace.agents.driver import Driver
from headrace.agents.exchange import Exchange
from headrace.agents.goal import Goal
from headrace.agents.loop import Loop
from headrace.agents.spaces import Actions, Observations
from headrace.types import ParameterStore

_REPORT_EVERY = 20  # updates between looks at the losses, which cost about an update
FAILED = 3
"""Exit status of a worker that wrote its error on the board."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a worker needs to know; everything in it can be sent to a process."""

    config: Config
    goal: Goal
    env: Any
    env_options: dict[str, Any]
    vectorization: str
    optimizer: Any = None
    module: Any = None


def make_loop(spec: Spec, worker: int, incarnation: int) -> Loop:
    """The worker's environments and learner, seeded and reset."""
    made = environments.make(
        spec.env, spec.config.n_envs, vectorization=spec.vectorization, options=spec.env_options
    )
    observations = Observations(made.env.single_observation_space)
    actions = Actions(made.env.single_action_space, spec.config.squash)
    driver = Driver(made.env, observations)
    learner = make_learner(spec.config, observations, actions, driver.n, spec.optimizer, spec.module)
    env_seed, learner_seed = derive_seeds(spec.config.seed, worker, incarnation)
    learner.start(learner_seed)
    driver.reset(env_seed)
    return Loop(spec.config, driver, learner)


def work(spec: Spec, store: ParameterStore, board: Board, worker: int, incarnation: int) -> None:
    """Learn until the goal is reached or the board says stop."""
    config, goal = spec.config, spec.goal
    loop = make_loop(spec, worker, incarnation)
    slot, episodes = Slot(board, worker), _EpisodeTap(loop)
    exchange = Exchange(loop, store, config.push_scale, config.max_staleness)
    started, started_cpu, pending = time.monotonic(), time.process_time(), 0
    late = config.correction == "vtrace" and config.workers > 1
    while not board.stopping:
        seconds = time.monotonic() - started
        steps = board.total("steps")
        if goal.steps is not None and steps >= goal.steps:
            break
        loop.collect()
        if late and not pending:
            exchange.refresh_before_learning()
        lr = scheduled(config.schedule, config.lr, goal.progress(steps, seconds))
        report = loop.updates % _REPORT_EVERY == 0
        losses = loop.update(lr, report=report)
        pending += 1
        if pending == config.push_every:
            _note_exchange(slot, exchange.exchange())
            pending = 0
        episodes.tell(slot)
        slot.count(steps=loop.steps_per_update, updates=1)
        slot.measure(beat_s=time.monotonic(), lr=lr, **losses)
        if report:
            slot.measure(cpu_s=time.process_time() - started_cpu)
    if pending:
        _note_exchange(slot, exchange.exchange())
    slot.measure(cpu_s=time.process_time() - started_cpu)
    loop.driver.close()


def _note_exchange(slot: Slot, staleness: int) -> None:
    slot.count(pushes=1, staleness_sum=staleness)
    slot.raise_to("staleness_max", staleness)


class _EpisodeTap:
    """Carries finished episodes from the driver to the board."""

    def __init__(self, loop: Loop) -> None:
        self.episodes, self.told, self.best = loop.driver.episodes, 0, float("-inf")

    def tell(self, slot: Slot) -> None:
        new = self.episodes.finished - self.told
        if not new:
            return
        self.told = self.episodes.finished
        for total, length in zip(self.episodes.returns[-new:], self.episodes.lengths[-new:], strict=True):
            slot.episode(total, length)
        self.best = max(self.best, self.episodes.best)
        slot.measure(best=self.best)


def main(spec: Spec, store: ParameterStore, board: Board, worker: int, incarnation: int) -> None:
    """A worker process's whole life."""
    import torch

    torch.set_num_threads(1)
    try:
        work(spec, store, board, worker, incarnation)
    except KeyboardInterrupt:
        # Ctrl-C reaches the whole process group; the watching process says what there is to say.
        os._exit(FAILED)
    except BaseException:
        board.write_error(worker, traceback.format_exc(limit=-3))
        sys.exit(FAILED)
