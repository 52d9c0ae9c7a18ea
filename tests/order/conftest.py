"""Makes the naive float64 code of tests/oracles/order.py importable as ``order_oracle``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parent.parent / "oracles" / "order.py"
_spec = importlib.util.spec_from_file_location("order_oracle", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["order_oracle"] = _module
_spec.loader.exec_module(_module)
