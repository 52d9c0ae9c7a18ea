"""The gradient of the whole loss, of both learners, against autograd on a plain float64 implementation.

Planted once, and each caught here: a wrong sign of the entropy, a missing factor 2 of the squared error, the derivative
of tanh taken at the wrong layer, and rows that are no transitions counted into the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agent_oracles import oracle
from gymnasium import spaces

from headrace.agents.config import Config
from headrace.agents.handwritten import HandwrittenLearner
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Observations
from headrace.agents.torch_learner import TorchLearner

STEPS, N = 3, 4
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "even": spaces.MultiDiscrete([3, 3]),
    "uneven": spaces.MultiDiscrete([2, 4, 3]),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}


class Still:
    """Stands in for a driver whose observation is all that is asked for."""

    def __init__(self, obs: Any) -> None:
        self.obs, self.fresh = obs, None


def filled(learner: Any, rng: np.random.Generator) -> Batch:
    """Act through one rollout of random observations, and make up what learning needs."""
    learner.start([5])
    theta = learner.theta + 0.1 * rng.normal(size=learner.theta.shape).astype(np.float32)
    learner.set_theta(theta)
    learner.begin(Still(rng.normal(size=(N, 5)).astype(np.float32)))
    for t in range(STEPS):
        learner.act(t)
        learner.see(t, Still(rng.normal(size=(N, 5)).astype(np.float32)))
    learner.finish()
    mask = rng.random((STEPS, N)) < 0.7
    made = [rng.normal(size=(STEPS, N)).astype(np.float32) for _ in range(2)]
    return Batch(made[0], made[1], mask * np.float32(1.0 / mask.sum()))


def expected(learner: Any, batch: Batch, config: Config) -> dict[str, np.ndarray]:
    named = {
        name: torch.from_numpy(array).double().requires_grad_() for name, array in learner.to_named().items()
    }
    if isinstance(learner, HandwrittenLearner):
        x, raw = torch.from_numpy(learner._learned.x[0][:, :-1]), torch.from_numpy(learner._raw_m)
    else:
        x, raw = learner.obs["flat"][:STEPS].flatten(0, 1), learner.raw.flatten(0, 1)
    loss = oracle.plain_loss(
        named, x.double(), raw, batch.advantages.ravel(), batch.targets.ravel(), batch.weights.ravel() > 0,
        sizes=learner.actions.sizes, shared=config.shared, activation=config.activation,
        value_coef=config.value_coef, entropy_coef=config.entropy_coef,
    )  # fmt: skip
    loss.backward()
    return {name: tensor.grad.numpy() for name, tensor in named.items()}


@pytest.mark.parametrize("kind", [HandwrittenLearner, TorchLearner])
@pytest.mark.parametrize("action", list(ACTIONS))
@pytest.mark.parametrize(("shared", "activation", "entropy"), [(False, "tanh", 0.1), (True, "relu", 0.0)])
def test_gradient_is_autograd_s(
    kind: Any, action: str, shared: bool, activation: str, entropy: float
) -> None:
    config = Config(
        n_steps=STEPS, n_envs=N, hidden=(7, 6), shared=shared, activation=activation, entropy_coef=entropy,
        optimizer="sgd", max_grad_norm=0.0, policy="mlp",
    )  # fmt: skip
    observations = Observations(spaces.Box(-9, 9, (5,), np.float32))
    learner = kind(config, observations, Actions(ACTIONS[action]), N, "sgd")
    batch = filled(learner, np.random.default_rng(0))
    wanted = expected(learner, batch, config)
    before = learner.to_named()
    learner.learn(batch, 1.0, report=True)
    after = learner.to_named()
    for name, gradient in wanted.items():
        # Plain descent at rate 1: the step is the gradient.
        np.testing.assert_allclose(before[name] - after[name], gradient, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", [HandwrittenLearner, TorchLearner])
def test_gradient_is_that_of_parameters_taken_over_after_acting(kind: Any) -> None:
    """Overlapped acting and workers do that. Planted: activations of the older parameters."""
    config = Config(n_steps=STEPS, n_envs=N, hidden=(7, 6), optimizer="sgd", max_grad_norm=0.0)
    observations = Observations(spaces.Box(-9, 9, (5,), np.float32))
    learner = kind(config, observations, Actions(ACTIONS["even"]), N, "sgd")
    rng = np.random.default_rng(2)
    batch = filled(learner, rng)
    learner.set_theta(learner.theta + 0.1 * rng.normal(size=learner.theta.shape).astype(np.float32))
    wanted, before = expected(learner, batch, config), learner.to_named()
    learner.learn(batch, 1.0, report=False)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(before[name] - learner.to_named()[name], gradient, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("action", list(ACTIONS))
def test_both_learners_agree_on_losses_and_log_probabilities(action: str) -> None:
    found = []
    for kind in (HandwrittenLearner, TorchLearner):
        config = Config(n_steps=STEPS, n_envs=N, hidden=(7, 6), correction="vtrace", optimizer="sgd")
        learner = kind(
            config, Observations(spaces.Box(-9, 9, (5,), np.float32)), Actions(ACTIONS[action]), N, "sgd"
        )
        batch = filled(learner, np.random.default_rng(1))
        if found:
            learner.from_named(found[0][0])
            raw = torch.from_numpy(found[0][1])
            learner.raw.copy_(raw.view_as(learner.raw))
            learner.log_probs.zero_()
            ratios = learner.refresh()
        else:
            parameters, raw_m = learner.to_named(), learner._raw_m.copy()
            learner._log_probs = np.zeros(STEPS * N, np.float32)
            ratios = learner.refresh()
        values = learner.values.copy()
        losses = learner.learn(batch, 0.0, report=True)
        found.append((parameters, raw_m, ratios, values, losses))
    np.testing.assert_allclose(found[0][2], found[1][2], atol=1e-5)
    np.testing.assert_allclose(found[0][3], found[1][3], atol=1e-5)
    for name in ("policy_loss", "value_loss", "entropy"):
        assert found[0][4][name] == pytest.approx(found[1][4][name], abs=1e-5)


def test_sampled_actions_follow_the_probabilities() -> None:
    """Chi-square over 20,000 draws of a three-way choice: beyond 30 happens by chance once in three million."""
    from headrace.agents.heads import CategoricalHead

    head = CategoricalHead(Actions(spaces.MultiDiscrete([3, 2])))
    out = np.tile(np.array([0.5, -1.0, 0.1, 0.0, 1.0], np.float32), (20_000, 1))
    raw = np.zeros((20_000, 2), np.int64)
    head.sample(out, np.zeros(0), head.noise(np.random.default_rng(3), 20_000), raw)
    for part, logits in enumerate(([0.5, -1.0, 0.1], [0.0, 1.0])):
        p = np.exp(logits) / np.exp(logits).sum()
        counts = np.bincount(raw[:, part], minlength=len(p))
        assert ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum() < 30


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("name", ["rmsprop", "adam", "sgd"])
def test_flat_optimisers_do_what_torch_s_do(name: str, one_pass: bool) -> None:
    """``one_pass=False`` is what runs on an accelerator."""
    from headrace.agents.optimizers import FlatOptimizer

    theta, grad = torch.randn(30, generator=torch.Generator().manual_seed(0)), torch.zeros(30)
    own = torch.nn.Parameter(theta.clone())
    made: dict[str, Any] = {
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, eps=1e-5),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    }
    torchs, ours = made[name]([own]), FlatOptimizer(name, theta, grad, 0.5)
    if not one_pass:
        ours._in_one_pass = False
    for i in range(20):
        grad.copy_(torch.randn(30, generator=torch.Generator().manual_seed(i)) * 3)
        own.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([own], 0.5)
        torchs.step()
        ours.step(0.01)
    torch.testing.assert_close(theta, own.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("one_pass", [True, False])
def test_gradients_of_single_tensors_are_laid_out_as_the_parameters_are(one_pass: bool) -> None:
    """Planted once: the filters of a convolution flattened as they are seen, not as they lie."""
    from headrace.agents.optimizers import FlatOptimizer
    from headrace.agents.torch_learner import _flatten

    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    theta, grad = _flatten(network)
    start, x = theta.clone(), torch.randn(5, 2, 3, 3, generator=generator)

    def stepped(apart: bool) -> torch.Tensor:
        theta.copy_(start)
        grad.zero_()
        ours = FlatOptimizer("rmsprop", theta, grad, 0.5)
        ours._in_one_pass = one_pass
        ours.minus_lr.fill_(-0.01)
        loss = network(x).square().sum()
        if apart:
            ours.step_with(torch.autograd.grad(loss, list(network.parameters())))
        else:
            loss.backward()
            ours.step()
        return theta.clone()

    wanted = stepped(False)
    assert not torch.equal(wanted, start)
    torch.testing.assert_close(stepped(True), wanted)
