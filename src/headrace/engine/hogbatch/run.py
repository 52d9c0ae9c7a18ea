"""The shell around the coordinator: starts workers, carries its instructions to them and their answers to it.

Owns: the shared memory, the workers and the clock. While a run lasts, the module's parameters are views
of the shared memory; at the end, whatever the end, the values are copied back into the module's own
memory.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.hogbatch import merging
from headrace.engine.hogbatch.coordinator import Coordinator, Done, Grant, Instruction, Lost, Replace, Rules
from headrace.engine.hogbatch.observer import HogbatchResult, Observer, live_row, summarise
from headrace.engine.hogbatch.options import HogbatchOptions, check_machine, check_module, cores_for
from headrace.engine.hogbatch.rows import to_parts
from headrace.engine.hogbatch.runner import Work
from headrace.engine.hogbatch.shared import BEAT, GRANT, MERGES, ROWS, UPDATES, Board, SharedTensors
from headrace.engine.hogbatch.workers import (
    Event,
    Failed,
    Finished,
    Gone,
    Inbox,
    Ready,
    Worker,
    process_worker,
    thread_worker,
)
from headrace.errors import DataError, DivergenceError, WorkerError

TICK_S = 0.1
"""How often the clock, the observer and hanging workers are looked at while nothing happens."""

METRICS_S = 0.5


def epoch_order(rows: int, seed: int, epoch: int) -> Tensor:
    """The default order: a new permutation for each epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator)


def run_hogbatch(
    module: nn.Module,
    columns: dict[str, Tensor],
    loss: Callable[..., Tensor],
    options: HogbatchOptions,
    observer: Observer | None = None,
    *,
    order: Callable[[int], Tensor] | None = None,
    resume: dict[str, Any] | None = None,
) -> HogbatchResult:
    """Train ``module`` in place; see the package's docstring for the contract."""
    run = Run(module, columns, loss, options, observer or Observer(), order)
    threads = torch.get_num_threads()
    try:
        run.start(resume)
        return run.train()
    except WorkerError:
        run.close()  # first, so that nobody works any more and the board is final
        run.observer.resumable(run.surrender())
        raise
    finally:
        run.close()
        torch.set_num_threads(threads)


class Run:
    """One run's state."""

    def __init__(
        self,
        module: nn.Module,
        columns: dict[str, Tensor],
        loss: Callable[..., Tensor],
        options: HogbatchOptions,
        observer: Observer,
        order: Callable[[int], Tensor] | None,
    ) -> None:
        rows = check_columns(columns)
        self.module, self.loss, self.options, self.observer = module, loss, options, observer
        self.notes = check_machine(options) + check_module(module, options)
        plans = options.plans(rows)
        rules = Rules(
            adaptive=options.algorithm == "adaptive",
            alpha=options.alpha,
            scaling=options.scaling,
            reference_batch=options.batch_size,
            grant_s=options.grant_s,
            restarts=options.restarts,
        )
        self.coordinator = Coordinator(rows, plans, rules)
        self.chain, reason = Chain.of(module, loss)
        self.notes.append(reason)
        self.processes = self._choose_processes()
        self.compiled = options.workers > 1 if options.compiled == "auto" else bool(options.compiled)
        self.merge_every = self._choose_merging(columns, rows)
        self._order_of = order or (lambda epoch: epoch_order(rows, options.seed, epoch))
        self.board = Board(len(plans) * (options.restarts + 1))
        self.rows_of: dict[str, list[int]] = {plan.name: [] for plan in plans}
        self.inbox: Inbox = queue.SimpleQueue()
        self.workers: dict[str, Worker] = {}
        self._given_up: list[Worker] = []
        self.losses: list[float] = []
        self.batch_history: list[tuple[float, dict[str, int]]] = [(0.0, self.coordinator.batches())]
        self._share(columns, rows)
        self._beats: dict[str, tuple[int, float]] = {}
        self._ready: set[str] = set()
        self._clock, self._trained_s, self._last_row_s = time.perf_counter(), 0.0, 0.0
        self._epoch_loss, self._epoch_rows = 0.0, 0
        self._stopped_by = "epochs"
        self._last_words: list[str] = []
        self._closed = False

    # Setting up and clearing away.

    def _choose_processes(self) -> bool:
        if isinstance(self.options.processes, bool):
            return self.options.processes
        several = self.options.cpu > 1 and self.chain is None
        if several:
            self.notes.append(
                "CPU workers are processes: autograd's steps hold the interpreter lock too long"
            )
        return several

    def _choose_merging(self, columns: dict[str, Tensor], rows: int) -> int:
        options = self.options
        if options.merge_every != "auto":
            return int(options.merge_every)
        numbers = sum(p.numel() for p in self.module.parameters())
        threads = options.cpu > 1 and not self.processes and self.chain is not None and self.compiled
        if columns["x"].layout == torch.sparse_csr:
            return 1  # workers touch few lines in common, and a merge would touch them all
        steps, why = merging.by_rule(options)
        if (
            threads
            and options.optimiser.plain
            and merging.expected_s(options, numbers, rows) >= merging.WORTH_S
        ):
            with contextlib.suppress(DivergenceError):  # the run itself will say so
                steps, why = merging.by_measurement(self.module, columns, self.loss, options, run_hogbatch)
        if why is not None:
            self.notes.append(why)
        return steps

    def _lying_by_feature(self, x: Tensor) -> frozenset[str]:
        """The first layer's weights, when compiled steps take the rows of a CSR column as they are."""
        plain = self.options.optimiser.plain and not self.options.optimiser.weight_decay
        if x.layout != torch.sparse_csr or self.chain is None or not (self.compiled and plain):
            return frozenset()
        fits, _ = self.chain.fits_compiled()
        if fits:
            self.notes.append(
                "steps touch only the first layer's weights of features that occur in their rows"
            )
        return frozenset({self.chain.first_weight}) if fits else frozenset()

    def _share(self, columns: dict[str, Tensor], rows: int) -> None:
        """Move parameters, buffers and, for processes, the data into shared memory."""
        self._own = {name: p.data for name, p in self.module.named_parameters()}
        self._own_buffers = {name: b.data for name, b in self.module.named_buffers()}
        self.parameters = SharedTensors(self._own, self._lying_by_feature(columns["x"]))
        self.buffers = SharedTensors(self._own_buffers)
        self.canary = SharedTensors({"merges": torch.zeros((), dtype=torch.float64)})
        for group, tensors in (
            (self.parameters, self.module.named_parameters()),
            (self.buffers, self.module.named_buffers()),
        ):
            views = group.views()
            for name, tensor in tensors:
                tensor.data = views[name]
        self.data = None
        self._columns, self._order = to_parts(columns), torch.empty(rows, dtype=torch.int64)
        if self.processes:
            self.data = SharedTensors({**self._columns, "order": self._order})
            self._order = self.data.views()["order"]

    def start(self, resume: dict[str, Any] | None) -> None:
        self._remaining, self._resumed_from = None, 0
        if resume is not None:
            self.coordinator.load_state_dict(resume)
            self._resumed_from = sum(self.coordinator.updates().values())
            saved = resume["remaining"]
            self._remaining = None if saved is None else [(int(a), int(b)) for a, b in saved]
        for note in self.notes:
            self.observer.note(note)
        for name in self.rows_of:
            self._start(name)
        # Training time begins when everyone is ready: importing torch in a process takes seconds.
        deadline = time.monotonic() + self.options.start_s
        while self._ready != set(self.rows_of):
            self._receive(deadline)

    def _start(self, name: str) -> None:
        lives = self.rows_of[name]
        life, number = len(lives), list(self.rows_of).index(name)
        row = number + life * len(self.rows_of)
        lives.append(row)
        self._beats[name] = (0, time.monotonic())
        work = Work(
            name=name,
            number=row,
            module=self.module,
            loss=self.loss,
            optimiser=self.options.optimiser,
            parameters=self.parameters,
            buffers=self.buffers,
            canary=self.canary,
            data=self.data,
            board=self.board,
            merge_every=self.merge_every,
            staleness_bound=self.options.staleness_bound,
            fused=self.compiled,
            cores=cores_for(self.options, number),
            seed=self.options.seed * 1009 + number,
        )
        self.workers[name] = self._make(name, work, life)

    def _make(self, name: str, work: Work, life: int) -> Worker:
        if not name.startswith("cpu"):
            from headrace.engine.hogbatch.device import device_worker

            return device_worker(work, life, self._columns, self._order, self.options, self.inbox)
        if self.processes:
            return process_worker(work, life, self.inbox)
        return thread_worker(work, life, self._columns, self._order, self.inbox)

    def close(self) -> None:
        """End every worker and give the module its own memory back, with the trained values."""
        if self._closed:
            return
        self._closed = True
        for worker in self.workers.values():
            worker.cancel()
        for worker in [*self.workers.values(), *self._given_up]:
            worker.end()
        for group, own, tensors in (
            (self.parameters, self._own, self.module.named_parameters()),
            (self.buffers, self._own_buffers, self.module.named_buffers()),
        ):
            views = group.views()
            for name, tensor in tensors:
                own[name].copy_(views[name])
                tensor.data = own[name]

    def surrender(self) -> dict[str, Any]:
        """The state of a run that failed: what was at work counts as far as it came."""
        self.coordinator.halt()
        for name in self.workers:
            cells = self.board.cells[self.rows_of[name][-1]]
            self.coordinator.died(name, int(cells[GRANT]), int(cells[ROWS]))
        return self.coordinator.state_dict()

    # Training.

    def train(self) -> HogbatchResult:
        self._clock = time.perf_counter()
        self._began = self._clock
        try:
            while self.coordinator.epoch < self.options.epochs and self._stopped_by == "epochs":
                self._epoch()
        except KeyboardInterrupt:
            self._halt("interrupt")
            self._drain()
        return self._result()

    def _epoch(self) -> None:
        epoch = self.coordinator.epoch
        self._order.copy_(self._order_of(epoch))
        factor = self.options.schedule(epoch) if self.options.schedule else 1.0
        self._lr = self.options.optimiser.lr * factor
        self._epoch_loss, self._epoch_rows = 0.0, 0
        remaining, self._remaining = self._remaining, None
        over = self._obey(self.coordinator.begin(remaining))
        while not over and not (self._halted and self.coordinator.idle):
            over = self._receive(None)
            self._look_at_the_clock()
        if over:
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        mean = self._epoch_loss / max(1, self._epoch_rows)
        self.losses.append(mean)
        row = self._row()
        self.observer.metrics({**row, "kind": "epoch", "epoch": epoch, "step": row["updates"], "loss": mean})
        self._trained_s = self._seconds()
        self.observer.resumable(self.coordinator.state_dict())
        stop = self.observer.epoch_ended(epoch)
        self._clock = time.perf_counter()
        if stop:
            self._stopped_by = "observer"

    def _drain(self) -> None:
        """Take in the answers of workers that were told to stop."""
        deadline = time.monotonic() + 10.0
        while not self.coordinator.idle and time.monotonic() < deadline:
            self._receive(deadline)

    def _receive(self, deadline: float | None) -> bool:
        """Wait for one event, at most for a tick, and act on it; True when the epoch is over."""
        try:
            event = self.inbox.get(timeout=TICK_S)
        except queue.Empty:
            if deadline is not None and time.monotonic() > deadline:
                missing = ", ".join(sorted(set(self.rows_of) - self._ready))
                raise WorkerError(
                    f"{missing} did not start within {self.options.start_s:g} s; raise start_s=, or use "
                    "threads with processes=False"
                ) from None
            return self._replace_the_hanging()
        worker = self.workers.get(event.worker)
        if worker is None or worker.life != event.life:
            return False  # the last words of a worker that was given up
        return self._take(event)

    def _take(self, event: Event) -> bool:
        name = event.worker
        if isinstance(event, Ready):
            self._ready.add(name)
            self._beats[name] = (-1, time.monotonic())
            return False
        if isinstance(event, Failed):
            self._fail(event)
        if isinstance(event, Gone):
            self._explain_early_death(event)
            return self._obey(self._died(name))
        assert isinstance(event, Finished)
        report = event.report
        self._epoch_loss += report.loss_sum
        self._epoch_rows += report.rows
        if not math.isfinite(report.loss_sum):
            raise DivergenceError(
                f"the loss of {name} became {report.loss_sum} in epoch {self.coordinator.epoch}; "
                f"lower lr (now {self._lr:g}), or scaling='off' if a large batch raised the step size"
            )
        self.observer.span(
            name, f"{report.rows} rows", report.start_s - self._began, report.stop_s - self._began
        )
        seconds = report.stop_s - report.start_s
        return self._obey(self.coordinator.finished(name, report.number, report.rows, seconds))

    def _obey(self, instructions: list[Instruction]) -> bool:
        over = False
        for instruction in instructions:
            if isinstance(instruction, Grant):
                self.workers[instruction.worker].give(instruction, self._lr * instruction.scale)
            elif isinstance(instruction, Replace):
                self._start(instruction.worker)
            elif isinstance(instruction, Lost) and instruction.last:
                words = "; ".join(self._last_words[-3:])
                raise WorkerError(f"no worker is left: {words}; the module keeps what was learned so far")
            over = over or isinstance(instruction, Done)
        batches = self.coordinator.batches()
        if batches != self.batch_history[-1][1]:
            self.batch_history.append((self._seconds(), batches))
        return over

    # Faults.

    def _fail(self, event: Failed) -> None:
        where = "while it started"
        if event.grant is not None:
            row = self.board.cells[self.rows_of[event.worker][-1]]
            first = event.grant.start + int(row[ROWS])
            where = f"on rows {first} to {event.grant.stop} of epoch {self.coordinator.epoch}'s order"
        raise WorkerError(f"worker {event.worker} failed {where}:\n{event.text}") from event.error

    def _explain_early_death(self, event: Gone) -> None:
        self._last_words.append(f"{event.worker} ended with {_exit(event.exit_code)}")
        if event.worker not in self._ready and event.exit_code != -signal.SIGKILL:
            raise WorkerError(
                f"the process of {event.worker} ended with {_exit(event.exit_code)} before it was ready; see "
                "its message above. A script that starts workers needs `if __name__ == '__main__':` around "
                "its main part, since each worker process imports the script"
            )

    def _died(self, name: str) -> list[Instruction]:
        """A worker is gone for good: tell the coordinator how far it had come."""
        cells = self.board.cells[self.rows_of[name][-1]]
        worker = self.workers.pop(name)
        worker.kill()
        self._given_up.append(worker)
        self.observer.note(f"{self._last_words[-1]}; its work is handed out again")
        return self.coordinator.died(name, int(cells[GRANT]), int(cells[ROWS]))

    def _replace_the_hanging(self) -> bool:
        over = False
        now = time.monotonic()
        for name in list(self.workers):
            beat = int(self.board.cells[self.rows_of[name][-1], BEAT])
            last, since = self._beats[name]
            working = self.coordinator.in_flight(name) and name in self._ready
            if beat != last or not working:
                self._beats[name] = (beat, now)
            elif now - since > self.options.hang_s:
                self._last_words.append(
                    f"{name} made no update for {self.options.hang_s:g} s and was replaced"
                )
                over = self._obey(self._died(name)) or over
        return over

    # The clock.

    @property
    def _halted(self) -> bool:
        return self._stopped_by != "epochs"

    def _halt(self, reason: str) -> None:
        self._stopped_by = reason
        self.coordinator.halt()
        for worker in self.workers.values():
            worker.cancel()

    def _look_at_the_clock(self) -> None:
        seconds = self._seconds()
        if seconds - self._last_row_s > METRICS_S:
            self._last_row_s = seconds
            self.observer.metrics(self._row())
        if self._halted:
            return
        made = self._resumed_from + int(self.board.cells[:, UPDATES].sum())
        if self.options.updates is not None and made >= self.options.updates:
            self._halt("updates")
        elif self.options.seconds is not None and seconds >= self.options.seconds:
            self._halt("seconds")
        elif self.observer.stopping():
            self._halt("observer")

    def _seconds(self) -> float:
        return self._trained_s + time.perf_counter() - self._clock

    def _row(self) -> dict[str, Any]:
        row = live_row(self.coordinator, self.board, self.rows_of, self._seconds(), self.coordinator.epoch)
        row["updates"] += self._resumed_from
        if self._epoch_rows:
            row["loss"] = self._epoch_loss / self._epoch_rows
        elif self.losses:  # nothing of this epoch was reported yet
            row["loss"] = self.losses[-1]
        else:
            row["loss"] = math.nan
        return row

    def _result(self) -> HogbatchResult:
        seconds = self._seconds()
        merges = int(self.board.cells[:, MERGES].sum())
        kept = float(self.canary.views()["merges"])
        return HogbatchResult(
            epochs=self.coordinator.epoch,
            updates=sum(self.coordinator.updates().values()),
            rows=sum(self.coordinator.rows_done().values()),
            seconds=seconds,
            losses=self.losses,
            workers=summarise(self.coordinator, self.board, self.rows_of, seconds),
            batch_history=self.batch_history,
            lost_merges=(merges - kept) / merges if merges else math.nan,
            notes=self.notes,
            stopped_by=self._stopped_by,
            state=self.coordinator.state_dict(),
        )


def check_columns(columns: dict[str, Tensor]) -> int:
    """The number of rows; an error that says what is wrong otherwise."""
    if set(columns) != {"x", "y"}:
        raise DataError(f"workers take the columns x and y, and got {', '.join(sorted(columns)) or 'none'}")
    rows = {name: column.shape[0] for name, column in columns.items()}
    if rows["x"] != rows["y"] or not rows["x"]:
        raise DataError(f"x has {rows['x']} rows and y has {rows['y']}; both need the same number, above 0")
    layouts = (torch.strided, torch.sparse_csr)
    for name, column in columns.items():
        if column.device.type != "cpu" or column.layout not in layouts:
            raise DataError(
                f"{name} is {column.layout} on {column.device}; give dense or CSR tensors in CPU memory"
            )
    return rows["x"]


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        import signal

        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
