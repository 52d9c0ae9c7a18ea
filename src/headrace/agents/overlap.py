"""Acting and learning at once: a thread acts on the next rollout while this one learns from the last.

Two learners take turns. While one learns, the other acts, with parameters that are one update old and that nobody
changes meanwhile. Between the two, when neither runs, the newest parameters and the normalisation are handed over;
the optimiser's state is one and the same for both. A rollout is therefore learned from with parameters one update newer
than it was acted with, which ``correction="vtrace"`` corrects for.

It pays where the environment or the network releases the interpreter lock (emulators, convolutions) and a second
core is free; for CartPole it costs more than it saves. Who does what when is fixed, so equal seeds still give equal
parameters; the episode statistics of a row of metrics may or may not hold those of the rollout under way.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.agents.config import Config
from headrace.agents.driver import Driver
from headrace.agents.loop import Loop
from headrace.agents.rollout import Learner, Rollout
from headrace.errors import OptionError


class OverlappedLoop(Loop):
    """A `Loop` whose `collect` gives the rollout that was acted during the last `update`.

    The first of the two learners is the agent's own: after every `update` it holds the newest parameters.
    """

    def __init__(self, config: Config, driver: Driver, learner: Learner, twin: Any) -> None:
        super().__init__(config, driver, learner)
        if config.policy == "lstm":
            raise OptionError(
                "overlap=True needs a policy without memory; the two learners would each keep half of it"
            )
        self._own = learner
        self._sides: list[tuple[Any, Rollout]] = [
            (learner, self.rollout), (twin, Rollout(config.n_steps, driver.n))
        ]  # fmt: skip
        twin.optimizer.state = self._sides[0][0].optimizer.state
        self._newest = learner.theta.copy()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="actor")
        self._acting: Future[None] | None = None
        self._actor = 0

    def collect(self) -> None:
        """Wait for the rollout under way, start acting the next, and make the finished one ready to learn from."""
        if self._acting is None:
            self._hand_over(self._actor)
            self._acting = self._thread.submit(self._act, self._actor)
        self._acting.result()
        finished, self._actor = self._actor, 1 - self._actor
        self._hand_over(self._actor)
        self._hand_over(finished)
        self._acting = self._thread.submit(self._act, self._actor)
        self.learner, self.rollout = self._sides[finished]

    def update(self, lr: float, report: bool = False) -> dict[str, float]:
        losses = super().update(lr, report)
        self._newest = self.learner.theta.copy()
        return losses

    def finish(self) -> None:
        """Let the rollout under way end, unused, and leave the newest parameters with the agent's own learner."""
        if self._acting is not None:
            self._acting.result()
            self._acting = None
        newest = self.learner
        self._own.set_theta(self._newest)
        for mine, theirs in zip(self._own.moment_list, newest.moment_list, strict=True):
            mine.take(theirs)

    def _hand_over(self, side: int) -> None:
        learner = self._sides[side][0]
        learner.set_theta(self._newest)
        for mine, theirs in zip(learner.moment_list, self.learner.moment_list, strict=True):
            mine.take(theirs)

    def _act(self, side: int) -> None:
        learner, rollout = self._sides[side]
        self.act_rollout(learner, rollout)
