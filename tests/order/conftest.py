"""Makes the naive float64 code and the small models of tests/oracles importable by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name, _file in (("order_oracle", "order.py"), ("order_models", "order_models.py")):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parent.parent / "oracles" / _file)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
