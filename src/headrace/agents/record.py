"""Plays one episode and writes its frames as an animation: GIF through pillow, MP4 through OpenCV or imageio.

Frames come from the environment's own ``render()``. The agent sees what it was trained on: the episode is played in a
vector environment of one row, made as the agent's was, with ``render_mode="rgb_array"``. Atari's vector environment
cannot render, so what the agent sees (the newest of its stacked frames) is written instead, and said.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.agents import environments
from headrace.agents.driver import Driver
from headrace.errors import DataError, OptionError, missing_extra

if TYPE_CHECKING:
    from headrace.agents.agent import ActorCritic

Array = NDArray[Any]
KINDS = (".gif", ".mp4")
_GIF_FPS = 25
_LEAST_SIDE = 160  # pixels; smaller frames are enlarged by whole factors, so that they can be looked at


@dataclass(frozen=True)
class Recording:
    """One episode that was written down."""

    path: Path
    total: float
    """The environment's own rewards, added up."""
    steps: int
    frames: int
    notes: tuple[str, ...] = ()


def record_episode(
    agent: ActorCritic,
    out: str | Path,
    *,
    seed: int = 0,
    deterministic: bool = True,
    fps: int | None = None,
    most_steps: int = 10_000,
) -> Recording:
    """Play one episode with ``agent`` and write it to ``out``, which ends in .gif or .mp4."""
    out = Path(out)
    if out.suffix.lower() not in KINDS:
        raise OptionError(f"{out.name} must end in .gif or .mp4")
    env, notes = _rendering_env(agent)
    try:
        frames, total, steps = _play(agent, env, seed, deterministic, most_steps)
    finally:
        env.close()
    rate = fps or int(env.metadata.get("render_fps") or 30)
    out.parent.mkdir(parents=True, exist_ok=True)
    (_write_gif if out.suffix.lower() == ".gif" else _write_mp4)(out, frames, rate)
    return Recording(out, total, steps, len(frames), tuple(notes))


def _rendering_env(agent: ActorCritic) -> tuple[Any, list[str]]:
    if not environments.can_travel(agent.env):
        raise OptionError("an episode can be recorded when the agent's environment is an id or a function")
    options = {**agent.env_options, "render_mode": "rgb_array"}
    # A vector environment of its own kind may not render (Atari's) or render all rows as one.
    for vectorization in ("sync", agent.vectorization):
        try:
            made = environments.make(agent.env, 1, vectorization=vectorization, options=options)
        except TypeError:
            continue
        if made.env.single_observation_space == agent._made.env.single_observation_space:
            return made.env, []
        made.env.close()
    made = environments.make(agent.env, 1, vectorization=agent.vectorization, options=agent.env_options)
    return made.env, ["the environment cannot render; the frames are what the agent sees"]


def _play(
    agent: ActorCritic, env: Any, seed: int, deterministic: bool, most_steps: int
) -> tuple[list[Array], float, int]:
    driver = Driver(env, agent.observations, keep=1)
    player = agent.player(1, seed)
    driver.reset(seed)
    frames, total, steps = [_frame(env, driver)], 0.0, 0
    while steps < most_steps:
        driver.step(player.act(driver.obs, driver.fresh, deterministic))
        total += float(driver.rewards[0])
        steps += 1
        frames.append(_frame(env, driver))
        if driver.terminated[0] or driver.truncated[0]:
            break
    return frames, total, steps


def _frame(env: Any, driver: Driver) -> Array:
    rendered = env.render() if getattr(env, "render_mode", None) == "rgb_array" else None
    if rendered is not None and len(rendered):
        return _enlarged(np.asarray(rendered[0], np.uint8))
    leaf = next((leaf for leaf in driver.observations.leaves if leaf.kind == "image"), None)
    if leaf is None:
        raise DataError(
            f"{env} renders no frames and its observations are not images: there is nothing to record"
        )
    seen = np.asarray(driver.observations.pick(driver.obs, leaf))[0]
    newest = seen[..., -1] if leaf.channels_last else seen[-1]
    return _enlarged(np.repeat(newest[..., None], 3, axis=2).astype(np.uint8))


def _enlarged(frame: Array) -> Array:
    factor = max(1, -(-_LEAST_SIDE // min(frame.shape[:2])))
    return frame.repeat(factor, 0).repeat(factor, 1)


def _write_gif(out: Path, frames: list[Array], fps: int) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "agents", "a GIF") from error
    # Half of fifty frames a second look as smooth and take half the file; browsers slow faster ones down.
    stride = max(1, round(fps / _GIF_FPS))
    # One palette for all, from a frame of the middle: finding one is a hundred times the work of using it.
    palette = Image.fromarray(frames[len(frames) // 2]).quantize(64)
    kept = [*frames[:-1:stride], frames[-1]]
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in kept]
    images[0].save(out, save_all=True, append_images=images[1:], duration=round(1000 * stride / fps), loop=0)


def _write_mp4(out: Path, frames: list[Array], fps: int) -> None:
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        raise OptionError(
            f"{out.name} needs OpenCV (pip install opencv-python-headless); a .gif needs nothing more"
        ) from error
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(str(out), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))
    writer.release()
