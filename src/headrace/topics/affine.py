"""What a machine sends after several local steps: not a difference, but an affine map.

A local step is λ ← (1 − ρ) λ + ρ λ̂. After B of them from λ0, λ = a λ0 + b with a = Π (1 − ρ) and b ≥ 0, whatever
λ0 was as far as it was only decayed. Adding plain differences of several stale machines can make λ negative: each
takes its ρ of the same λ0 away. Applying a map to the *current* λ cannot: a lies in [0, 1] and b is not negative.
Maps compose, so several pushes can be merged on the way.

Pure functions on anything with arithmetic (numpy arrays, torch tensors); nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.errors import OptionError


@dataclass(frozen=True)
class Push:
    """λ ← decay × λ + addition."""

    decay: float
    addition: Any
    """Of λ's shape, nowhere negative."""
    documents: int = 0
    """How many documents it learned from."""


def push_of(before: Any, after: Any, decay: float, documents: int = 0) -> Push:
    """The map that took ``before`` to ``after`` while everything decayed by ``decay``.

    Lock-free threads may lose an addition, and rounding may leave −1e-7: what is negative is set to zero.
    """
    if not 0.0 <= decay <= 1.0:
        raise OptionError(f"the decay of a push is {decay:g}; it is a product of 1 − ρ and lies in [0, 1]")
    addition = after - decay * before
    return Push(decay, addition * (addition > 0), documents)


def applied(values: Any, push: Push) -> Any:
    """λ after the push."""
    return push.decay * values + push.addition


def joined(pushes: Iterable[Push]) -> Push:
    """One push that does what these do one after another."""
    first, *rest = pushes
    for push in rest:
        first = Push(
            push.decay * first.decay,
            push.decay * first.addition + push.addition,
            first.documents + push.documents,
        )
    return first


def weakened(push: Push, factor: float) -> Push:
    """A push that goes only ``factor`` of the way, for one that comes late: a → 1 − f (1 − a), b → f b."""
    return Push(1.0 - factor * (1.0 - push.decay), factor * push.addition, push.documents)
