"""Makes the vector environment that was asked for, and says what is odd about it.

Asked for may be an id of Gymnasium's registry, a function that makes one environment or a vector environment, one
environment, or a vector environment (Gymnasium's, ale-py's, EnvPool's, a user's own: anything with ``num_envs``,
``single_observation_space``, ``single_action_space``, ``reset`` and ``step``). Only ids and functions can be sent to
workers, since each worker makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import MissingExtraError, OptionError, missing_extra, nearest

_EXTRAS = {
    "Box2D": "gymnasium[box2d]",
    "box2d": "gymnasium[box2d]",
    "pygame": "gymnasium[classic-control]",
    "mujoco": "gymnasium[mujoco]",
    "ale_py": "headrace[agents]",
}
_VECTOR_PARTS = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")


@dataclass(kw_only=True)
class Made:
    """A vector environment and what to tell the user about it."""

    env: Any
    name: str
    notes: list[str] = field(default_factory=list)


def gymnasium_with_atari() -> Any:
    """The gymnasium module, with ale-py's environments registered when ale-py is installed."""
    # The support prompt of pygame is printed on import and has no place in a progress display.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import gymnasium
    except ImportError as error:
        raise missing_extra("gymnasium", "agents", "an actor-critic agent") from error
    try:
        import ale_py

        if "ALE/Pong-v5" not in gymnasium.registry:
            gymnasium.register_envs(ale_py)
    except ImportError:
        pass
    return gymnasium


def is_vector(env: Any) -> bool:
    return all(hasattr(env, part) for part in _VECTOR_PARTS)


def can_travel(env: Any) -> bool:
    """Whether workers can make this environment themselves."""
    return isinstance(env, str) or (callable(env) and not is_vector(env))


def make(
    env: Any, n_envs: int, *, vectorization: str = "auto", options: dict[str, Any] | None = None
) -> Made:
    """The vector environment for ``env``; ``n_envs`` is ignored when ``env`` already is one."""
    gymnasium = gymnasium_with_atari()
    if isinstance(env, str):
        vector = _from_id(gymnasium, env, n_envs, vectorization, dict(options or {}))
        made = Made(env=vector, name=env)
    elif is_vector(env):
        made = Made(env=env, name=type(env).__name__)
    elif isinstance(env, gymnasium.Env):
        made = Made(env=gymnasium.vector.SyncVectorEnv([lambda: env]), name=_name_of(env))
    elif callable(env):
        made = _from_function(gymnasium, env, n_envs, vectorization, dict(options or {}))
    else:
        raise OptionError(
            f"env={env!r} is a {type(env).__name__}; give an id such as 'CartPole-v1', a function that makes an "
            "environment, or a vector environment"
        )
    skipped = double_frame_skip(made.env)
    if skipped:
        made.notes.append(skipped)
    return made


def _from_function(
    gymnasium: Any, function: Callable[..., Any], n_envs: int, vectorization: str, options: dict[str, Any]
) -> Made:
    first = function(**options)
    if is_vector(first):
        return Made(env=first, name=type(first).__name__)
    # The first is used for row 0: a second call might print, open a window or be slow.
    waiting = [first]
    if vectorization == "async":
        first.close()
        makers = [lambda: function(**options)] * n_envs
        return Made(env=gymnasium.vector.AsyncVectorEnv(makers), name=_name_of(first))
    makers = [lambda: waiting.pop() if waiting else function(**options)] * n_envs
    return Made(env=gymnasium.vector.SyncVectorEnv(makers), name=_name_of(first))


def _from_id(gymnasium: Any, id_: str, n_envs: int, vectorization: str, options: dict[str, Any]) -> Any:
    modes = {"auto": None, "sync": "sync", "async": "async", "vector": "vector_entry_point"}
    if vectorization not in modes:
        raise OptionError(f"vectorization={vectorization!r}: choose auto, sync, async or vector")
    if id_.startswith("envpool:"):
        return _from_envpool(id_.removeprefix("envpool:"), n_envs, options)
    if id_.startswith("ALE/") and vectorization in ("auto", "vector"):
        # The learner clips rewards itself when asked to, so that reported returns stay the game's own.
        options = {"reward_clipping": False, **options}
    try:
        return gymnasium.make_vec(id_, num_envs=n_envs, vectorization_mode=modes[vectorization], **options)
    except gymnasium.error.UnregisteredEnv as error:
        raise OptionError(unknown_id(gymnasium, id_)) from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _missing(id_, error) from error
    except gymnasium.error.Error as error:
        raise OptionError(f"the environment {id_!r} could not be made: {error}") from error


def _from_envpool(task: str, n_envs: int, options: dict[str, Any]) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise MissingExtraError(
            f"{task!r} from EnvPool needs the package envpool; pip install envpool"
        ) from error
    return envpool.make(task, env_type="gymnasium", num_envs=n_envs, **options)


def unknown_id(gymnasium: Any, id_: str) -> str:
    """What to say about an id that is not registered: the nearest ones, and what might be missing."""
    if id_.startswith("ALE/") and "ALE/Pong-v5" not in gymnasium.registry:
        return f"the environment {id_!r} needs the package 'ale_py'; pip install 'headrace[agents]'"
    registered = list(gymnasium.registry)
    guess = nearest(id_, registered)
    stem = id_.split("-v")[0].lower()
    versions = sorted(name for name in registered if name.split("-v")[0].lower() == stem)
    near = versions or ([guess] if guess else [])
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown environment {id_!r}: {hint}{len(registered)} are registered, gymnasium.pprint_registry() lists them; "
        "one of another package needs that package imported first"
    )


def _missing(id_: str, error: Exception) -> MissingExtraError:
    text = str(error)
    for package, extra in _EXTRAS.items():
        if package in text:
            return MissingExtraError(f"the environment {id_!r} needs {package}; pip install '{extra}'")
    return MissingExtraError(f"the environment {id_!r} needs a package that is not installed: {text}")


def _name_of(env: Any) -> str:
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def wrapper_chain(env: Any) -> list[Any]:
    """The environment, what it wraps, and so on inwards; of a vector environment, the first row's chain."""
    rows = getattr(getattr(env, "unwrapped", env), "envs", None)
    env = rows[0] if rows else env
    chain = [env]
    while hasattr(chain[-1], "env"):
        chain.append(chain[-1].env)
    return chain


def double_frame_skip(env: Any) -> str | None:
    """A sentence when both the emulator and a wrapper skip frames, else None."""
    inner, outer = 1, 1
    for layer in wrapper_chain(env):
        for attribute in ("frame_skip", "_skip"):
            value = layer.__dict__.get(attribute) if hasattr(layer, "__dict__") else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                outer = max(outer, value)
        value = getattr(layer, "__dict__", {}).get("_frameskip")
        if value is not None:
            inner = max(value) if isinstance(value, tuple) else int(value)
    if inner > 1 and outer > 1:
        return (
            f"frames are skipped twice: the emulator repeats each action {inner} times and a wrapper {outer} times, "
            f"so that one step is {inner * outer} frames; make the environment with frameskip=1"
        )
    return None
