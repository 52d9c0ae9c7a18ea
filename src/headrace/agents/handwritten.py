"""The learner for small networks on the CPU: `Mlp` and a head of `heads`, with nothing in between.

Memory. All activations of a rollout lie in one `Activations` of (t+1)·n rows; step ``t`` writes rows t·n to (t+1)·n.
Learning reads the first t·n rows: they were computed with the present parameters, unless others were taken over since
(overlapped acting, V-trace), in which case they are computed anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.agents.config import Config
from headrace.agents.driver import Driver
from headrace.agents.heads import make_head
from headrace.agents.mlp import Activations, Mlp
from headrace.agents.moments import RunningMoments
from headrace.agents.optimizers import FlatOptimizer
from headrace.agents.rollout import Batch, Player
from headrace.agents.spaces import Actions, Observations

Array = NDArray[Any]


class HandwrittenLearner:
    """Implements `rollout.Learner`."""

    def __init__(
        self, config: Config, observations: Observations, actions: Actions, n: int, optimizer: Any
    ) -> None:
        self.config, self.observations, self.actions, self.n = config, observations, actions, n
        self.head = make_head(actions)
        self.net = Mlp(
            observations.width,
            config.hidden,
            self.head.n_out,
            self.head.n_extra,
            config.shared,
            config.activation,
        )
        self.optimizer = FlatOptimizer(
            optimizer, torch.from_numpy(self.net.theta), torch.from_numpy(self.net.grad), config.max_grad_norm
        )
        self.moments = RunningMoments(observations.width) if config.normalize_observations else None
        self.moment_list = [self.moments] if self.moments is not None else []
        self._allocate(config.n_steps, n)

    def start(self, seed: list[int]) -> None:
        """Seed the sampling and draw the first parameters."""
        sequence = np.random.SeedSequence(seed)
        self.rng = np.random.Generator(np.random.SFC64(sequence))
        self.net.start(torch.Generator().manual_seed(int(sequence.generate_state(1)[0])))

    def _allocate(self, steps: int, n: int) -> None:
        acts = Activations(self.net, (steps + 1) * n)
        self.values = acts.values.reshape(steps + 1, n)
        self._steps = [acts.rows(t * n, (t + 1) * n) for t in range(steps + 1)]
        self._plans = [self.net.plan(part) for part in self._steps]
        self._learned = acts.rows(0, steps * n)
        self._inputs = [part.x[0][:, :-1] for part in self._steps]
        self.raw = np.zeros((steps, n, self.head.parts), self.head.raw_dtype)
        self._raw_m = self.raw.reshape(steps * n, -1)
        self._unscaled = np.zeros((steps, n, self.observations.width), np.float32) if self.moments else None
        self._log_probs: Array | None = None
        self._changed = True  # the parameters, since the rollout in memory was acted

    @property
    def theta(self) -> Array:
        return self.net.theta

    def set_theta(self, theta: Array) -> None:
        self.net.theta[:] = theta
        self._changed = True

    def _encode(self, t: int, obs: Any) -> None:
        inputs = self._inputs[t]
        self.observations.flatten(obs, inputs)
        if self.moments is not None:
            assert self._unscaled is not None
            if t < len(self._unscaled):
                self._unscaled[t] = inputs
            self.moments.apply(inputs)

    def begin(self, driver: Driver) -> None:
        self._noise = self.head.noise(self.rng, len(self._raw_m)).reshape(
            len(self.raw), self.n, *self.head.noise_shape
        )
        self._encode(0, driver.obs)
        self._changed = False

    def act(self, t: int) -> Array:
        acts = self._steps[t]
        self.net.forward(acts, self._plans[t])
        self.head.sample(acts.out, self.net.extra, self._noise[t], self.raw[t])
        return self.actions.to_env(self.raw[t])

    def see(self, t: int, driver: Driver) -> None:
        self._encode(t + 1, driver.obs)

    def finish(self) -> None:
        self.net.forward(self._steps[-1], self._plans[-1])
        if self.config.correction == "vtrace":
            acts = self._learned
            self._log_probs = self.head.log_prob(acts.out, self.net.extra, self._raw_m)

    def player(self, count: int, seed: int) -> Player:
        return HandwrittenPlayer(self, count, seed)

    def values_of(self, obs: Any, rows: Array) -> Array:
        return self.apart(obs, len(rows)).values[:, 0]

    def apart(self, obs: Any, count: int) -> Activations:
        acts = Activations(self.net, count)
        self.observations.flatten(obs, acts.x[0][:, :-1])
        if self.moments is not None:
            self.moments.apply(acts.x[0][:, :-1])
        self.net.forward(acts)
        return acts

    def refresh(self) -> Array:
        assert self._log_probs is not None
        acts = self._learned
        self.net.forward(acts)
        self.net.forward(self._steps[-1])
        self._changed = False
        now = self.head.log_prob(acts.out, self.net.extra, self._raw_m)
        ratios: Array = (now - self._log_probs).reshape(len(self.raw), self.n)
        return ratios

    def learn(self, batch: Batch, lr: float, report: bool) -> dict[str, float]:
        config, acts = self.config, self._learned
        if self._changed:
            self.net.forward(acts)
        weights_m = batch.weights.reshape(-1)
        weight_m = batch.advantages.reshape(-1) * weights_m
        entropy_m = weights_m * np.float32(config.entropy_coef) if config.entropy_coef else None
        errors_m = (acts.values[:, 0] - batch.targets.reshape(-1)) * weights_m
        losses = self._losses(acts, batch, weight_m, weights_m) if report else {}
        d_out = self.head.backward(
            acts.out, self.net.extra, self._raw_m, weight_m, entropy_m, self.net.g_extra
        )
        self.net.backward(acts, d_out, (errors_m * np.float32(2.0 * config.value_coef))[:, None])
        self.optimizer.step(lr)
        return losses

    def _losses(self, acts: Activations, batch: Batch, weight_m: Array, weights_m: Array) -> dict[str, float]:
        log_p = self.head.log_prob(acts.out, self.net.extra, self._raw_m)
        errors = acts.values[:, 0] - batch.targets.reshape(-1)
        return {
            "policy_loss": float(-(weight_m * log_p).sum()),
            "value_loss": float((weights_m * errors * errors).sum()),
            "entropy": float((weights_m * self.head.entropy(acts.out, self.net.extra)).sum()),
        }

    def count_moments(self, live_tn: Array) -> None:
        """Count the rollout's observations into the normalisation, from the next rollout on."""
        if self.moments is not None:
            assert self._unscaled is not None
            self.moments.add(self._unscaled[live_tn])
            self.moments.refresh()

    def bad_step(self, live_tn: Array) -> tuple[int, int] | None:
        inputs = self._learned.x[0]
        if np.isfinite(inputs.sum()):
            return None
        bad = ~np.isfinite(inputs).all(1)
        t, n = (int(i) for i in np.argwhere(bad.reshape(len(self.raw), self.n))[0])
        return t, n

    def to_named(self) -> dict[str, Array]:
        return self.net.to_named()

    def from_named(self, named: dict[str, Array]) -> None:
        self.net.from_named(named)
        self._changed = True


class HandwrittenPlayer:
    """Implements `rollout.Player`."""

    def __init__(self, learner: HandwrittenLearner, count: int, seed: int) -> None:
        self.learner, self.count = learner, count
        self.rng = np.random.default_rng(seed)

    def act(self, obs: Any, fresh: Array | None, deterministic: bool) -> Array:
        learner, head = self.learner, self.learner.head
        acts = learner.apart(obs, self.count)
        if deterministic:
            return learner.actions.to_env(head.best(acts.out, learner.net.extra))
        raw = np.zeros((self.count, head.parts), head.raw_dtype)
        noise = head.noise(self.rng, self.count).reshape(self.count, *head.noise_shape)
        head.sample(acts.out, learner.net.extra, noise, raw)
        return learner.actions.to_env(raw)
