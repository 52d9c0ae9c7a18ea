"""Files that are whole or not there: text replaced in one step, and JSON lines that survive a kill.

A row of a `.jsonl` file is one line. A process that is killed can leave a last line that is cut off; readers
drop it and say so. Any other line that cannot be read is an error, because nothing here writes one.

JSON has no word for values that are not finite, and a diverged loss must not become a gap: they are written
as the strings "NaN", "Infinity" and "-Infinity" and turned back when read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import RunFolderError

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that at every moment either the old or the new file is there."""
    partial = path.with_name(f".{path.name}.partial")
    data = text.encode()
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RunFolderError(
            f"{path} could not be written: {error.strerror}; {len(data):,} bytes are needed and "
            f"{shutil.disk_usage(path.parent).free:,} are free. What was there before is intact"
        ) from error


def encode_row(row: Mapping[str, Any]) -> str:
    """One row as strict JSON, without the line end. Tensors and arrays become numbers and lists."""
    try:
        return _encode(row)
    except ValueError:
        return json.dumps(_spell_out(row), allow_nan=False)


def decode_row(line: str | bytes) -> dict[str, Any]:
    """The row that `encode_row` was given."""
    row = _restore(json.loads(line))
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    return row


def read_rows(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """All whole rows, and a sentence about a last line that was cut off (None when all is whole)."""
    lines = path.read_bytes().split(b"\n")
    cut_off = lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode_row(line))
        except ValueError as error:
            raise RunFolderError(
                f"line {number} of {path} cannot be read ({error}); correct or delete that line"
            ) from error
    if not cut_off:
        return rows, None
    return rows, f"the last line of {path.name} was cut off ({len(cut_off)} bytes) and is left out"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these rows."""
    replace_text(path, "".join(f"{encode_row(row)}\n" for row in rows))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON; give a number, a string or a list")


# json.dumps with any option makes an encoder for every call, which costs more than the encoding.
_encode = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _spell_out(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spell_out(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(one) for one in value]
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int):
        return value
    return _spell_out(_plain(value))


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_restore(one) for one in value]
    return value
