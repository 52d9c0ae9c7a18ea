"""`headrace train` behind its options: where settings come from, and the table at the end.

Settings come from a run's config file (``--config`` or ``--resume``) and from the command line, which wins.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.engine.fit import fit
from headrace.engine.run import Run
from headrace.errors import OptionError, RunFolderError
from headrace.report.run_folder import RunFolder


def train(
    data: str | None,
    model: str | None,
    given: Mapping[str, Any],
    *,
    config: Path | None,
    resume: Path | None,
    fit: Callable[..., Run] = fit,
) -> Run:
    """Train from the command line. ``given`` holds only the options that were typed; ``fit`` does the work."""
    if config is not None and resume is not None:
        raise OptionError("--config starts a new run and --resume continues one; give one of them")
    options: dict[str, Any] = {}
    if resume is not None:
        saved = RunFolder.open(resume).read_config()
        options = dict(saved.get("options", {}), out=str(resume), resume=True)
        data, model = data or _named(saved, "data", resume), model or _named(saved, "model", resume)
    elif config is not None:
        saved = read_config(config)
        options = dict(saved.get("options", {}))
        data, model = data or _named(saved, "data", config), model or _named(saved, "model", config)
    if data is None:
        raise OptionError("what to train on is missing: headrace train DATA --model mlp")
    options.update(given)
    if resume is None and "out" not in options:
        options["out"] = str(free_folder(data, model or "mlp"))
    return fit(model or "mlp", data, **options)


def read_config(path: Path) -> dict[str, Any]:
    """A config file as `headrace.fit` writes it."""
    if path.is_dir():
        return RunFolder.open(path).read_config()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"the config {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise RunFolderError(f"the config {path} is not TOML: {error}") from error


def _named(saved: Mapping[str, Any], key: str, path: Path) -> str:
    value = saved.get(key)
    if not isinstance(value, str) or value.startswith("<"):
        raise RunFolderError(
            f"{path} was started from Python with the {key} {value or 'unsaid'}, which a command line cannot name; "
            f"go on there with headrace.fit(..., out={str(path)!r}, resume=True)"
        )
    return value


def free_folder(data: str, model: str) -> Path:
    """A new folder under runs/, named after data and model."""
    stem = f"{Path(data).stem or 'data'}-{model.partition(':')[0].removesuffix('.py').replace('/', '-')}"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


def summary_rows(run: Run) -> list[dict[str, str]]:
    """The last epochs of a run as text, for the table on the screen."""
    names = {
        "epoch": "epoch", "step": "step", "loss": "loss", "validation_loss": "validation loss",
        "validation_accuracy": "accuracy", "examples": "examples", "seconds": "seconds",
    }  # fmt: skip
    rows = run.epochs or run.metrics[-1:]
    picked = rows if len(rows) <= 10 else [*rows[:3], *rows[-7:]]
    return [{title: _show(row[key]) for key, title in names.items() if key in row} for row in picked]


def _show(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_run(run: Run) -> None:
    """What happened, on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    rows = summary_rows(run)
    if rows:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in rows[0]:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    console.print(f"stopped: {run.stopped_by}", highlight=False)
    if run.path is not None:
        console.print(f"run:     {run.path}", highlight=False)
        report = run.path / "report.html"
        if report.exists():
            console.print(f"report:  {report}", highlight=False)
