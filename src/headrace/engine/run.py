"""What `headrace.fit` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headrace.types import Plan


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished or interrupted training run."""

    model: nn.Module
    """The trained module, the one that was passed in when a module was passed in."""
    metrics: list[dict[str, Any]] = field(repr=False)
    """Rows in the order they were made: ``kind`` is ``"train"`` within an epoch and ``"epoch"`` at its end."""
    plan: Plan = field(repr=False)
    path: Path | None
    """The run's folder, or None when nothing was written."""
    stopped_by: str
    """Why training ended, in words."""
    steps: int
    """Updates taken, those before a resume included."""

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows made at the end of each epoch."""
        return [row for row in self.metrics if row["kind"] == "epoch"]

    @property
    def last(self) -> dict[str, Any]:
        """The newest row; empty when no update was taken."""
        return self.metrics[-1] if self.metrics else {}
