"""The agent from outside: spaces, bad input, saving, evaluating, recording, the command line.

Planted once, and each caught here: an agent loaded without its normalisation, evaluation that favours short episodes,
and a frame skip that is applied twice without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from agent_worlds import Clock, Match, Spaces, Spoiled
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import headrace as hr
from headrace.agents.environments import double_frame_skip
from headrace.agents.goal import Goal
from headrace.agents.spaces import Actions, Observations
from headrace.errors import (
    DeviceError,
    DivergenceError,
    MissingExtraError,
    ModelError,
    OptionError,
    RunFolderError,
    WorkerError,
)

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
OBSERVATIONS = {
    "box": BOX,
    "matrix": spaces.Box(-1.0, 1.0, (3, 2), np.float64),
    "discrete": spaces.Discrete(4, start=2),
    "multi": spaces.MultiDiscrete([3, 2]),
    "binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Discrete(3), d=spaces.MultiBinary(2))),
    "image": spaces.Box(0, 255, (1, 36, 36), np.uint8),
    "image and box": spaces.Dict(see=spaces.Box(0, 255, (40, 36, 3), np.uint8), feel=BOX),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([2, 3]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)),
}


def agent_for(observation: str, action: str, mode: AutoresetMode, **options: Any) -> hr.ActorCritic:
    envs = SyncVectorEnv(
        [lambda: Spaces(OBSERVATIONS[observation], ACTIONS[action])] * 2, autoreset_mode=mode
    )
    return hr.ActorCritic(envs, **{"n_steps": 4, "hidden": (8,), "cnn": "small", **options})


@pytest.mark.parametrize(
    ("observation", "action", "options"),
    [
        *((name, "discrete", {}) for name in OBSERVATIONS),
        *(("box", name, {}) for name in ACTIONS),
        ("box", "box", {"squash": True}),
        ("dict", "box", {"policy": "lstm", "lstm_size": 8, "normalize_observations": True}),
        ("image and box", "multi", {"normalize_observations": True}),
        ("image", "box", {"policy": "lstm", "lstm_size": 8}),
        ("dict", "multi", {"normalize_observations": True, "normalize_rewards": True}),
    ],
)
def test_every_space_is_learned_on_saved_and_loaded(
    tmp_path: Path, observation: str, action: str, options: dict[str, Any]
) -> None:
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        agent = agent_for(observation, action, mode, **options)
        assert agent.learn(steps=64).evaluate(3).returns == (5.0, 5.0, 5.0)
    OBSERVATIONS[observation].seed(0)
    several = [OBSERVATIONS[observation].sample() for _ in range(3)]
    single = agent.predict(several[0])
    assert ACTIONS[action].contains(single if ACTIONS[action].shape else int(single))
    folder = agent.save(tmp_path / "agent")
    env = SyncVectorEnv([lambda: Spaces(OBSERVATIONS[observation], ACTIONS[action])])
    again = hr.ActorCritic.load(folder, env)
    batch = agent.observations.stack(several)
    assert np.array_equal(agent.predict(batch), again.predict(batch))
    assert again.steps_ == agent.steps_ and sorted(p.name for p in folder.iterdir()) == [
        "agent.json",
        "model.safetensors",
    ]


def test_flattened_observations_are_one_hot_and_in_order() -> None:
    observations = Observations(OBSERVATIONS["dict"])
    assert [leaf.name for leaf in observations.leaves] == ["a", "b/c", "b/d"] and observations.width == 8
    out = np.full((2, 9), 7.0, np.float32)
    obs = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": np.array([2, 0]), "d": np.array([[1, 0], [0, 1]])}}
    observations.flatten(obs, out)
    assert out.tolist() == [[0, 1, 2, 0, 0, 1, 1, 0, 7], [3, 4, 5, 1, 0, 0, 0, 1, 7]]


def test_squashed_actions_reach_the_bounds_and_no_further() -> None:
    actions = Actions(ACTIONS["box"], squash=True)
    raw = np.array([[-50.0, 50.0], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(actions.to_env(raw), [[-2.0, 5.0], [0.0, 2.5]])
    endless = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.raises(OptionError, match="finite bounds"):
        Actions(endless, squash=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"env": "CartPool-v1"}, r"unknown environment 'CartPool-v1': did you mean CartPole-v"),
        ({"env": "CartPole-v9"}, r"CartPole-v0|CartPole-v1"),
        ({"env": 7}, "give an id such as"),
        ({"env": "CartPole-v1", "vectorization": "sideways"}, "sync, async or vector"),
        ({"env": Match, "optimiser": "adam"}, r"unknown option 'optimiser': did you mean 'optimizer'"),
        ({"env": Match, "policy": "mpl"}, "did you mean 'mlp'"),
        ({"env": Match, "gamma": 1.5}, r"gamma=1.5 is outside 0 to 1"),
        ({"env": Match, "n_steps": 2.5}, "whole number"),
        ({"env": Match, "policy": "cnn"}, 'use policy="mlp"'),
        ({"env": Match, "hidden": ()}, "hidden="),
        ({"env": Match, "workers": "many"}, "whole number"),
        ({"env": lambda: Spaces(spaces.Text(5), spaces.Discrete(2))}, "observation space is Text"),
        ({"env": lambda: Spaces(BOX, spaces.Tuple((spaces.Discrete(2),)))}, "action space is Tuple"),
        ({"env": Match, "policy": torch.nn.Linear(3, 4)}, "failed on two observations"),
        ({"env": Match, "policy": torch.nn.LSTM(2, 4)}, r"action outputs \(batch, 2\)"),
        ({"env": Match, "policy": "lstm", "overlap": True}, "without memory"),
        ({"env": Match, "n_envs": "eight"}, "n_envs='eight' must be \"auto\" or a whole number"),
        ({"env": Match, "device": "gpu"}, "'gpu' is no device; say 'auto'"),
        ({"env": Match, "device": "cuda:99"}, "this machine has"),
    ],
)
def test_bad_options_are_answered_with_what_to_do(asked: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ModelError, DeviceError), match=message):
        hr.ActorCritic(**asked).learn(steps=10)


def test_learning_needs_an_end() -> None:
    with pytest.raises(OptionError, match="needs an end"):
        hr.ActorCritic(Match).learn()
    for wrong in ({"steps": 0}, {"seconds": -1.0}):
        with pytest.raises(OptionError, match="must be"):
            Goal(**wrong)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setattr(gymnasium, "make_vec", fail)
    with pytest.raises(MissingExtraError, match=r"gymnasium\[box2d\]"):
        hr.ActorCritic("LunarLander-v3")


@pytest.mark.parametrize(("what", "word"), [("reward", "the reward nan"), ("observation", "not finite")])
def test_nan_names_the_environment_and_the_step(what: str, word: str) -> None:
    rows = [Match, Match, lambda: Spoiled(what, 7)]
    agent = hr.ActorCritic(SyncVectorEnv(rows), n_steps=5)
    with pytest.raises(DivergenceError, match=word) as caught:
        agent.learn(steps=1000)
    # The seventh step of an episode is vector step 6; its observation is looked at as the input of step 7.
    assert "environment 2" in str(caught.value)
    assert f"vector step {6 if what == 'reward' else 7}" in str(caught.value)
    assert all(np.isfinite(array).all() for array in agent.parameters().values())


def test_an_environment_that_raises_is_named_with_its_step() -> None:
    class Falls(Match):
        def step(self, action: Any) -> Any:
            if self.asked == 3:
                raise ZeroDivisionError("no lamp")
            return super().step(action)

    with pytest.raises(WorkerError, match=r"ZeroDivisionError in vector step 3: no lamp"):
        hr.ActorCritic(Falls, n_envs=1).learn(steps=100)


def test_an_agent_is_not_loaded_for_another_space(tmp_path: Path) -> None:
    folder = hr.ActorCritic("CartPole-v1", n_envs=2).save(tmp_path / "agent")
    with pytest.raises(ModelError, match=r"CartPole-v1 with observations .*Acrobot-v1 has"):
        hr.ActorCritic.load(folder, "Acrobot-v1")
    with pytest.raises(ModelError, match=r"policy_body\.0\.weight is"):
        hr.ActorCritic.load(folder, hidden=(32,))
    about = json.loads((folder / "agent.json").read_text())
    (folder / "agent.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(RunFolderError, match="format 2"):
        hr.ActorCritic.load(folder)
    del about["config"]
    (folder / "agent.json").write_text(json.dumps(about))
    with pytest.raises(RunFolderError, match="config missing"):
        hr.ActorCritic.load(folder)
    with pytest.raises(RunFolderError, match=r"holds no agent\.json"):
        hr.ActorCritic.load(tmp_path)


def test_loading_restores_normalisation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_envs": 4, "normalize_observations": True}
    agent = hr.ActorCritic("CartPole-v1", **options).learn(steps=400)
    again = hr.ActorCritic.load(agent.save(tmp_path / "agent"))
    assert np.array_equal(agent._learner.moment_list[0].sums, again._learner.moment_list[0].sums)
    assert np.array_equal(
        agent._learner.moment_list[0].inverse_std, again._learner.moment_list[0].inverse_std
    )
    assert again._learner.moment_list[0].sums[0] > 300


def test_evaluation_plays_equally_many_episodes_per_row() -> None:
    """Rows of length 1 and 9: counting whichever end first would give nine short ones for each long one."""
    envs = SyncVectorEnv([lambda: Clock(1), lambda: Clock(9)])
    evaluation = hr.ActorCritic(envs).evaluate(10)
    assert sorted(evaluation.lengths) == [1] * 5 + [9] * 5
    assert evaluation.mean == 5.0 == float(evaluation) and evaluation.std == 4.0


def test_skipping_frames_twice_is_noticed() -> None:
    class Emulator(Match):
        def __init__(self) -> None:
            self._frameskip = 4

    class Skip(gymnasium.Wrapper):  # type: ignore[type-arg]
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self._skip = 4

    assert double_frame_skip(Skip(Match())) is None
    assert double_frame_skip(Emulator()) is None
    assert "16 frames" in (double_frame_skip(Skip(Emulator())) or "")
    with pytest.warns(UserWarning, match="skipped twice"):
        hr.ActorCritic(SyncVectorEnv([lambda: Skip(Emulator())]))


def test_a_run_folder_can_be_reported_and_played(tmp_path: Path) -> None:
    from headrace.agents import cli_play, cli_train
    from headrace.report.build import write_report

    pytest.importorskip("plotly")
    said: list[str] = []
    out = tmp_path / "run"
    agent = cli_train(
        "CartPole-v1", out=out, steps=800, progress=False, episodes=2, n_envs=4, say=said.append
    )
    assert any(text.startswith("evaluation: return") for text in said)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == agent.metrics_ and rows[-1]["step"] == 800 and {"return", "seconds"} <= set(rows[-1])
    page = write_report([out]).read_text()
    assert "return over step" in page.lower() and "return over seconds" in page.lower()
    with pytest.raises(OptionError, match="unknown option"):
        cli_train("CartPole-v1", learning_rate=1.0, say=said.append)
    if not _can_render():
        pytest.skip("pygame is not installed")
    from PIL import Image

    path = cli_play(out, say=said.append)
    with Image.open(path) as picture:
        assert picture.n_frames > 5 and picture.size == (600, 400)
        first = np.asarray(picture.convert("RGB")).copy()
        picture.seek(picture.n_frames - 1)
        assert not np.array_equal(first, np.asarray(picture.convert("RGB")))


def _can_render() -> bool:
    try:
        import pygame  # noqa: F401
    except ImportError:
        return False
    return True


def test_what_an_agent_sees_is_recorded_when_nothing_renders(tmp_path: Path) -> None:
    from PIL import Image

    from headrace.agents.record import record_episode

    agent = hr.ActorCritic(Glow, n_envs=2, cnn="small")
    recording = record_episode(agent, tmp_path / "seen.gif")
    assert recording.steps == 5 and recording.total == 5.0 and recording.notes
    with Image.open(recording.path) as picture:
        assert picture.n_frames == 6 and picture.size == (180, 180)
    with pytest.raises(OptionError, match="gif or"):
        record_episode(agent, tmp_path / "seen.txt")


class Glow(Spaces):
    """Random images, five an episode; takes no render_mode."""

    def __init__(self) -> None:
        super().__init__(OBSERVATIONS["image"], spaces.Discrete(2))


def test_atari_is_stepped_through_its_own_vector_environment() -> None:
    pytest.importorskip("ale_py")
    agent = hr.ActorCritic("ALE/Pong-v5", n_envs=2, cnn="small", env_options={"noop_max": 1})
    agent.learn(steps=20)
    assert agent.config.policy == "cnn" and agent.config.clip_rewards == 1.0
    assert agent.plan["autoreset"] == "NextStep" and agent.observations.leaves[0].shape == (4, 84, 84)
    agent.close()
