"""What ``headrace train --env ID`` and ``headrace play RUN`` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.agents.agent import ActorCritic
from headrace.agents.config import Config
from headrace.agents.record import record_episode
from headrace.errors import OptionError, unknown

_STEPS = 200_000
"""How long `headrace train --env` learns when nothing is said: what CartPole needs, with room."""


def cli_train(
    env: str,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    steps: int | None = None,
    seconds: float | None = None,
    target_return: float | None = None,
    progress: bool = True,
    episodes: int = 20,
    say: Callable[[str], None] = print,
    **options: Any,
) -> ActorCritic:
    """Train on ``env``, write the run folder, play ``episodes`` episodes, and say how it went.

    ``options`` are those of `ActorCritic`; ``None`` means not given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        known = {*Config.__dataclass_fields__, "env_options", "vectorization", "cluster"}
        if name not in known:
            raise unknown("option of an agent", name, known)
    if steps is None and seconds is None and target_return is None:
        steps = _STEPS
    folder = Path(out) if out is not None else Path("runs") / env.replace("/", "-").replace(":", "-")
    agent = ActorCritic(env, **given)
    try:
        say(str(agent.plan))
        agent.learn(
            steps,
            seconds=seconds,
            target_return=target_return,
            out=folder,
            overwrite=overwrite,
            progress=progress,
        )
        say(f"stopped: {agent.stopped_}")
        say(f"evaluation: {agent.evaluate(episodes)}")
        say(f"run: {folder} (headrace report {folder}; headrace play {folder})")
    finally:
        agent.close()
    return agent


def cli_play(
    run: str | Path,
    *,
    out: str | Path | None = None,
    seed: int = 0,
    stochastic: bool = False,
    fps: int | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Record one episode of the agent in the folder ``run`` and say where it lies."""
    if fps is not None and fps < 1:
        raise OptionError(f"fps={fps!r} must be at least 1")
    agent = ActorCritic.load(run)
    try:
        path = Path(out) if out is not None else Path(run) / "episode.gif"
        recording = record_episode(agent, path, seed=seed, deterministic=not stochastic, fps=fps)
    finally:
        agent.close()
    for note in recording.notes:
        say(f"note: {note}")
    say(f"return {recording.total:g} in {recording.steps} steps: {recording.path}")
    return recording.path
