"""A saved agent: ``model.safetensors`` (parameters and normalisation) and ``agent.json`` (everything else).

Nothing is pickled: loading a file from a stranger runs none of their code. What cannot be written down in JSON, a
user's own environment function or policy module, is passed to `load` again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.agents.rollout import Learner
from headrace.errors import ModelError, RunFolderError

FORMAT = 2
"""2: the layer over the convolutions takes pixels one by one with their channels together, not channel by channel."""
_SUMS = "normalization."
_PARTS = ("env", "name", "env_options", "vectorization", "steps", "config", "observations", "actions")


def write_agent(folder: str | Path, learner: Learner, about: dict[str, Any]) -> Path:
    """Write both files into ``folder``, which is made when missing."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in learner.to_named().items()}
    for i, moments in enumerate(learner.moment_list):
        arrays[f"{_SUMS}{i}"] = moments.sums
    partial = folder / ".model.safetensors.partial"
    save_file(arrays, partial)
    partial.replace(folder / "model.safetensors")
    text = json.dumps({"format": FORMAT, **about}, indent=2) + "\n"
    (folder / "agent.json").write_text(text, encoding="utf-8")
    return folder


def read_about(folder: str | Path) -> dict[str, Any]:
    """What `write_agent` was told, checked for its format."""
    path = Path(folder) / "agent.json"
    if not path.is_file():
        raise RunFolderError(f"{folder} holds no agent.json; name a folder that an agent was saved to")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); restore it") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise RunFolderError(
            f"{path} is not an agent in format {FORMAT}; use the version of Headrace that wrote it"
        )
    missing = [part for part in _PARTS if part not in about]
    if missing:
        raise RunFolderError(f"{path} is damaged ({', '.join(missing)} missing); restore it")
    return about


def read_parameters(folder: str | Path, learner: Learner) -> None:
    """Fill a started learner with the saved parameters."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(folder) / "model.safetensors"
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read ({error})") from error
    own = learner.to_named()
    wrong = [_difference(name, own[name], arrays.get(name)) for name in own]
    found = [text for text in wrong if text]
    if found:
        raise ModelError(f"{path} holds another network: {'; '.join(found[:3])}")
    learner.from_named({name: arrays[name] for name in own})
    for i, moments in enumerate(learner.moment_list):
        moments.sums[:] = arrays[f"{_SUMS}{i}"]
        moments.refresh()


def _difference(name: str, own: NDArray[Any], saved: NDArray[Any] | None) -> str | None:
    if saved is None:
        return f"{name} is missing"
    if saved.shape != own.shape:
        return f"{name} is {saved.shape}, and {own.shape} is needed"
    return None


def check_spaces(about: dict[str, Any], observations: Any, actions: Any, env: str) -> None:
    """Refuse an agent that was saved for other spaces, saying which differ."""
    for what, saved, own in (
        ("observations", about["observations"], observations),
        ("actions", about["actions"], actions),
    ):
        if saved != own:
            raise ModelError(
                f"the saved agent was trained on {about.get('env') or 'another environment'} with {what} {saved}, and "
                f"{env} has {own}; load it with the environment that it was trained on"
            )
