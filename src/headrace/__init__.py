"""Headrace: stochastic gradient descent at the speed of the machine it runs on.

Public names are imported on first use, so ``import headrace`` costs milliseconds and probes nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ActorCritic": "headrace.agents",
    "BalancedSampler": "headrace.order",
    "Hardware": "headrace.types",
    "HeadraceError": "headrace.errors",
    "KernelClassifier": "headrace.kernel",
    "KernelRegressor": "headrace.kernel",
    "LatentDirichletAllocation": "headrace.topics",
    "Loader": "headrace.engine",
    "Plan": "headrace.types",
    "Run": "headrace.engine",
    "fit": "headrace.training",
    "measure": "headrace.hardware",
    "open_source": "headrace.source",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
