"""A run's folder as `fit` uses it: what is written before the first update, and what after the last."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import headrace
from headrace.engine import checkpoint
from headrace.engine.options import FitOptions, describe_object
from headrace.engine.records import Records
from headrace.errors import MissingExtraError, RunFolderError
from headrace.hardware import measure
from headrace.report.build import write_report
from headrace.report.run_folder import RunFolder
from headrace.types import Plan, State

MAY_CHANGE = {
    *("epochs", "steps", "seconds", "target_loss", "early_stop", "checkpoint_s"),
    *("tensorboard", "progress", "log_every", "validation", "metrics"),
}
"""Options that a resumed run may set anew."""


def config_of(model: Any, data: Any, options: FitOptions) -> dict[str, Any]:
    """What config.toml says; objects that it cannot hold are described."""
    return {
        "headrace": headrace.__version__,
        "model": model if isinstance(model, str) else describe_object(model),
        "data": str(data) if isinstance(data, str | Path) else describe_object(data),
        "options": options.to_config(),
    }


def load_resumed(out: str | Path, config: dict[str, Any]) -> tuple[State, RunFolder]:
    """The newest checkpoint that can be read of the run in ``out``, which must have been started like this one."""
    folder = RunFolder.open(out)
    _check_unchanged(folder, folder.read_config(), config)
    state, damaged = checkpoint.load_newest(folder.path / "state")
    for sentence in damaged:
        warnings.warn(f"{sentence}; the checkpoint before it is used", stacklevel=2)
    return state, folder


def _check_unchanged(folder: RunFolder, before: dict[str, Any], now: dict[str, Any]) -> None:
    """A resumed run continues the one that was started: what shapes the updates must be the same."""
    old, new = dict(before.get("options", {})), dict(now["options"])
    for name in ("model", "data"):
        old[name], new[name] = before.get(name), now[name]
    different = [
        f"{name}: {old.get(name, 'not set')} then, {new.get(name, 'not set')} now"
        for name in sorted({*old, *new} - MAY_CHANGE)
        if old.get(name) != new.get(name)
    ]
    if different:
        raise RunFolderError(
            f"{folder.path} was started with other settings ({'; '.join(different)}); "
            "resume with the same ones, or start a new run in another folder"
        )


def open_run(
    folder: RunFolder | None, state: State | None, options: FitOptions, config: dict[str, Any]
) -> Records:
    """Records of the run, in its folder if it has one."""
    if folder is None and options.out is not None:
        folder = RunFolder.create(options.out, overwrite=options.overwrite)
    if folder is not None:
        folder.write_config(config)
        folder.write_hardware(measure(quick=True))
    return Records(
        folder,
        tensorboard=options.tensorboard,
        resume_rows=state["rows"] if state else None,
        seconds=state["seconds"] if state else 0.0,
    )


def finish_run(module: nn.Module, records: Records, plan: Plan) -> Plan:
    """Weights, plan and report; the checkpoint is written already."""
    if records.path is None:
        return plan
    weights = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    checkpoint.write_file(records.path / "model.safetensors", checkpoint.to_bytes(weights, {"format": "pt"}))
    records.write_plan(plan)
    records.close()
    try:
        write_report([records.path])
    except (MissingExtraError, RunFolderError) as error:  # the weights are safe; a page can be made again
        plan = plan.with_("report", None, f"{error}; make it later with: headrace report {records.path}")
        records.write_plan(plan)
    return plan


def say_how_to_resume(step: int, records: Records) -> None:
    """After a signal: where everything is and how to go on."""
    if records.path is None:
        text = "stopped after a finished step; nothing was saved, since the run has no folder (out=)"
    else:
        text = f"stopped and saved at step {step}; go on with: headrace train --resume {records.path}"
    Console(stderr=True, soft_wrap=True).print(f"headrace: {text}", highlight=False)
