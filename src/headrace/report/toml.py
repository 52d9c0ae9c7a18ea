"""A dictionary as TOML, for `config.toml`; the standard library reads TOML and does not write it.

TOML has no null: entries that are None are left out, and a reader takes a missing entry for None.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import OptionError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(values: Mapping[str, Any]) -> str:
    """TOML text that ``tomllib.loads`` turns back into ``values`` without its None entries."""
    return "\n".join(_table(values, ())).strip("\n") + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """The lines of one table: its plain entries first, as TOML asks, then its subtables."""
    kept = {key: value for key, value in values.items() if value is not None}
    plain = {key: value for key, value in kept.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value, (*path, key))}" for key, value in plain.items()]
    for key, value in kept.items():
        if isinstance(value, Mapping):
            below = (*path, key)
            lines += ["", f"[{'.'.join(map(_key, below))}]", *_table(value, below)]
    return lines


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any, path: tuple[str, ...]) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str | os.PathLike):
        return _string(os.fspath(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one, path) for one in value if one is not None)}]"
    if isinstance(value, Mapping):
        inner = (f"{_key(k)} = {_value(v, (*path, k))}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(inner)}}}"
    raise OptionError(
        f"the setting {'.'.join(path)} is a {type(value).__name__}, which config.toml cannot hold; "
        "give its name or its numbers"
    )


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))  # 1e-05, without a point, is a TOML float
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _string(text: str) -> str:
    """A basic string; JSON's escapes are TOML's, but for the delete character and surrogate pairs."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
