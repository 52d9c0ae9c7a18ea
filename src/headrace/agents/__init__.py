"""Actor-critic agents: synchronous inside a process, asynchronous between processes (HSA2C).

One step's way through the folder: `environments` makes a vector environment, `driver` steps it and tells transitions
from resets, a learner (`handwritten` or `torch_learner`) acts, `rollout` keeps what happened, `returns` turns it into
advantages, the learner updates. `loop` is that cycle; `synchronous` runs one, `worker` and `supervisor` run several
against a `store`.

Names are imported on first use: a worker process needs neither the agent nor its run folder.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ActorCritic": "headrace.agents.agent",
    "Evaluation": "headrace.agents.evaluate",
    "cli_play": "headrace.agents.command",
    "cli_train": "headrace.agents.command",
}
__all__ = ["ActorCritic", "Evaluation", "cli_play", "cli_train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace.agents' has no attribute {name!r}")
