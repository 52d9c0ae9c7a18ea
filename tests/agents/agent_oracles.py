"""Loads tests/oracles/agents.py, whose name would otherwise hide behind this folder's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "agents_oracle", Path(__file__).parent.parent / "oracles" / "agents.py"
)
assert _spec and _spec.loader
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)
