"""``workers="auto"``: one device, or several workers where a short trial says that they learn faster.

A trial costs time, and several workers change what a run is: its updates are asynchronous, and no two runs are
alike. So most runs never come to it: `why_single` and `why_single_here` say why, and the plan repeats it. What is
left is measured: the loss's fall per second of the single device and of a few mixes of workers, on copies of
the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.hogbatch.merging import row_s
from headrace.engine.hogbatch.options import HogbatchOptions, check_module
from headrace.engine.hogbatch.trial import Verdict, candidates, run_trial
from headrace.engine.options import FitOptions
from headrace.engine.residence import free_memory, row_bytes
from headrace.engine.task import TorchTask
from headrace.types import Source

WORTH_S = 30.0
"""A shorter run is not worth a trial: 3 % of it would be too short to tell configurations apart."""
SHARE, MOST_S = 0.03, 5.0
DEVICE_STEP_S = 1.5e-4
"""Of a captured step of a small network, to tell a short run from a long one."""
EPOCHS_UNSAID = 20


def why_single(options: FitOptions, cores: int, devices: int) -> str | None:
    """Why a run like this keeps to one device, as far as its options tell; None when it may not."""
    if devices == 0 and cores < 2:
        return "one device: there is one core and no accelerator"
    asked = {
        "deterministic=True": options.deterministic,
        f"device={options.device!r}": options.device not in ("auto", "cpu"),
        f"capture={options.capture!r}": options.capture != "auto",
        "accumulate=": options.accumulate > 1,
        f"precision={options.precision!r}": options.precision != "fp32",
        "transform=": options.transform is not None,
        "steps=, an exact number of updates,": options.steps is not None,
        "a step size that changes within an epoch": options.schedule != "constant",
        "a learned order": not isinstance(options.order, str) or options.order == "balanced",
        "an optimizer other than sgd by name": options.optimizer != "sgd" or bool(options.optimizer_options),
        "momentum": bool(options.momentum),
        "clip=": options.clip is not None,
        "epochs= that is no whole number": options.epochs is not None and options.epochs % 1 != 0,
    }
    for name, so in asked.items():
        if so:
            return f"one device: {name} does not go with several workers, or gains nothing from them"
    return None


def expected_s(task: TorchTask, options: FitOptions, rows: int, cores: int, devices: int) -> float:
    """About how long one device will train."""
    numbers = sum(p.numel() for p in task.module.parameters())
    per_row = row_s(numbers, cores)
    if devices:
        per_row = min(per_row, DEVICE_STEP_S / options.batch_size)
    by_rows = rows * (options.epochs if options.epochs is not None else EPOCHS_UNSAID) * per_row
    if options.seconds is None:
        return by_rows
    return options.seconds if options.epochs is None else min(options.seconds, by_rows)


def why_single_here(
    task: TorchTask, options: FitOptions, source: Source, cores: int, devices: int
) -> str | None:
    """Why this model on this data keeps to one device."""
    seconds = expected_s(task, options, len(source), cores, devices)
    if seconds < WORTH_S:
        return (
            f"one device: the run takes about {seconds:.2g} s, and from {WORTH_S:g} s on a trial is worth it"
        )
    if any(column.sparse for column in source.columns) or len(task.prepare.inputs) != 1:
        return "one device: the input is sparse or not a single column"
    held = row_bytes(source) * len(source)
    if 3 * held > free_memory():
        return f"one device: workers keep the data in memory, and {held / 1e9:.3g} GB do not fit well"
    notes = check_module(task.module, HogbatchOptions(cpu=2))
    if notes:
        return f"one device: {notes[0]}"
    if min(options.batch_size, 512) > len(source):
        return "one device: the data is one batch"
    chain, why = Chain.of(task.module, task.loss_of)
    if chain is None:
        return f"one device: {why}, so CPU workers would be processes, which this does not try by itself"
    steps, why = chain.fits_compiled()
    return None if steps else f"one device: CPU workers' steps are {why}"


def single_on_cores(
    columns: dict[str, Tensor], loss: Callable[..., Tensor], batch: int, lr: float, cores: int
) -> Callable[[nn.Module, float, int], tuple[int, float]]:
    """What one device would do, for the trial: a chain's steps with as many intra-op threads as they are worth."""

    def train(module: nn.Module, seconds: float, seed: int) -> tuple[int, float]:
        chain, _ = Chain.of(module, loss)
        assert chain is not None
        before = torch.get_num_threads()
        torch.set_num_threads(chain.intra_op_threads(batch, cores))
        rows = torch.randperm(len(columns["x"]), generator=torch.Generator().manual_seed(seed))
        used, began = 0, time.perf_counter()
        try:
            for picked in rows.split(batch):
                chain.step(columns["x"][picked], columns["y"][picked], lr)
                used += len(picked)
                if time.perf_counter() - began >= seconds:
                    break
        finally:
            torch.set_num_threads(before)
        return used, time.perf_counter() - began

    return train


def choose(
    task: TorchTask,
    columns: dict[str, Tensor],
    asked: HogbatchOptions,
    cores: int,
    devices: int,
    seconds: float,
) -> Verdict:
    """Measure the single device and some mixes; `Verdict.options.workers` is 1 for a single device."""
    choices = candidates(asked, cores, devices)
    # One device keeps to the batch that was asked for; the trial may not change it in silence.
    choices = {
        name: options
        for name, options in choices.items()
        if options.workers > 1 or options.cpu or options.device_batch_size == asked.batch_size
    }
    alone = single_on_cores(columns, task.loss_of, asked.batch_size, asked.optimiser.lr, cores)
    others = {"one device": (alone, HogbatchOptions(batch_size=asked.batch_size))}
    return run_trial(task.module, columns, task.loss_of, choices, min(MOST_S, SHARE * seconds), others)


def workers_of(options: HogbatchOptions) -> dict[str, Any]:
    """A configuration as ``workers=`` would ask for it."""
    chosen: dict[str, Any] = {"cpu": options.cpu, "algorithm": options.algorithm}
    if options.cuda:
        chosen |= {"cuda": options.cuda, "device_batch_size": options.device_batch_size}
    return chosen
