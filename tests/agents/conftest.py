"""Makes `agent_worlds` importable, here and in the worker processes that tests start.

Where gymnasium is missing, the tests that need no environment still run.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

if importlib.util.find_spec("gymnasium") is None:
    needy = ("agent", "driver", "gradients", "learning", "machines", "workers")
    collect_ignore = [f"test_{name}.py" for name in needy]
