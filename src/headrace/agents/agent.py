"""`ActorCritic`: advantage actor-critic on any Gymnasium environment, from one learner to many workers.

Everything is decided when the agent is made (``config``, with a reason for each "auto" in ``plan``) and nothing runs
until `learn`. The agent owns its environment; `close` ends it. ``metrics_`` holds the rows of the last `learn`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.agents import environments, files, synchronous
from headrace.agents.build import derive_seeds, is_handwritten, is_kept, make_learner
from headrace.agents.config import Config
from headrace.agents.driver import Driver
from headrace.agents.evaluate import Evaluation, play_episodes
from headrace.agents.goal import Goal
from headrace.agents.loop import Loop
from headrace.agents.progress import Progress
from headrace.agents.resolve import resolve
from headrace.agents.spaces import Actions, Observations
from headrace.engine.records import Records, open_records
from headrace.engine.residence import resolve_device
from headrace.errors import OptionError
from headrace.types import Plan

Array = NDArray[Any]


class ActorCritic:
    """An agent that learns by advantage actor-critic.

    ``env`` is an id such as ``"CartPole-v1"``, a function that makes an environment, or a vector environment.
    ``policy`` is "auto", "mlp", "cnn", "lstm" or a torch module. ``workers=2`` and more learn in their own processes.
    ``cluster`` is a number of Ray workers on this machine (3), "auto", an address, or a mapping as for `headrace.fit`;
    or an object whose ``open_store(names_to_arrays)`` gives a `types.ParameterStore` that every worker can reach.
    All other options are the fields of `config.Config`.
    """

    def __init__(
        self,
        env: Any,
        *,
        n_envs: int | str = "auto",
        n_steps: int = 5,
        gamma: float = 0.99,
        gae_lambda: float | str = "auto",
        value_coef: float = 0.5,
        entropy_coef: float | str = "auto",
        optimizer: str | Callable[..., torch.optim.Optimizer] = "rmsprop",
        lr: float | str = "auto",
        schedule: str = "linear",
        policy: str | torch.nn.Module = "auto",
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
        workers: int | str | dict[str, Any] = "auto",
        cluster: Any = None,
        device: str = "auto",
        seed: int = 0,
        env_options: dict[str, Any] | None = None,
        vectorization: str = "auto",
        **more: Any,
    ) -> None:
        self.module = policy if isinstance(policy, torch.nn.Module) else None
        self.optimizer = optimizer if callable(optimizer) else None
        asked = {
            "n_envs": n_envs, "n_steps": n_steps, "gamma": gamma, "gae_lambda": gae_lambda, "value_coef": value_coef,
            "entropy_coef": entropy_coef, "optimizer": "own" if self.optimizer else optimizer, "lr": lr,
            "schedule": schedule, "policy": "module" if self.module is not None else policy,
            "normalize_observations": normalize_observations, "normalize_rewards": normalize_rewards,
            "workers": workers, "device": device, "seed": seed, **more,
        }  # fmt: skip
        self.env, self.cluster, self.vectorization = env, cluster, vectorization
        self.env_options = dict(env_options or {})
        self._made, self.config, self.plan = self._decide(asked)
        self.observations = Observations(self._made.env.single_observation_space)
        self.actions = Actions(self._made.env.single_action_space, self.config.squash)
        self._driver = Driver(self._made.env, self.observations)
        self._learner = make_learner(
            self.config, self.observations, self.actions, self._driver.n, self.optimizer, self.module
        )
        self._learner.start(derive_seeds(self.config.seed, 0, 0)[1])
        self._loop: Loop | None = None
        self._apart: Any = None
        self.metrics_: list[dict[str, Any]] = []
        self.stopped_: str | None = None
        """Why the last `learn` ended."""
        self.steps_ = 0
        """Environment steps learned from, all calls of `learn` together."""
        self._note_oddities()

    def _decide(self, asked: dict[str, Any]) -> tuple[environments.Made, Config, Plan]:
        resolve_device(asked["device"])  # refuses what is none before an environment is made
        travels = environments.can_travel(self.env)
        made = self._make(_count(asked["n_envs"]))
        fixed = None if travels else int(made.env.num_envs)
        observations = Observations(made.env.single_observation_space)
        try:
            config, plan = resolve(
                asked,
                observations,
                fixed_n=fixed,
                cuda=torch.cuda.is_available(),
                cluster=self.cluster is not None,
            )
        except BaseException:
            made.env.close()
            raise
        if travels and made.env.num_envs != config.n_envs:
            made.env.close()
            made = self._make(config.n_envs)
        if (config.workers > 1 or self.cluster is not None) and not travels:
            several = f"workers={config.workers}" if self.cluster is None else f"cluster={self.cluster!r}"
            raise OptionError(
                f"{several} need an environment that each can make: give an id or a function instead "
                f"of a {type(self.env).__name__}"
            )
        learner, reason = "torch", "the network, the device or the precision asks for it"
        if self.module is None and is_handwritten(config):
            learner, reason = "hand-written", "a small network on the CPU"
        elif self.module is None and is_kept(config, observations):
            learner, reason = "images", "one image on the CPU: what acting computed is kept for learning"
        return made, config, plan.with_("learner", learner, reason)

    def _make(self, n_envs: int) -> environments.Made:
        return environments.make(self.env, n_envs, vectorization=self.vectorization, options=self.env_options)

    def _note_oddities(self) -> None:
        if not self._driver.mode_is_declared:
            self.plan = self.plan.with_(
                "autoreset", self._driver.mode, "the environment does not say; this is Gymnasium's default"
            )
        else:
            self.plan = self.plan.with_("autoreset", self._driver.mode, "what the environment declares")
        for note in self._made.notes:
            warnings.warn(note, stacklevel=3)

    @property
    def name(self) -> str:
        """The environment's name."""
        return self._made.name

    def learn(
        self,
        steps: int | None = None,
        *,
        seconds: float | None = None,
        target_return: float | None = None,
        out: str | Path | None = None,
        overwrite: bool = False,
        progress: bool = False,
        callback: Callable[[dict[str, Any]], None] | None = None,
    ) -> ActorCritic:
        """Learn until ``steps``, ``seconds`` or ``target_return`` is reached, whichever comes first.

        With ``out`` the run's metrics, plan and agent are written into that folder. Calling it again goes on from
        where the last call ended, with a new schedule.
        """
        goal = Goal(steps=steps, seconds=seconds, target_return=target_return)
        about = self._about()
        records = open_records(out, self.plan, {"env": self.name, **about["config"]}, overwrite=overwrite)
        try:
            with Progress(goal, self.name, progress) as shown:
                self.stopped_ = self._run(goal, records, shown, callback)
        finally:
            self.metrics_ = records.rows
            if out is not None:
                files.write_agent(out, self._learner, self._about())
            records.close()
        return self

    def _run(self, goal: Goal, records: Records, shown: Progress, callback: Any) -> str:
        def report(row: dict[str, Any]) -> None:
            self._note_way(records)
            records.metrics(row)
            shown.update(row)
            if callback is not None:
                callback(row)

        if self.config.mode == "synchronous":
            stopped = synchronous.run(self.config, self._ready_loop(), goal, report)
        else:
            from headrace.agents import supervisor

            stopped = supervisor.run(self, goal, report, records)
        if records.rows:
            self.steps_ += int(records.rows[-1]["step"])
            shown.update(records.rows[-1], last=True)
        return stopped

    def _note_way(self, records: Records) -> None:
        """Put into the plan how updates run, once that is known."""
        way = getattr(self._learner, "way", None)
        if way is not None and "update" not in self.plan:
            self.plan = self.plan.with_("update", *way)
            records.write_plan(self.plan)

    def _ready_loop(self) -> Loop:
        if self._loop is None:
            if self.config.overlap:
                from headrace.agents.overlap import OverlappedLoop

                self._loop = OverlappedLoop(self.config, self._driver, self._learner, self._twin())
            else:
                self._loop = Loop(self.config, self._driver, self._learner)
            self._driver.reset(derive_seeds(self.config.seed, 0, 0)[0])
        return self._loop

    def _twin(self) -> Any:
        twin = make_learner(
            self.config, self.observations, self.actions, self._driver.n, self.optimizer, self.module
        )
        twin.start(derive_seeds(self.config.seed, 0, 1)[1])
        return twin

    def predict(self, obs: Any, deterministic: bool = True) -> Array:
        """The action for one observation, or the actions for a batch of them.

        A recurrent policy starts from an empty memory; use `player` to keep one over an episode.
        """
        batch, single = self._as_batch(obs)
        count = len(
            batch
            if not isinstance(batch, dict)
            else self.observations.pick(batch, self.observations.leaves[0])
        )
        actions: Array = self.player(count).act(batch, np.ones(count, bool), deterministic)
        if not single:
            return actions
        first: Array = actions[0]
        return first

    def _as_batch(self, obs: Any) -> tuple[Any, bool]:
        leaf = self.observations.leaves[0]
        shape = np.shape(self.observations.pick(obs, leaf))
        if shape == leaf.shape:
            return self.observations.stack([obs]), True
        if shape[1:] == leaf.shape:
            return obs, False
        raise OptionError(
            f"predict() takes an observation of shape {leaf.shape} or a batch of them; found shape {shape}"
        )

    def player(self, count: int = 1, seed: int | None = None) -> Any:
        """Acts step by step in ``count`` environments: ``player.act(obs, fresh, deterministic)``."""
        return self._learner.player(count, self.config.seed if seed is None else seed)

    def evaluate(
        self, episodes: int = 20, *, deterministic: bool = True, seed: int | None = None
    ) -> Evaluation:
        """Play whole episodes with the present parameters, in environments of their own where they can be made.

        A vector environment that was passed in is used itself: its running episodes are given up.
        """
        seed = self.config.seed + 1_000_003 if seed is None else seed
        if environments.can_travel(self.env):
            if self._apart is None:
                self._apart = self._make(self.config.n_envs).env
            env = self._apart
        else:
            env, self._loop = self._made.env, None
        return play_episodes(env, self._learner, self.observations, episodes, deterministic, seed)

    def _about(self) -> dict[str, Any]:
        return {
            "env": self.env if isinstance(self.env, str) else None,
            "name": self.name,
            "env_options": self.env_options,
            "vectorization": self.vectorization,
            "steps": self.steps_,
            "config": self.config.to_dict(),
            "observations": self.observations.describe(),
            "actions": self.actions.describe(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` and ``agent.json`` into ``folder``."""
        return files.write_agent(folder, self._learner, self._about())

    @classmethod
    def load(cls, folder: str | Path, env: Any = None, **changes: Any) -> ActorCritic:
        """The agent that was saved in ``folder``, ready to act and to learn on.

        ``env`` is needed when it was not an id. ``changes`` replace options, such as ``policy=`` for one's own module.
        """
        about = files.read_about(folder)
        env = about["env"] if env is None else env
        if env is None:
            raise OptionError(
                f"the agent in {folder} was trained on {about['name']}, which has no id; pass env="
            )
        if about["config"]["policy"] == "module" and not isinstance(changes.get("policy"), torch.nn.Module):
            raise OptionError(f"the agent in {folder} has a policy module of its own; pass policy=")
        options = {
            **about["config"], "env_options": about["env_options"], "vectorization": about["vectorization"], **changes
        }  # fmt: skip
        if options["optimizer"] == "own":
            options["optimizer"] = "rmsprop"
        if options["device"].startswith("cuda") and not torch.cuda.is_available():
            options.update(device="cpu", compiled="auto")
        agent = cls(env, **options)
        try:
            files.check_spaces(about, agent.observations.describe(), agent.actions.describe(), agent.name)
            files.read_parameters(folder, agent._learner)
        except BaseException:
            agent.close()
            raise
        agent.steps_ = int(about["steps"])
        return agent

    def parameters(self) -> dict[str, Array]:
        """Copies of the parameters by name."""
        return self._learner.to_named()

    def close(self) -> None:
        """End the environments. The agent can still be saved and asked to `predict`."""
        for env in (self._made.env, self._apart):
            if env is not None:
                env.close()
        self._apart = None


def _count(n_envs: Any) -> int:
    """How many environments to begin with; one where that is still to be decided."""
    if n_envs == "auto":
        return 1
    if isinstance(n_envs, bool) or not isinstance(n_envs, int):
        raise OptionError(f'n_envs={n_envs!r} must be "auto" or a whole number')
    return n_envs
