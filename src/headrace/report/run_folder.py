"""The folder of one run: what lies where, and reading and writing the parts that are plain data.

::

    run.json            format version, version of Headrace, when it was made
    plan.json           every decision with its reason
    hardware.json       the machine as measured
    config.toml         the settings that reproduce the run
    metrics.jsonl       one row per measurement
    timeline.json       spans, counters and events; opens in Perfetto
    tensorboard/        the same numbers for TensorBoard
    report.html         the page
    model.safetensors   the trained parameters          (written by the engine)
    state/              what resuming needs             (written by the engine)

Invariant: `run.json` is written first, so a folder without it is not ours and is never written into when it
holds anything. Nothing is pickled.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import RunFolderError
from headrace.report.files import read_rows, replace_text
from headrace.report.toml import dump_toml
from headrace.types import Hardware, Plan

FORMAT_VERSION = 1
"""Raised when a reader of the old format would misread the new one."""

_PARTS = (
    "plan.json",
    "hardware.json",
    "config.toml",
    "metrics.jsonl",
    "timeline.json",
    "tensorboard",
    "report.html",
    "model.safetensors",
    "state",
)

_log = logging.getLogger("headrace")


class RunFolder:
    """One run's folder; made by `create` or `open`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], overwrite: bool = False) -> RunFolder:
        """A new run in an empty or missing folder; with ``overwrite``, an earlier run there is removed."""
        folder = cls(path)
        if folder.path.exists() and not folder.path.is_dir():
            raise RunFolderError(f"the run folder {folder.path} cannot be made: a file of that name is there")
        found = sorted(p.name for p in folder.path.iterdir()) if folder.path.is_dir() else []
        if found and not folder.version_path.is_file():
            raise RunFolderError(
                f"{folder.path} is not empty and holds no run (found {_listed(found)}); name another folder"
            )
        if found and not overwrite:
            raise RunFolderError(
                f"{folder.path} already holds a run; resume it, allow overwriting it, or name another folder"
            )
        try:
            folder._remove_parts()
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._write_version()
        except OSError as error:
            raise RunFolderError(
                f"the run folder {folder.path} cannot be made: {error.strerror}; name another with out="
            ) from error
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """An existing run whose format this version reads."""
        folder = cls(path)
        if not folder.path.is_dir():
            what = "is a file, not a run folder" if folder.path.exists() else "does not exist"
            raise RunFolderError(f"{folder.path} {what}; name a folder that a training run wrote")
        if not folder.version_path.is_file():
            found = sorted(p.name for p in folder.path.iterdir())
            raise RunFolderError(
                f"{folder.path} is not a run folder: it holds no run.json (found {_listed(found)})"
            )
        version = folder._read_json(folder.version_path).get("format")
        if version != FORMAT_VERSION:
            raise RunFolderError(
                f"{folder.path} was written in run format {version}, and this version of Headrace reads "
                f"format {FORMAT_VERSION}; use the version that wrote it, or start a new run"
            )
        return folder

    @classmethod
    def is_run(cls, path: str | os.PathLike[str]) -> bool:
        """Whether there is a run, of any format, in this folder."""
        return cls(path).version_path.is_file()

    @property
    def version_path(self) -> Path:
        return self.path / "run.json"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def hardware_path(self) -> Path:
        return self.path / "hardware.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.json"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def state_path(self) -> Path:
        return self.path / "state"

    def write_plan(self, plan: Plan) -> None:
        replace_text(self.plan_path, _json(plan.to_dict()))

    def read_plan(self) -> Plan:
        values = self._read_json(self.plan_path)
        try:
            return Plan.from_dict(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{self.plan_path} is not a plan ({error}); restore or delete it") from error

    def write_hardware(self, hardware: Hardware) -> None:
        replace_text(self.hardware_path, _json(hardware.to_dict()))

    def read_hardware(self) -> Hardware:
        values = self._read_json(self.hardware_path)
        try:
            return Hardware.from_dict(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{self.hardware_path} does not describe a machine ({error}); restore or delete it"
            ) from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Settings as TOML; entries that are None are left out."""
        replace_text(self.config_path, dump_toml(config))

    def read_config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self._read_text(self.config_path))
        except tomllib.TOMLDecodeError as error:
            raise RunFolderError(
                f"{self.config_path} is not TOML ({error}); correct or restore it"
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole rows; a last line that was cut off is dropped with a warning in the log."""
        rows, note = self.scan_metrics()
        if note:
            _log.warning("%s: %s", self.path, note)
        return rows

    def scan_metrics(self) -> tuple[list[dict[str, Any]], str | None]:
        """All whole rows, and a sentence about a line that was cut off."""
        if not self.metrics_path.exists():
            return [], None
        return read_rows(self.metrics_path)

    def _write_version(self) -> None:
        from headrace import __version__

        made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        replace_text(
            self.version_path, _json({"format": FORMAT_VERSION, "headrace": __version__, "created": made})
        )

    def _remove_parts(self) -> None:
        """Only what a run writes is removed; a user's own notes beside it stay."""
        for name in _PARTS:
            part = self.path / name
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)

    def _read_text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RunFolderError(f"the run in {self.path} holds no {path.name}") from None
        except UnicodeDecodeError as error:
            raise RunFolderError(f"{path} is damaged ({error}); restore or delete it") from error

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            values = json.loads(self._read_text(path))
        except json.JSONDecodeError as error:
            raise RunFolderError(f"{path} is damaged ({error}); restore or delete it") from error
        if not isinstance(values, dict):
            raise RunFolderError(f"{path} holds a {type(values).__name__} where an object is expected")
        return values


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Array scalars as numbers; anything else (a dtype, a path) by its name, for a person to read."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _listed(names: list[str]) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(names[:4]) or "nothing"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
