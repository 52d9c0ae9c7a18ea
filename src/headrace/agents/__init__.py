"""Actor-critic agents: synchronous inside a process, asynchronous between processes (HSA2C).

One step's way through the folder: `environments` makes a vector environment, `driver` steps it and tells transitions
from resets, a learner (`handwritten` or `torch_learner`) acts, `rollout` keeps what happened, `returns` turns it into
advantages, the learner updates. `loop` is that cycle; `synchronous` runs one, `worker` and `supervisor` run several
against a `store`.
"""

from headrace.agents.agent import ActorCritic
from headrace.agents.evaluate import Evaluation

__all__ = ["ActorCritic", "Evaluation"]
