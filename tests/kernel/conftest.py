"""The oracle for kernel tests, and quiet estimators."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_FILE = Path(__file__).parent.parent / "oracles" / "kernel.py"


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle_kernel", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
