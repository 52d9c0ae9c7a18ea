"""A captured or compiled update is the eager update, and what cannot be captured runs eagerly and says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.agents.config import Config
from headrace.agents.resolve import resolve
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Leaf, Observations
from headrace.agents.torch_learner import TorchLearner
from headrace.errors import OptionError

STEPS, N = 3, 4


@pytest.fixture
def plain_products() -> Iterator[None]:
    """Convolutions without TensorFloat-32: two kernels round it differently."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def updated(
    device: str, compiled: bool | str, policy: str, module: Any = None, updates: int = 3, **more: Any
) -> Any:
    """The learner after some updates from made-up rollouts."""
    config = Config(
        n_steps=STEPS,
        n_envs=N,
        policy=policy,
        hidden=(8,),
        lstm_size=8,
        device=device,
        compiled=compiled,
        **{"cnn": "small", **more},
    )
    leaf = Leaf("", "image", (4, 84, 84), "uint8") if policy == "cnn" else Leaf("", "vector", (5,), "float32")
    learner: Any = TorchLearner(config, Observations((leaf,)), Actions(3), N, "rmsprop", module)
    learner.start([0])
    rng = np.random.default_rng(0)
    for _ in range(updates):
        for tensor in learner.obs.values():
            tensor.copy_(
                torch.from_numpy(rng.integers(0, 256, tensor.shape).astype(np.float32)).to(tensor.dtype)
            )
        learner.raw.copy_(torch.from_numpy(rng.integers(0, 3, learner.raw.shape)))
        made = [rng.normal(size=(STEPS, N)).astype(np.float32) for _ in range(2)]
        learner.learn(Batch(made[0], made[1], np.full((STEPS, N), 1 / 12, np.float32)), 1e-3, report=True)
    return learner


def assert_equal(one: Any, other: Any, atol: float = 1e-5) -> None:
    for name, array in other.to_named().items():
        np.testing.assert_allclose(one.to_named()[name], array, atol=atol, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["mlp", "cnn", "lstm"])
def test_a_captured_update_is_the_eager_update(policy: str, plain_products: None) -> None:
    captured = updated("cuda", "graph", policy)
    assert captured.way == ("graph", "the whole update is one launch")
    assert_equal(captured, updated("cuda", False, policy))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["mlp", "cnn", "lstm"])
def test_a_fused_and_captured_update_is_the_eager_update(policy: str, plain_products: None) -> None:
    captured = updated("cuda", True, policy)
    assert captured.way == ("graph of compiled update", "fused, then one launch")
    assert_equal(captured, updated("cuda", False, policy))


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{"cnn": "nature"}, {"cnn": "nature", "precision": "bfloat16"}])
def test_rounded_products_learn_the_same(more: dict[str, Any]) -> None:
    """The way gone in three updates. Between float32 and bfloat16 on a CPU the cosine is 0.992."""
    captured, eager = updated("cuda", "graph", "cnn", **more), updated("cuda", False, "cnn", **more)
    start = updated("cuda", False, "cnn", updates=0, **more).theta
    one, other = captured.theta - start, eager.theta - start
    assert one @ other > 0.97 * np.linalg.norm(one) * np.linalg.norm(other) > 0


class ReadsTheDevice(torch.nn.Module):
    """A graph cannot hold a branch on a number that lies on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() > -1e9 else x


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    torch.manual_seed(0)
    module = ReadsTheDevice()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    fallen = updated("cuda", "graph", "module", module)
    assert fallen.way[0] == "eager" and "graph failed" in fallen.way[1]
    module = ReadsTheDevice()
    module.load_state_dict(start)
    assert_equal(fallen, updated("cuda", False, "module", module))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mlp", "cnn"])
def test_a_compiled_update_is_the_eager_update(policy: str) -> None:
    assert_equal(updated("cpu", True, policy), updated("cpu", False, policy))


def test_updates_are_captured_on_a_device_without_being_asked_and_the_plan_says_so() -> None:
    observations = Observations((Leaf("", "image", (4, 84, 84), "uint8"),))
    config, plan = resolve({}, observations, fixed_n=None, cuda=True)
    assert config.device == "cuda" and config.compiled == "graph"
    assert "one launch" in plan.to_dict()["compiled"]["reason"]
    config, plan = resolve({}, observations, fixed_n=None, cuda=False)
    assert config.compiled is False and "compiled" in plan
    asked, _ = resolve({"compiled": True, "device": "cuda"}, observations, fixed_n=None, cuda=True)
    assert asked.compiled is True


def test_compiled_is_checked() -> None:
    with pytest.raises(OptionError, match="needs a CUDA device"):
        Config(compiled="graph")
    with pytest.raises(OptionError, match="did you mean 'graph'"):
        Config(compiled="grap", device="cuda")
