"""Puts a driver and a learner together for one process: the agent's own, or a worker's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.agents.config import Config
from headrace.agents.rollout import Learner
from headrace.agents.spaces import Actions, Observations


def derive_seeds(seed: int, worker: int, incarnation: int) -> tuple[int, list[int]]:
    """The environment's seed and the learner's, different for every worker and every restart.

    The first worker's first life gets the seed itself: it is the synchronous run.
    """
    entropy = [seed, worker, incarnation]
    if worker == 0 and incarnation == 0:
        return seed % (1 << 31), entropy
    # Vector environments count up from their seed; drawn from 2³¹, ranges of two workers hardly ever meet.
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1), entropy


def is_handwritten(config: Config) -> bool:
    """Whether the hand-written learner serves this configuration."""
    return (
        config.policy == "mlp"
        and config.device == "cpu"
        and config.precision == "float32"
        and not config.compiled
    )


def is_kept(config: Config, observations: Observations) -> bool:
    """Whether the learner of `images` serves it: one image and nothing beside it, on the cores, not compiled."""
    leaves = observations.leaves
    return (
        config.policy == "cnn"
        and config.device == "cpu"
        and not config.compiled
        and len(leaves) == 1
        and leaves[0].kind == "image"
    )


def make_learner(
    config: Config, observations: Observations, actions: Actions, n: int, optimizer: Any, module: Any
) -> Learner:
    """The learner for a configuration, not yet started."""
    kind: str | Callable[..., Any] = optimizer if callable(optimizer) else config.optimizer
    if module is None and is_handwritten(config):
        from headrace.agents.handwritten import HandwrittenLearner

        return HandwrittenLearner(config, observations, actions, n, kind)
    if module is None and is_kept(config, observations):
        from headrace.agents.images import ImageLearner

        return ImageLearner(config, observations, actions, n, kind)
    from headrace.agents.torch_learner import TorchLearner

    return TorchLearner(config, observations, actions, n, kind, module)
