"""How many rounds to train on a buffer before the next: ``rounds="auto"``. Pure.

While one buffer loads, rounds on the other cost nothing, up to load time / round time of them. But reuse
changes the optimisation: each round pulls the parameters towards the optimum of this buffer alone. For
linear regression with step size α, curvature λ, M batches in a buffer and K buffers, the error against least
squares is K·tanh(c/2)/tanh(Kc/2) with c = αλMR, so it is harmless while K·c ≲ 1, and what hurts is the
product of step size and rounds. λ is not known in general, therefore the rounds follow the step size down:
at a step size that has fallen to a fraction f of its largest, only the fraction f of the extra rounds is
taken, and a run whose step size goes to zero ends with one round.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROUNDS = 10
"""The most that the method's authors used."""
MEMORY = 0.5
"""Weight of the newest measurement in the running means; a guess that follows a changing disk within two
buffers."""


@dataclass(frozen=True)
class Timing:
    """Running means of what a buffer costs; None before the first measurement."""

    load_s: float | None = None
    round_s: float | None = None

    def with_load(self, seconds: float) -> Timing:
        return Timing(blend(self.load_s, seconds), self.round_s)

    def with_round(self, seconds: float) -> Timing:
        return Timing(self.load_s, blend(self.round_s, seconds))


def blend(old: float | None, new: float) -> float:
    """A running mean that forgets."""
    return new if old is None else (1 - MEMORY) * old + MEMORY * new


def choose_rounds(timing: Timing, step_fraction: float = 1.0, most: int = MAX_ROUNDS) -> tuple[int, str]:
    """The rounds for the next buffer, and why."""
    if timing.load_s is None or timing.round_s is None:
        return 1, "nothing is measured yet"
    free = int(timing.load_s / max(timing.round_s, 1e-9))
    rounds = min(max(free, 1), most)
    why = f"a load takes {timing.load_s:.3g} s and a round {timing.round_s:.3g} s"
    capped = 1 + int((rounds - 1) * min(max(step_fraction, 0.0), 1.0))
    if capped < rounds:
        return (
            capped,
            f"{why}; {rounds} fit, fewer are taken since the step size fell to {step_fraction:.2g} of its "
            f"peak",
        )
    return rounds, why
