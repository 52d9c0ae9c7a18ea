"""What a user may choose about learning an order."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import OptionError, unknown
from headrace.order.balance import Rule

KINDS = ("pair", "mean", "recursive", "kh", "probabilistic", "greedy", "herding")
SIGNALS = ("sketch", "exact", "microbatch")
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """What a user may choose about learning an order."""

    kind: str = "pair"
    """``pair``, ``mean``, ``recursive``, ``kh``, ``probabilistic``; for study ``greedy`` and ``herding``."""
    signal: str = "sketch"
    """``sketch``, ``exact`` or ``microbatch``."""
    k: int = 256
    """Numbers per sketch. Higher is closer to exact and slower."""
    seed: int = 0
    depth: int = 2
    """``recursive`` only: levels of the tree."""
    scale: float = 1.0
    """``probabilistic`` only: see `headrace.order.balance.Rule`."""
    reduction: str = "mean"
    """How the loss joins the examples of a batch. A mean divides by the batch size, which is undone here."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("kind", self.kind, KINDS),
            ("signal", self.signal, SIGNALS),
            ("reduction", self.reduction, REDUCTIONS),
        ):
            if value not in known:
                raise unknown(what, value, known)
        if self.k < 1:
            raise OptionError(f"k={self.k!r} was asked for; a sketch has at least 1 number")
        if self.signal == "exact" and self.kind in ("recursive", "greedy", "herding"):
            raise OptionError(
                f"kind={self.kind!r} needs the vectors themselves, which signal='exact' never makes; "
                "use signal='sketch' (a larger k= is closer to exact) or kind='pair'"
            )

    def rule(self) -> Rule:
        names = {"probabilistic": "random", "kh": "adaptive"}
        return Rule(name=names.get(self.kind, "greedy"), scale=self.scale)
