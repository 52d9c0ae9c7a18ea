"""Where measurements are kept: one JSON file per machine, disk and torch version in the user's cache folder.

A file that is missing, damaged, of an older format or without a field that is wanted counts as no file, so
the machine is measured again. A file is written under another name and renamed, so a reader never sees half
of one. A cache folder that cannot be written costs a second measurement, nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.hardware import system
from headrace.types import Accelerator, Hardware

FORMAT = 1
"""Raised whenever a field changes its meaning, so that older files are measured again."""


def folder() -> Path:
    """The user's cache folder for Headrace."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "headrace"


def file_for(path: Path, torch_version: str) -> Path:
    """The file for this machine, the disk under ``path`` and this torch."""
    device = path.stat().st_dev
    parts = (_machine(), str(device), torch_version)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(
        r"[^A-Za-z0-9.+-]", "_", f"torch-{torch_version}-disk-{os.major(device)}-{os.minor(device)}"
    )
    return folder() / f"hardware-{readable}-{digest}.json"


def _machine() -> str:
    """What tells this machine, or this container's share of one, from another."""
    identity = ""
    with contextlib.suppress(OSError):
        identity = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    driver = str(system.has_cuda_driver())
    return "\n".join(
        (identity or platform.node(), system.processor_name(), str(system.usable_cores()), visible, driver)
    )


def load(file: Path) -> Hardware | None:
    """The measurement saved in ``file``, or None when there is none that can be trusted."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["format"] != FORMAT:
            return None
        values = saved["hardware"]
        _check(Hardware, values)
        for accelerator in values["accelerators"]:
            _check(Accelerator, accelerator)
        return Hardware.from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save(hardware: Hardware, file: Path) -> bool:
    """Write the measurement; False when the folder cannot be written."""
    text = json.dumps({"format": FORMAT, "hardware": hardware.to_dict()}, indent=2)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, text)
    except OSError:
        return False
    return True


def _replace(file: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as temporary:
            temporary.write(text)
            temporary.flush()
            os.fsync(temporary.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _check(record: type[Hardware] | type[Accelerator], values: Mapping[str, Any]) -> None:
    """A ValueError unless ``values`` has exactly the record's fields, numbers finite and not negative."""
    names = {field.name for field in dataclasses.fields(record)}
    if set(values) != names:
        raise ValueError(f"fields differ: {sorted(set(values) ^ names)}")
    for field in dataclasses.fields(record):
        value = values[field.name]
        if field.type in ("int", "float"):
            number = isinstance(value, int if field.type == "int" else (int, float)) and not isinstance(
                value, bool
            )
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} is {value!r}")
        elif field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}")
