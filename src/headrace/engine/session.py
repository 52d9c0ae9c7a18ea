"""One training run from its first update to its last: the loop, and everything that may interrupt it.

What holds at every point where the loop can stop: the state written then, loaded again, continues with the same
updates. Between two reads of the losses nothing waits for the device.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine import checkpoint
from headrace.engine.diagnose import first_bad_layer
from headrace.engine.evaluate import evaluate
from headrace.engine.loader import Loader
from headrace.engine.losslog import LossLog, Row
from headrace.engine.optimizers import base_rates, match_strides
from headrace.engine.options import FitOptions
from headrace.engine.reading import round_changes
from headrace.engine.records import Records
from headrace.engine.schedules import Schedule
from headrace.engine.signals import GracefulStop
from headrace.engine.steps import EagerStepper, Stepper, Stretch
from headrace.engine.stopping import Best, StopRules
from headrace.engine.task import TorchTask
from headrace.engine.threads import TRIAL_S, ThreadTrial
from headrace.errors import CheckpointError, DivergenceError, ModelError, RunFolderError
from headrace.report.progress import Progress
from headrace.types import Buffer, State

SLICE_S = 0.1  # how long a stretch runs between two looks at the clock and at signals
SAVING_SHARE = 0.02  # of the time may go into checkpoints
EXPLODED = 1e4  # times the first loss; no healthy run was seen to pass a hundred
REPLAYED_UPDATES = 64  # before a bad update that are looked into layer by layer


@dataclass(kw_only=True)
class Parts:
    """What a run is made of; see `headrace.engine.fit`."""

    options: FitOptions
    task: TorchTask
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    stepper: Stepper
    loader: Loader
    rules: StopRules
    updates_per_pass: int
    log_every: int
    threads: ThreadTrial
    validation: Loader | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class Standing:
    """How far the run is."""

    step: int = 0
    examples: int = 0
    passes: int = 0
    epoch_loss: float = 0.0
    """Sum over the examples of this epoch so far."""
    epoch_examples: int = 0
    first_loss: float = math.nan
    wait_s: float = 0.0


class Session:
    """Runs the loop over the parts and keeps the records."""

    def __init__(self, parts: Parts, records: Records, progress: Progress, state: State | None) -> None:
        self.parts = parts
        self.records = records
        self.progress = progress
        self.device = parts.task.device
        self.at = Standing()
        self.best = Best()
        self.base_rates = base_rates(parts.optimizer)
        self.log = LossLog(parts.log_every, self.device)
        self.stop_reason: str | None = None
        self.updates_per_slice = 1
        self.in_flight: list[torch.cuda.Event] = []
        self.memory: State | None = None
        self.saved_step = -1
        self.next_save_s = 0.0
        self.row_started_s = self.records.seconds
        self.interrupted_by = GracefulStop()
        if state is not None:
            self.load(state)
        self.round_changes_told = len(parts.loader.rounds_history)

    # ---- the loop

    def run(self) -> str:
        """Train until a rule says stop; returns why. Raises what a signal asked for after saving."""
        module = self.parts.task.module
        module.train()
        with GracefulStop() as graceful:
            self.save()
            self.stop_reason = self._stop_before_start()
            while self.stop_reason is None:
                self._one_pass(graceful)
            self.save(final=True)
            self._say_where_it_ended(graceful)
        self.interrupted_by = graceful
        return self.stop_reason

    @property
    def threads_chosen(self) -> tuple[int, str]:
        """The intra-op threads that the last updates used, and what the trial saw."""
        trial = self.parts.threads
        if len(trial.best) < 2:
            return trial.current, "the run was too short to try others" if len(
                trial.counts
            ) > 1 else "no choice"
        return (
            trial.current,
            f"the faster of {list(trial.counts)} by {trial.gain:.2g} times, tried while training",
        )

    def _say_where_it_ended(self, graceful: GracefulStop) -> None:
        """Stopped within an epoch: rows for what is open. A resumed run drops them and makes the whole ones."""
        self._close_row()
        self._settle()
        if self.at.epoch_examples and graceful.received is None:
            self._summarise("end")

    def _stop_before_start(self) -> str | None:
        rules = self.parts.rules
        return rules.after_pass(self.at.passes, self.best) or rules.after_update(
            self.at.step, self.records.seconds
        )

    def _one_pass(self, graceful: GracefulStop) -> None:
        for buffer in self.parts.loader.buffers():
            if buffer.wait_s > 0:
                self.at.wait_s += buffer.wait_s
                now = self.records.seconds
                self.records.span("data", "wait for buffer", now - buffer.wait_s, now)
            if self.stop_reason is not None:
                return
            self._tell_rounds()
            if not self._one_buffer(buffer, graceful):
                return
        self._end_pass()

    def _tell_rounds(self) -> None:
        """Changes of the rounds go into the timeline and the report's events, with their reasons."""
        history = self.parts.loader.rounds_history
        for text in round_changes(history, self.round_changes_told):
            self.records.instant("rounds", text)
        self.round_changes_told = len(history)

    def _one_buffer(self, buffer: Buffer, graceful: GracefulStop) -> bool:
        """Train on the rest of the buffer; False when a rule or a signal said stop before its end."""
        position = buffer.cursor
        # Rounds that adapt follow the step size down; the loader asks when it chooses for the next buffer.
        self.parts.loader.set_step_size(self.base_rates[0] * self.parts.schedule(self.at.step))
        while position < len(buffer.order) and self.stop_reason is None:
            stretch = self.next_stretch(buffer, position)
            self._run(stretch)
            position = stretch.stop
            self._account(stretch)
            self.parts.loader.consumed(stretch.stop - stretch.start)
            if self.log.room == 0 or position == len(buffer.order):
                self._close_row()
            self._read_rows(wait=False)
            if graceful.received is not None:
                self.stop_reason = f"{graceful.received.name} was received"
            self.stop_reason = self.stop_reason or self.parts.rules.after_update(
                self.at.step, self.records.seconds
            )
            if self.records.seconds >= self.next_save_s and self.stop_reason is None:
                self.save()
        return position == len(buffer.order)

    def next_stretch(self, buffer: Buffer, position: int, most: int | None = None) -> Stretch:
        """As many updates as fit before the next row, the end of the buffer, the last step or the slice's end."""
        options = self.parts.options
        group = options.batch_size * options.accumulate
        updates = -(-(len(buffer.order) - position) // group)
        limits = [updates, self.log.room, self.updates_per_slice]
        if self.parts.rules.steps is not None:
            limits.append(self.parts.rules.steps - self.at.step)
        if most is not None:
            limits.append(most)
        updates = max(1, min(limits))
        factors = [self.parts.schedule(self.at.step + i) for i in range(updates)]
        return Stretch(
            buffer=buffer,
            start=position,
            stop=min(position + updates * group, len(buffer.order)),
            batch_size=options.batch_size,
            accumulate=options.accumulate,
            rates=tuple(tuple(rate * factor for rate in self.base_rates) for factor in factors),
            losses=self.log.take(updates),
        )

    def _account(self, stretch: Stretch) -> None:
        total = stretch.stop - stretch.start
        counts = [stretch.group] * (total // stretch.group)
        if total % stretch.group:
            counts.append(total % stretch.group)
        self.log.advance(counts)
        self.at.step += len(counts)
        self.at.examples += total

    def _run(self, stretch: Stretch) -> None:
        """Issue the stretch; on a CPU with the number of threads whose turn it is."""
        threads = self.parts.threads
        if self.device.type == "cpu" and torch.get_num_threads() != threads.current:
            torch.set_num_threads(threads.current)
        started = time.perf_counter()
        self.parts.stepper.run(stretch)
        self._throttle()
        elapsed_s = time.perf_counter() - started
        if self.at.step > 0:  # the first update pays for everything that is made once
            threads.observe(stretch.updates, elapsed_s, self.records.seconds)
        wanted = int(stretch.updates * (TRIAL_S if threads.trying else SLICE_S) / max(elapsed_s, 1e-6))
        self.updates_per_slice = max(1, min(wanted, 4 * self.updates_per_slice))

    def _throttle(self) -> None:
        """Let the host run at most two stretches ahead of the device."""
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self.in_flight.append(event)
        if len(self.in_flight) > 2:
            self.in_flight.pop(0).synchronize()

    # ---- rows

    def _close_row(self) -> None:
        if self.log.filled == 0:
            return
        now = self.records.seconds
        self.log.close_row(
            {
                "kind": "train",
                "epoch": self.at.passes,
                "step": self.at.step,
                "seconds": now,
                "examples": self.at.examples,
                "lr": self.base_rates[0] * self.parts.schedule(self.at.step - 1),
                "examples_per_s": sum(self.log.counts) / max(now - self.row_started_s, 1e-9),
                "wait_s": self.at.wait_s,
                **self.parts.loader.reuse_values(),
            }
        )
        self.records.span("device", "train", self.row_started_s, now)
        self.row_started_s = now

    def _read_rows(self, *, wait: bool) -> None:
        for row in self.log.arrived(wait=wait):
            self._check(row)
            loss = row.mean
            self.at.epoch_loss += loss * sum(row.counts)
            self.at.epoch_examples += sum(row.counts)
            values = {**row.values, "loss": loss}
            self.records.metrics(values)
            self.progress.update(values["step"], loss, values["examples"], self.at.wait_s)
            if self.parts.validation is None and self.stop_reason is None:
                self.stop_reason = self.parts.rules.after_loss(loss)

    def _settle(self) -> None:
        """Make rows of everything that was issued."""
        self._read_rows(wait=True)

    def _end_pass(self) -> None:
        self._settle()
        self.at.passes += 1
        loss = self._summarise("epoch")
        self.at.epoch_loss, self.at.epoch_examples = 0.0, 0
        self.best.observe(loss)
        self.parts.schedule.observe(loss)
        rules = self.parts.rules
        if self.parts.validation is not None:
            self.stop_reason = self.stop_reason or rules.after_loss(loss)
        self.stop_reason = self.stop_reason or rules.after_pass(self.at.passes, self.best)

    def _summarise(self, kind: str) -> float:
        """A row over the epoch so far, with validation; returns the loss that the stop rules look at."""
        loss = self.at.epoch_loss / max(self.at.epoch_examples, 1)
        row = {
            "kind": kind,
            "epoch": self.at.passes,
            "step": self.at.step,
            "seconds": self.records.seconds,
            "examples": self.at.examples,
            "loss": loss,
        }
        drifts = getattr(self.parts.loader.order, "drift_ratio", None)
        if drifts:  # of the last epoch that the order has closed: lower is better balanced
            row["order_drift_ratio"] = drifts[-1]
        if self.parts.validation is not None:
            started = self.records.seconds
            found = evaluate(self.parts.task, self.parts.validation, self.parts.metrics)
            row.update({f"validation_{name}": value for name, value in found.items()})
            self.records.span("device", "validate", started, self.records.seconds)
            loss = found["loss"]
        self.records.metrics(row)
        self.row_started_s = self.records.seconds
        return loss

    # ---- state

    def state(self) -> State:
        """Everything that the rest of the run depends on."""
        optimizer = self.parts.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] = float(group["lr"])
        return {
            "module": {k: v for k, v in self.parts.task.module.state_dict().items() if isinstance(v, Tensor)},
            "optimizer": optimizer,
            "schedule": self.parts.schedule.state_dict(),
            "loader": self.parts.loader.state_dict(),
            "random": checkpoint.random_state(self.device),
            "log": self.log.state_dict(),
            "standing": dict(vars(self.at)),
            "best": self.best.state_dict(),
            "seconds": self.records.seconds,
            "rows": len(self.records.rows),
            "base_rates": list(self.base_rates),
        }

    def load(self, state: State) -> None:
        """Put everything back as `state` found it."""
        load_module(self.parts.task.module, state["module"])
        lrs = [group["lr"] for group in self.parts.optimizer.param_groups]
        self.parts.optimizer.load_state_dict(state["optimizer"])
        for group, lr in zip(self.parts.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        match_strides(self.parts.optimizer)
        self.base_rates = [float(rate) for rate in state["base_rates"]]
        self.parts.schedule.load_state_dict(state["schedule"])
        self.parts.loader.load_state_dict(state["loader"])
        self.log.load_state_dict(state["log"])
        self.at = Standing(**state["standing"])
        self.best.load_state_dict(state["best"])
        checkpoint.set_random_state(state["random"], self.device)
        self.saved_step = self.at.step

    def save(self, *, final: bool = False) -> None:
        """Write a checkpoint, unless this step is already written; the next one follows when it has been paid for."""
        if self.at.step == self.saved_step and not final:
            return
        self._settle()
        self._check_weights()
        started = time.perf_counter()
        start_s = self.records.seconds
        if self.records.path is None:
            self.memory = clone(self.state())
        else:
            self.records.flush()
            try:
                checkpoint.save_checkpoint(self.records.path / "state", self.at.step, self.state())
            except CheckpointError as error:
                if final:
                    raise
                self.records.instant("checkpoint failed", str(error))
                warnings.warn(f"{error}; training goes on", stacklevel=2)
        cost = time.perf_counter() - started
        self.saved_step = self.at.step
        self.next_save_s = self.records.seconds + max(self.parts.options.checkpoint_s, cost / SAVING_SHARE)
        self.records.span("host", "checkpoint", start_s, self.records.seconds)

    # ---- divergence

    def _check(self, row: Row) -> None:
        bad = row.first_bad
        last = int(row.values["step"])
        if bad is not None:
            self._diverged(last - len(row.counts) + bad, float(row.losses[bad]))
        if math.isnan(self.at.first_loss):
            self.at.first_loss = float(row.losses[0])
        if row.mean > EXPLODED * max(abs(self.at.first_loss), 1e-3):
            worst = int(row.losses.argmax())
            self._diverged(last - len(row.counts) + worst, float(row.losses[worst]))

    def _check_weights(self) -> None:
        """What is saved must be sound: weights may be lost one update before the loss shows it."""
        if not self.log.partial_is_finite():
            bad = int((~torch.isfinite(self.log.window[: self.log.filled])).nonzero()[0])
            self._diverged(self.at.step - self.log.filled + bad, math.nan)
        for parameter in self.parts.task.module.parameters():
            if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
                self._diverged(self.at.step, math.nan)

    def _diverged(self, step: int, loss: float) -> None:
        """Stop, with the place where it began and the state to go back to."""
        good, where = self._last_good()
        place = ""
        if good is not None:
            found = self._replay(good, step)
            self.load(good)
            place = (
                f"; it began at step {found[0]} in {found[1]}"
                if found
                else "; a replay from the last good state stayed finite"
            )
        text = (
            f"the loss became {loss:g} at step {step}{place}. {where}. "
            f"Lower lr (now {self.base_rates[0]:g}), set clip=, or look at the data"
        )
        self.records.instant("diverged", text)
        self.records.flush()
        raise DivergenceError(text)

    def _last_good(self) -> tuple[State | None, str]:
        if self.records.path is None:
            kept = f"The weights are those of step {self.memory['standing']['step']}" if self.memory else ""
            return self.memory, kept
        try:
            state, _ = checkpoint.load_newest(self.records.path / "state")
        except RunFolderError as error:
            return None, str(error)
        return (
            state,
            f"The last good checkpoint, of step {state['standing']['step']}, is in {self.records.path}",
        )

    def _replay(self, good: State, bad_step: int) -> tuple[int, str] | None:
        """Repeat the updates since the last good state, the last ones layer by layer."""
        self.load(good)
        eager = EagerStepper(self.parts.task, self.parts.optimizer, clip=self.parts.options.clip)
        while self.at.step <= bad_step:
            for buffer in self.parts.loader.buffers():
                position = buffer.cursor
                while position < len(buffer.order) and self.at.step <= bad_step:
                    fast = bad_step - REPLAYED_UPDATES - self.at.step
                    stretch = self.next_stretch(
                        buffer, position, fast if fast > 0 else bad_step - self.at.step + 1
                    )
                    if fast > 0:
                        self.parts.stepper.run(stretch)
                    else:
                        found = first_bad_layer(eager, stretch)
                        if found is not None:
                            return self.at.step + found[0], found[1]
                    position = stretch.stop
                    self._account(stretch)
                    self.log.counts.clear()
                    self.parts.loader.consumed(stretch.stop - stretch.start)
            if self.at.step > bad_step:
                return None
        return None


def clone(value: Any) -> Any:
    """A state whose tensors do not change any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(clone(v) for v in value)
    return value


def load_module(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load weights in place; a model of another shape is answered with what differs."""
    own = module.state_dict()
    for name, value in state.items():
        if name not in own or own[name].shape != value.shape:
            found = tuple(own[name].shape) if name in own else "nothing of that name"
            raise ModelError(
                f"the checkpoint holds {name} of shape {tuple(value.shape)}, the model has {found}; "
                "resume with the model the run was started with"
            )
    module.load_state_dict(state, strict=False)
