"""When a run ends: pure rules over how far it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.types import State


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The limits a run was given; None where there is none."""

    passes: int | None = None
    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    patience: int | None = None

    def after_update(self, step: int, seconds: float) -> str | None:
        """Why to stop now, or None."""
        if self.steps is not None and step >= self.steps:
            return f"{step} updates done"
        if self.seconds is not None and seconds >= self.seconds:
            return f"{self.seconds:g} s are over"
        return None

    def after_loss(self, loss: float) -> str | None:
        if self.target_loss is not None and loss <= self.target_loss:
            return f"loss {loss:.6g} is at most the target {self.target_loss:g}"
        return None

    def after_pass(self, passes: int, best: Best) -> str | None:
        if self.passes is not None and passes >= self.passes:
            return f"{passes} epoch{'s' if passes != 1 else ''} done"
        if self.patience is not None and best.stale_epochs >= self.patience:
            return f"no better loss than {best.loss:.6g} in {best.stale_epochs} epochs"
        return None


@dataclass
class Best:
    """The best loss of an epoch so far, and how many epochs ago it was."""

    loss: float = math.inf
    stale_epochs: int = 0

    def observe(self, loss: float) -> bool:
        """True when this epoch is the best so far."""
        if loss < self.loss:
            self.loss, self.stale_epochs = loss, 0
            return True
        self.stale_epochs += 1
        return False

    def state_dict(self) -> State:
        return {"loss": self.loss, "stale_epochs": self.stale_epochs}

    def load_state_dict(self, state: State) -> None:
        self.loss, self.stale_epochs = float(state["loss"]), int(state["stale_epochs"])
