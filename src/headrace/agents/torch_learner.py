"""The learner for every network that is not a small mlp on the CPU: torch modules on any device.

Memory. Observations of a rollout lie in one tensor per leaf, (t+1, n, …), on the device; on the CPU they are the
memory of the NumPy arrays that observations are written into, so nothing is copied twice. Parameters and
gradients are one flat tensor each; the module's own are views of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.agents.capture import make_step
from headrace.agents.config import Config
from headrace.agents.distributions import make_torch_head
from headrace.agents.driver import Driver
from headrace.agents.moments import RunningMoments
from headrace.agents.networks import FLAT, LstmNet, make_network
from headrace.agents.optimizers import FlatOptimizer, flatten
from headrace.agents.rollout import Batch, Player
from headrace.agents.spaces import Actions, Observations

Array = NDArray[Any]


class TorchLearner:
    """Implements `rollout.Learner`."""

    def __init__(
        self,
        config: Config,
        observations: Observations,
        actions: Actions,
        n: int,
        optimizer: Any,
        module: nn.Module | None = None,
    ) -> None:
        self.config, self.observations, self.actions, self.n = config, observations, actions, n
        self.device = torch.device(config.device)
        self.head = make_torch_head(actions, self.device)
        self._optimizer_kind, self._module = optimizer, module
        flat = config.policy == "mlp" or (
            config.policy == "lstm" and all(leaf.kind != "image" for leaf in observations.leaves)
        )
        self.flat = flat and module is None
        widths = {FLAT: observations.width} if self.flat else {
            leaf.name: leaf.width for leaf in observations.leaves if leaf.kind != "image"
        }  # fmt: skip
        self.moments = (
            {name: RunningMoments(w) for name, w in widths.items()} if config.normalize_observations else {}
        )
        self.moment_list = list(self.moments.values())
        self._allocate(config.n_steps)

    def start(self, seed: list[int]) -> None:
        """Seed the sampling and draw the first parameters (a user's module keeps its own)."""
        first = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self.generator = torch.Generator(self.device).manual_seed(first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(first)
            network = make_network(
                self.config, self.observations, self.head.n_out, self.head.n_extra, self._module
            )
        self.network = network.to(self.device)
        self.theta_t, self.grad_t = _flatten(self.network)
        self.optimizer = FlatOptimizer(
            self._optimizer_kind, self.theta_t, self.grad_t, self.config.max_grad_norm
        )
        self._recurrent = isinstance(network, LstmNet)
        self._state, self._first_state = self._start_state(self.n), self._start_state(self.n)
        self.way: tuple[str, str] | None = None
        """How an update runs and why, where that was not simply as asked; known after the first one."""
        self._step = make_step(self)

    def _start_state(self, n: int) -> Any:
        return self.network.start_state(n, self.device) if isinstance(self.network, LstmNet) else None

    def _allocate(self, steps: int) -> None:
        rows = (steps + 1, self.n)
        on_cpu = self.device.type == "cpu"
        arrays = {FLAT: np.zeros((*rows, self.observations.width), np.float32)} if self.flat else (
            self.observations.empty(*rows)
        )  # fmt: skip
        self._arrays = arrays
        staged = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if not on_cpu:
            # Pinned, so that the copy to the device runs beside the host.
            staged = {name: tensor.pin_memory() for name, tensor in staged.items()}
            self._arrays = {name: tensor.numpy() for name, tensor in staged.items()}
        self._staged = staged
        self.obs = staged if on_cpu else {name: t.to(self.device) for name, t in staged.items()}
        self._unscaled = {
            name: np.zeros((steps, *arrays[name].shape[1:]), np.float32) for name in self.moments
        }
        self.raw = torch.zeros(
            (steps, self.n, self.head.parts), dtype=self.head.raw_dtype, device=self.device
        )
        self.fresh = torch.zeros(rows, device=self.device)
        self.values_t = torch.zeros(rows, device=self.device)
        self.values = self.values_t.numpy() if on_cpu else np.zeros(rows, np.float32)
        self.log_probs = torch.zeros((steps, self.n), device=self.device)
        self.batch = torch.zeros((3, steps * self.n), device=self.device)

    @property
    def theta(self) -> Array:
        return self.theta_t.numpy() if self.device.type == "cpu" else self.theta_t.cpu().numpy()

    def set_theta(self, theta: Array) -> None:
        self.theta_t.copy_(torch.from_numpy(np.asarray(theta, np.float32)))

    @property
    def log_std(self) -> Tensor | None:
        return getattr(self.network, "log_std", None)

    def autocast(self) -> Any:
        """bfloat16 arithmetic where it was asked for; parameters stay float32."""
        if self.config.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _encode(self, t: int, obs: Any) -> None:
        slots = {name: array[t] for name, array in self._arrays.items()}
        self._write(obs, slots)
        for name, moments in self.moments.items():
            if t < self.config.n_steps:
                self._unscaled[name][t] = slots[name]
            moments.apply(slots[name])
        if self.obs is not self._staged:
            for name, tensor in self.obs.items():
                tensor[t].copy_(self._staged[name][t], non_blocking=True)

    def _write(self, obs: Any, slots: dict[str, Array]) -> None:
        if self.flat:
            self.observations.flatten(obs, slots[FLAT])
        else:
            self.observations.split(obs, slots)

    def begin(self, driver: Driver) -> None:
        self._mark_fresh(0, driver)
        self._encode(0, driver.obs)
        if self._state is not None:
            # Copied, not referred to: a captured graph reads one address for ever.
            for kept, now in zip(self._first_state, self._state, strict=True):
                kept.copy_(now)

    def forward(self, obs: dict[str, Tensor], state: Any, fresh: Tensor) -> tuple[Tensor, Tensor, Any]:
        """One pass; the state goes through untouched in networks that have none."""
        with self.autocast():
            if self._recurrent:
                out, values, state = self.network(obs, state, fresh)
            else:
                out, values = self.network(obs)
        return out, values, state

    def _pass(self, t: int) -> tuple[Tensor, Tensor]:
        """Outputs and values of step ``t``'s observations; a recurrent state goes on."""
        obs = {name: tensor[t] for name, tensor in self.obs.items()}
        out, values, self._state = self.forward(obs, self._state, self.fresh[t : t + 1])
        return out, values

    def _pass_rows(self, steps: int) -> tuple[Tensor, Tensor]:
        """The same for all rows of the first ``steps`` steps, from the rollout's first state on."""
        rows = {name: tensor[:steps].flatten(0, 1) for name, tensor in self.obs.items()}
        out, values, _ = self.forward(rows, self._first_state, self.fresh[:steps])
        return out, values

    def act(self, t: int) -> Array:
        with torch.no_grad():
            out, values = self._pass(t)
            raw = self.head.sample(out, self.log_std, self.generator)
            self.raw[t] = raw
            self.values_t[t] = values
            if self.config.correction == "vtrace":
                self.log_probs[t] = self.head.measure(out, self.log_std, raw)[0]
        return self.actions.to_env(raw.cpu().numpy())

    def see(self, t: int, driver: Driver) -> None:
        self._mark_fresh(t + 1, driver)
        self._encode(t + 1, driver.obs)

    def _mark_fresh(self, t: int, driver: Driver) -> None:
        if driver.fresh is None:
            self.fresh[t].zero_()
        else:
            self.fresh[t].copy_(torch.from_numpy(driver.fresh))

    def finish(self) -> None:
        with torch.no_grad():
            state = self._state
            self.values_t[-1] = self._pass(self.config.n_steps)[1]
            self._state = state  # the next rollout passes this observation again
        self._publish()

    def _publish(self) -> None:
        if self.device.type != "cpu":
            self.values[:] = self.values_t.cpu().numpy()

    def encode_apart(self, obs: Any, count: int) -> dict[str, Tensor]:
        """``count`` observations outside of any rollout, normalised, on the device."""
        slots = {FLAT: np.zeros((count, self.observations.width), np.float32)} if self.flat else (
            self.observations.empty(count)
        )  # fmt: skip
        self._write(obs, slots)
        for name, moments in self.moments.items():
            moments.apply(slots[name])
        return {name: torch.from_numpy(array).to(self.device) for name, array in slots.items()}

    def player(self, count: int, seed: int) -> Player:
        return TorchPlayer(self, count, seed)

    @torch.no_grad()
    def values_of(self, obs: Any, rows: Array) -> Array:
        where = torch.from_numpy(rows).to(self.device)
        state = tuple(part[where] for part in self._state) if self._state is not None else None
        fresh = torch.zeros((1, len(rows)), device=self.device)
        values: Array = self.forward(self.encode_apart(obs, len(rows)), state, fresh)[1].cpu().numpy()
        return values

    @torch.no_grad()
    def refresh(self) -> Array:
        out, values = self._pass_rows(len(self.fresh))
        kept = len(self.raw) * self.n
        raw = self.raw.view(kept, -1)
        now = self.head.measure(out[:kept], self.log_std, raw)[0]
        self.values_t.copy_(values.view_as(self.values_t))
        self._publish()
        ratios: Array = (now.view_as(self.log_probs) - self.log_probs).cpu().numpy()
        return ratios

    def loss(self) -> tuple[Tensor, Tensor]:
        """The loss of the rollout in memory, and its parts, detached: policy, value, entropy."""
        steps = len(self.raw)
        out, values = self._pass_rows(steps)
        log_p, entropy = self.head.measure(out, self.log_std, self.raw.flatten(0, 1))
        advantages, targets, weights = self.batch
        policy = -(weights * advantages * log_p).sum()
        value = (weights * (values - targets) ** 2).sum()
        spread = (weights * entropy).sum()
        total = policy + self.config.value_coef * value - self.config.entropy_coef * spread
        return total, torch.stack((policy.detach(), value.detach(), spread.detach()))

    def learn(self, batch: Batch, lr: float, report: bool) -> dict[str, float]:
        rows = np.stack([part.reshape(-1) for part in (batch.advantages, batch.targets, batch.weights)])
        self.batch.copy_(torch.from_numpy(rows))
        self.optimizer.minus_lr.fill_(-lr)
        parts = self._step()
        if not report:
            return {}
        return dict(zip(("policy_loss", "value_loss", "entropy"), parts.tolist(), strict=True))

    def count_moments(self, live_tn: Array) -> None:
        for name, moments in self.moments.items():
            moments.add(self._unscaled[name][live_tn])
            moments.refresh()

    def bad_step(self, live_tn: Array) -> tuple[int, int] | None:
        for array in self._arrays.values():
            if array.dtype == np.uint8 or np.isfinite(array.sum()):
                continue
            bad = ~np.isfinite(array.reshape(*array.shape[:2], -1)).all(2)
            t, n = (int(i) for i in np.argwhere(bad)[0])
            return t, n
        return None

    def to_named(self) -> dict[str, Array]:
        return {name: t.detach().cpu().numpy().copy() for name, t in self.network.state_dict().items()}

    def from_named(self, named: dict[str, Array]) -> None:
        own = self.network.state_dict()
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(np.array(named[name])))


class TorchPlayer:
    """Implements `rollout.Player`, with a recurrent state of its own."""

    def __init__(self, learner: TorchLearner, count: int, seed: int) -> None:
        self.learner, self.count = learner, count
        self.generator = torch.Generator(learner.device).manual_seed(seed)
        self.state = learner._start_state(count)

    @torch.no_grad()
    def act(self, obs: Any, fresh: Array | None, deterministic: bool) -> Array:
        learner = self.learner
        mask = torch.zeros((1, self.count), device=learner.device)
        if fresh is not None:
            mask[0].copy_(torch.from_numpy(fresh))
        encoded = learner.encode_apart(obs, self.count)
        out, _, self.state = learner.forward(encoded, self.state, mask)
        if deterministic:
            raw = learner.head.best(out)
        else:
            raw = learner.head.sample(out, learner.log_std, self.generator)
        return learner.actions.to_env(raw.cpu().numpy())


def _flatten(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Move all parameters into one tensor, and their gradients into another."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    theta = torch.cat([flatten(p.detach()) for p in parameters])
    grad = torch.zeros_like(theta)
    start = 0
    for p in parameters:
        stop = start + p.numel()
        p.data, p.grad = (_like(flat[start:stop], p) for flat in (theta, grad))
        start = stop
    return theta, grad


def _like(flat: Tensor, p: Tensor) -> Tensor:
    """``flat``, seen in the shape of ``p``."""
    if p.dim() != 4:
        return flat.view_as(p)
    n, c, h, w = p.shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)
