"""The learner that keeps acting's activations of images does what autograd does over a second forward pass.

Planted once, and each caught here: the first layer's gradient without the scale of the pixels, blocks unfolded in
another order than they were folded in, a parameter scaled in place, and activations of parameters that were replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.agents.build import make_learner
from headrace.agents.config import Config
from headrace.agents.images import ImageLearner
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Leaf, Observations
from headrace.agents.torch_learner import TorchLearner

STEPS, N = 3, 2
IMAGES = {
    "stacked frames, folded": Leaf("", "image", (4, 84, 84), "uint8"),
    "sides that do not fold": Leaf("", "image", (2, 50, 46), "uint8"),
    "channels last": Leaf("", "image", (60, 48, 3), "uint8", channels_last=True),
    "floats": Leaf("", "image", (3, 64, 64), "float32"),
}


class Still:
    def __init__(self, obs: Any) -> None:
        self.obs, self.fresh = obs, None


def one_update(kind: Any, leaf: Leaf, **options: Any) -> tuple[Any, dict[str, float], dict[str, np.ndarray]]:
    """Values, losses and the step of one update of plain descent at rate 1: the gradient."""
    config = Config(n_steps=STEPS, n_envs=N, policy="cnn", max_grad_norm=0.0, entropy_coef=0.1, **options)
    learner = kind(config, Observations((leaf,)), Actions(5), N, "sgd")
    learner.start([1])
    rng = np.random.default_rng(0)

    def seen() -> Still:
        shape = (N, *leaf.shape)
        pixels = rng.integers(0, 256, shape) if leaf.dtype == "uint8" else rng.random(shape)
        return Still(pixels.astype(leaf.dtype))

    learner.begin(seen())
    for t in range(STEPS):
        learner.act(t)
        learner.see(t, seen())
    learner.finish()
    learner.raw.copy_(torch.from_numpy(np.arange(6).reshape(STEPS, N, 1) % 5))
    if config.correction == "vtrace":
        moved = learner.theta + 0.01 * np.random.default_rng(3).normal(size=learner.theta.shape)
        learner.set_theta(moved.astype(np.float32))
        learner.refresh()
    before, values = learner.to_named(), learner.values.copy()
    made = [rng.normal(size=(STEPS, N)).astype(np.float32) for _ in range(2)]
    losses = learner.learn(Batch(*made, np.full((STEPS, N), 1 / 6, np.float32)), 1.0, report=True)
    after = learner.to_named()
    return values, losses, {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("correction", ["none", "vtrace"])
@pytest.mark.parametrize("cnn", ["nature", "small"])
@pytest.mark.parametrize("image", list(IMAGES))
def test_a_kept_pass_is_autograd_s(image: str, cnn: str, correction: str) -> None:
    options = {"cnn": cnn, "correction": correction}
    values, losses, steps = one_update(ImageLearner, IMAGES[image], **options)
    wanted_values, wanted_losses, wanted = one_update(TorchLearner, IMAGES[image], **options)
    np.testing.assert_allclose(values, wanted_values, atol=1e-5)
    assert losses == pytest.approx(wanted_losses, abs=1e-5)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(
            steps[name], gradient, atol=1e-5 + 1e-4 * np.abs(gradient).max(), err_msg=name
        )


def test_in_bfloat16_it_is_no_further_from_float32_than_autocast_is() -> None:
    leaf = IMAGES["stacked frames, folded"]
    _, _, exact = one_update(TorchLearner, leaf, cnn="small")
    steps = {
        kind: one_update(kind, leaf, cnn="small", precision="bfloat16")[2]
        for kind in (ImageLearner, TorchLearner)
    }
    for name, gradient in exact.items():
        kept, autocast = (
            np.linalg.norm(steps[kind][name] - gradient) for kind in (ImageLearner, TorchLearner)
        )
        assert kept <= 1.5 * autocast + 0.01 * np.linalg.norm(gradient), name


def test_it_is_chosen_for_one_image_on_the_cores() -> None:
    def kind(**options: Any) -> type:
        leaves = (Leaf("", "image", (4, 84, 84), "uint8"), *options.pop("more", ()))
        config = Config(policy="cnn", cnn="small", n_envs=N, **options)
        return type(make_learner(config, Observations(leaves), Actions(3), N, "rmsprop", None))

    assert kind() is kind(precision="bfloat16") is ImageLearner
    assert kind(compiled=True) is kind(more=(Leaf("b", "vector", (2,), "float32"),)) is TorchLearner


def test_an_agent_on_images_repeats_itself_and_says_how_it_learns() -> None:
    pytest.importorskip("gymnasium")
    from agent_worlds import Spaces
    from gymnasium import spaces

    def made() -> Any:
        space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
        return Spaces(space, spaces.Discrete(2))

    found = []
    for _ in range(2):
        agent = hr.ActorCritic(made, n_envs=2, cnn="small", seed=4).learn(steps=60)
        assert agent.plan["learner"] == "images"
        found.append(agent.parameters())
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
