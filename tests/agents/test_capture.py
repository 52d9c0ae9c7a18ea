"""A captured or compiled update is the eager update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.agents.config import Config
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Leaf, Observations
from headrace.agents.torch_learner import TorchLearner

STEPS, N = 3, 4


def updated(device: str, compiled: bool, policy: str) -> dict[str, np.ndarray]:
    """Parameters after three updates from made-up rollouts."""
    config = Config(
        n_steps=STEPS,
        n_envs=N,
        policy=policy,
        cnn="small",
        hidden=(8,),
        lstm_size=8,
        device=device,
        compiled=compiled,
    )
    leaf = Leaf("", "image", (4, 84, 84), "uint8") if policy == "cnn" else Leaf("", "vector", (5,), "float32")
    learner: Any = TorchLearner(config, Observations((leaf,)), Actions(3), N, "rmsprop")
    learner.start([0])
    rng = np.random.default_rng(0)
    for _ in range(3):
        for tensor in learner.obs.values():
            tensor.copy_(
                torch.from_numpy(rng.integers(0, 256, tensor.shape).astype(np.float32)).to(tensor.dtype)
            )
        learner.raw.copy_(torch.from_numpy(rng.integers(0, 3, learner.raw.shape)))
        made = [rng.normal(size=(STEPS, N)).astype(np.float32) for _ in range(2)]
        learner.learn(Batch(made[0], made[1], np.full((STEPS, N), 1 / 12, np.float32)), 1e-3, report=True)
    return learner.to_named()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["mlp", "cnn", "lstm"])
def test_a_captured_update_is_the_eager_update(policy: str) -> None:
    eager, captured = updated("cuda", False, policy), updated("cuda", True, policy)
    for name, array in eager.items():
        np.testing.assert_allclose(captured[name], array, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_compiled_update_is_the_eager_update() -> None:
    eager, compiled = updated("cpu", False, "mlp"), updated("cpu", True, "mlp")
    for name, array in eager.items():
        np.testing.assert_allclose(compiled[name], array, atol=1e-5, err_msg=name)
