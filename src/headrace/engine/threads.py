"""How many intra-op threads the step gets on a CPU: measured while training, and measured again now and then.

Two threads that share busy cores wait for each other at every matrix product: a small model then runs ten times
slower than on one thread. Which count is faster depends on the model, the batch and whatever else runs on the
machine, so the updates themselves are the trial: a few with one thread, a few with all. `ThreadTrial` is the
pure decision; nothing here changes what is computed beyond the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUNDS = 3  # turns that each count gets before the first decision; the best of them counts, noise only slows
LOOK_AGAIN_S = 10.0  # the machine's other load changes; 1 % of the time is spent on looking
TRIAL_S = 0.02  # one turn


@dataclass
class ThreadTrial:
    """Which thread count comes next, given the speeds seen so far."""

    counts: tuple[int, ...]
    """Candidates; the first is the one to begin with."""
    best: dict[int, float] = field(default_factory=dict)
    """Count → best updates per second of the current trial."""
    turns: int = 0
    decided: int | None = None
    decided_at_s: float = 0.0

    @property
    def trying(self) -> bool:
        return self.decided is None

    @property
    def current(self) -> int:
        """The count that the next stretch should use."""
        if self.decided is not None:
            return self.decided
        return self.counts[self.turns % len(self.counts)]

    def observe(self, updates: int, elapsed_s: float, now_s: float) -> None:
        """A stretch of so many updates took so long with `current` threads."""
        if len(self.counts) == 1:
            self.decided = self.counts[0]
            return
        if self.decided is not None:
            if now_s - self.decided_at_s >= LOOK_AGAIN_S:
                self.best, self.turns, self.decided = {}, 0, None
            return
        rate = updates / max(elapsed_s, 1e-9)
        self.best[self.current] = max(self.best.get(self.current, 0.0), rate)
        self.turns += 1
        if self.turns >= ROUNDS * len(self.counts):
            self.decided = max(self.counts, key=lambda count: self.best[count])
            self.decided_at_s = now_s

    @property
    def gain(self) -> float:
        """How many times faster the best count was than the worst."""
        return max(self.best.values()) / min(self.best.values()) if self.best else 1.0


def candidates(cores: int, *, deterministic: bool) -> tuple[tuple[int, ...], str]:
    """The counts to try, and why."""
    if cores == 1:
        return (1,), "there is one core"
    if deterministic:
        return (1,), "deterministic=True: one thread adds in one order"
    return (1, cores), f"one and {cores} threads are tried while training, and the faster one is kept"
