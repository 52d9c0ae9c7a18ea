"""`fit`: one call from a model and data to a trained model, a run folder and a report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from headrace.engine.auto_workers import expected_s, why_single, why_single_here, workers_of
from headrace.engine.capture import StepParts, choose_stepper
from headrace.engine.crew import Crew, worker_options
from headrace.engine.evaluate import usual_metrics
from headrace.engine.hogbatch.trial import Verdict
from headrace.engine.keeping import config_of, finish_run, load_resumed, open_run, say_how_to_resume
from headrace.engine.loader import Loader
from headrace.engine.optimizers import make_optimizer
from headrace.engine.options import FitOptions, describe_object
from headrace.engine.planning import describe, why_no_chain
from headrace.engine.reading import reading_of
from headrace.engine.records import Records
from headrace.engine.reorder import pools_first
from headrace.engine.run import Run
from headrace.engine.schedules import make_schedule
from headrace.engine.session import Parts, Session
from headrace.engine.setup import choose_device, make_task, open_data, sample_target
from headrace.engine.signals import GracefulStop
from headrace.engine.steps import Stepper
from headrace.engine.stopping import StopRules
from headrace.engine.task import TorchTask, check_labels
from headrace.engine.threads import ThreadTrial, candidates
from headrace.errors import OptionError
from headrace.hardware import measure
from headrace.hardware.system import usable_cores
from headrace.plan import capture_ladder, choose_convolutions, choose_layout, data_memory
from headrace.report.progress import Progress
from headrace.types import Columns, Plan, Source, State

EPOCHS_WHEN_UNSAID = 10
ROWS_PER_EPOCH = 20


def fit(model: Any, data: Any, **options: Any) -> Run:
    """Train ``model`` on ``data`` and return the `Run`.

    model: a torch module, a name (linear, mlp, lenet, resnet9), ``"path.py:factory"``, or a factory.
    data: whatever `headrace.open_source` takes: a path, a pair of arrays ``(X, y)``, a torch Dataset, a source.
    options: the fields of `headrace.engine.FitOptions`, such as ``loss, optimizer, lr, epochs, batch_size,
    validation, out, resume, seed, deterministic``.

    SIGINT and SIGTERM finish the step and save before they take effect; ``resume=True`` continues in ``out``.
    """
    given = FitOptions.of(options)
    if not given.stops:
        given = FitOptions.of({**options, "epochs": EPOCHS_WHEN_UNSAID})
    return _Fitting(model, data, given).run()


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What every way of training begins with."""

    device: torch.device
    source: Source
    task: TorchTask
    few: Columns
    """Two rows, on the device."""
    held: Source | None
    """What is validated on."""
    validation: Loader | None
    metrics: dict[str, Any]


@dataclass
class _Fitting:
    """Wires one run: what is decided here is in the plan."""

    model: Any
    data: Any
    options: FitOptions
    plan: Plan = field(default_factory=Plan)
    _open: Records | None = None
    _verdict: Verdict | None = None
    _watched: Any = None
    """The learned order that this run let watch the model."""
    _columns: dict[str, Tensor] | None = None
    """What the trial of workers loaded, on its way to the run."""

    def run(self) -> Run:
        options, state, folder = self.options, None, None
        config = config_of(self.model, self.data, options)
        if options.resume:
            assert options.out is not None
            state, folder = load_resumed(options.out, config)
            step = state["standing"]["step"]
            self.decide("resumed", step, "continues from the checkpoint of this step")
        with _torch_settings(options):
            crew, basis = self._workers(state)
            basis = basis or self._basis("cpu" if crew is not None else options.device)
            parts = self._parts(basis) if crew is None else None
            records = open_run(folder, state, options, config)
            for note in records.notes:
                self.decide("recording", "partial", note)
            try:
                if parts is not None:
                    return self._on_one_device(parts, records, state)
                assert crew is not None
                return self._on_workers(basis, crew, records, state)
            finally:
                records.close()
                if self._watched is not None:  # what was hooked into the model goes
                    self._watched.unwatch()

    def _workers(self, state: State | None) -> tuple[dict[str, Any] | None, Basis | None]:
        """The workers, or None for one device; with ``"auto"`` what was made to find out, if it can be used."""
        options = self.options
        if options.workers == "single":
            return None, None
        if options.workers != "auto":
            return worker_options(options.workers), None
        if state is not None:  # what was chosen when the run began
            chosen = dict(state["crew"]) if "crew" in state else None
            self.decide("workers", chosen or "single", "as before the resume")
            return chosen, None
        cores, devices = usable_cores(), 0
        if options.device == "auto" and torch.cuda.is_available():
            devices = torch.cuda.device_count()
        why = why_single(options, cores, devices)
        if why is not None:
            self.decide("workers", "single", why)
            return None, None
        basis = self._basis("cpu")
        why = why_single_here(basis.task, options, basis.source, cores, devices)
        if why is None:
            seconds = expected_s(basis.task, options, len(basis.source), cores, devices)
            crew = self._crew(basis, {"cpu": 1}, Records(None), None)
            with torch.random.fork_rng(devices=list(range(devices))):
                self._verdict = crew.choose(cores, devices, seconds)
            self._columns = crew.columns if self._verdict.options.workers > 1 else None
            why = f"{self._verdict.reason}; the trial took {self._verdict.seconds:.1f} s"
            if self._verdict.options.workers > 1:
                chosen = workers_of(self._verdict.options)
                self.decide("workers", chosen, why)
                return chosen, basis
        self.decide("workers", "single", why)
        return None, self._moved(basis)

    def _on_one_device(self, parts: Parts, records: Records, state: State | None) -> Run:
        self._open = records
        records.write_plan(self.plan)
        with self._bar(records, state, self._step_limit(parts.updates_per_pass)) as progress:
            session = Session(parts, records, progress, state)
            why = session.run()
        if parts.task.device.type == "cpu" and len(parts.threads.counts) > 1:
            self.decide("threads", *session.threads_chosen)
        for d in reading_of(parts.loader, session.at.wait_s, records.seconds):
            self.decide(d.name, d.value, d.reason)
        ended = f"after {session.at.step} updates and {session.at.passes} epochs"
        return self._ended(parts.task.module, records, why, ended, session.at.step, session.interrupted_by)

    def _on_workers(
        self, basis: Basis, workers: dict[str, Any], records: Records, state: State | None
    ) -> Run:
        crew = self._crew(basis, workers, records, state)
        crew.verdict, crew.columns = self._verdict, self._columns
        self._columns = None  # the crew's alone from here on
        self.decide("device", "cpu", "the shared parameters are in host memory; CUDA workers keep a copy")
        if self.options.workers != "auto":
            self.decide("workers", workers, "asked for")
        self._open = records
        records.write_plan(self.plan)
        with self._bar(records, state, self._step_limit(crew.updates_per_pass)) as progress:
            result, why, graceful = crew.run(progress)
        ended = f"after {result.updates} updates and {result.epochs} epochs"
        return self._ended(basis.task.module, records, why, ended, result.updates, graceful)

    def _crew(self, basis: Basis, workers: dict[str, Any], records: Records, state: State | None) -> Crew:
        options = self.options
        per_pass = -(-len(basis.source) // options.batch_size)
        steps = self._step_limit(per_pass)
        return Crew(
            options=options,
            workers=workers,
            task=basis.task,
            source=basis.source,
            schedule=make_schedule(
                options.schedule, options.schedule_options, total_steps=steps, steps_per_epoch=per_pass
            ),
            rules=self._rules(steps),
            updates_per_pass=per_pass,
            records=records,
            validation=basis.validation,
            metrics=basis.metrics,
            say=self.decide,
            state=state,
        )

    def _bar(self, records: Records, state: State | None, steps: int | None) -> Progress:
        return Progress(
            steps,
            total_seconds=self.options.seconds,
            first_step=state["standing"]["step"] if state else 0,
            title=records.path.name if records.path else "training",
            console=None if self.options.progress else Console(quiet=True),
        )

    def _ended(
        self, module: nn.Module, records: Records, why: str, when: str, step: int, graceful: GracefulStop
    ) -> Run:
        self.decide("stopped_by", why, when)
        self.plan = finish_run(module, records, self.plan)
        if graceful.received is not None:
            say_how_to_resume(step, records)
        graceful.raise_received()
        return Run(
            model=module, metrics=records.rows, plan=self.plan, path=records.path, stopped_by=why, steps=step
        )

    def decide(self, name: str, value: Any, reason: str) -> None:
        self.plan = self.plan.with_(name, value, reason)

    def _late(self, name: str, reason: str) -> None:
        """The stepper tells what it took only after its first update."""
        self.decide("capture", name, reason)
        if self._open is not None:
            self._open.write_plan(self.plan)

    def _basis(self, device_name: str) -> Basis:
        """Device, data, task: what every way of training begins with."""
        options = self.options
        device, why = choose_device(device_name)
        self.decide("device", str(device), why)
        if options.precision == "tf32" and device.type != "cuda":
            raise OptionError(f"precision='tf32' needs a CUDA device, this run is on {device}; leave fp32")
        source, held, found = open_data(self.data, options)
        for d in found.decisions:
            self.decide(d.name, d.value, d.reason)
        task, loss_name, few, output = make_task(self.model, source, options, device)
        if held is not None:  # an epoch later would be too late to say so
            check_labels(task, output, sample_target(held), "the validation data's ")
        self.decide(
            "loss", loss_name, "asked for" if options.loss != "auto" else "follows from the target's type"
        )
        return Basis(
            device=device,
            source=source,
            task=task,
            few=few,
            held=held,
            validation=self._validation_loader(held, device),
            metrics={**usual_metrics(task, output), **options.metrics},
        )

    def _moved(self, basis: Basis) -> Basis:
        """A basis that was made in CPU memory, on the device of the run."""
        device, why = choose_device(self.options.device)
        self.decide("device", str(device), why)
        if device == basis.device:
            return basis
        basis.task.module.to(device)
        few = {name: values.to(device) for name, values in basis.few.items()}
        return replace(basis, device=device, few=few, validation=self._validation_loader(basis.held, device))

    def _parts(self, basis: Basis) -> Parts:
        """What a session on one device is made of."""
        options, task, source = self.options, basis.task, basis.source
        order = self._order(task, source)
        loader = Loader(
            source,
            batch_size=options.batch_size,
            order=order or options.order,
            buffer=options.buffer,
            rounds=options.rounds,
            device=str(basis.device),
            seed=options.seed,
            on_error=options.on_error,
        )
        for d in loader.plan.decisions:
            self.decide(d.name, d.value, d.reason)
        per_pass = -(-len(loader) // options.accumulate)
        steps = self._step_limit(per_pass)
        ends = self._schedule_ends_run(loader, steps)
        log_every = options.log_every or max(1, min(per_pass // ROWS_PER_EPOCH, 1000))
        self.decide("log_every", log_every, "updates between metric rows")
        optimizer, stepper = self._stepper(basis, order, steps=steps, window=log_every)
        return Parts(
            options=options,
            task=task,
            optimizer=optimizer,
            schedule=make_schedule(
                options.schedule, options.schedule_options, total_steps=steps, steps_per_epoch=per_pass
            ),
            stepper=stepper,
            loader=loader,
            rules=self._rules(steps, also_steps=ends),
            updates_per_pass=per_pass,
            log_every=log_every,
            threads=self._threads(basis.device),
            validation=basis.validation,
            metrics=basis.metrics,
        )

    def _order(self, task: TorchTask, source: Source) -> Any:
        """The learned order, when one is asked for; it watches the model once the stepper is chosen."""
        order = self.options.order
        if isinstance(order, str) and order != "balanced":
            return None
        from headrace.order import BalancedOrder

        if order == "balanced":
            order = BalancedOrder(len(source), seed=self.options.seed, device=task.device)
        if not isinstance(order, BalancedOrder):
            return None
        self.decide("order", order.kind, "gradients are balanced: signs come from the backward pass")
        return order

    def _stepper(
        self, basis: Basis, order: Any, *, steps: int | None, window: int
    ) -> tuple[torch.optim.Optimizer, Stepper]:
        """Optimizer and stepper, by what the plan says of this machine and this model."""
        options, task, source = self.options, basis.task, basis.source
        hardware = measure(quick=True)
        optimizer = make_optimizer(options, task.module, device=task.device)
        settings = {
            k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "momentum", "weight_decay")
        }
        self.decide("optimizer", describe_object(type(optimizer)).strip("<>"), f"with {settings}")
        sparse = any(column.sparse for column in source.columns)
        chain, why = why_no_chain(task, options, sparse=sparse, order=order)
        workload = describe(
            task, source, basis.few, options, optimizer, updates=steps, chain=chain is not None
        )
        layout, convolutions = choose_layout(hardware, workload), choose_convolutions(hardware, workload)
        for d in (layout, convolutions) if workload.convolutions else (layout,):
            self.decide(d.name, d.value, d.reason)
        if workload.convolutions and convolutions.value == "tuned":
            torch.backends.cudnn.benchmark = True  # `_torch_settings` puts back what was there
        if layout.value == "channels_last":
            task.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_cores = layout.value == "channels_last" and task.device.type == "cpu"
        task.forward = pools_first(task.module, few_channels=on_cores and options.capture != "compile")
        if task.forward is not task.module:
            self.decide("pooling", "before ReLU", "the same values and gradients with less work")
        data_memory(hardware, workload)  # says so when one batch does not fit
        if chain is not None:
            self.decide("products", "oneDNN" if chain.products.wide else "torch", chain.why_products)
        parts = StepParts(
            task=task,
            optimizer=optimizer,
            clip=options.clip,
            window=window,
            longest_order=len(source),
            before_batch=order.begin_batch if order is not None else None,
            listener=order,
            watch=lambda: self._watch(order, task),
            chain=chain,
            why_no_chain=why,
            plain_convolutions=convolutions.value == "plain",
        )
        return optimizer, choose_stepper(capture_ladder(hardware, workload), parts, self._late)

    def _watch(self, order: Any, task: TorchTask) -> None:
        if order is not None and not order.watching:
            order.watch(task.forward)
            self._watched = order

    def _threads(self, device: torch.device) -> ThreadTrial:
        cores = usable_cores() if device.type == "cpu" else 1
        counts, why = candidates(cores, deterministic=self.options.deterministic)
        if device.type == "cpu":
            self.decide("threads", list(counts), why)
        return ThreadTrial(counts)

    def _validation_loader(self, held: Any, device: torch.device) -> Loader | None:
        if held is None:
            return None
        size = max(256, self.options.batch_size)
        return Loader(held, batch_size=size, order="sequential", device=str(device))

    def _step_limit(self, per_pass: int) -> int | None:
        """The last update, where it is known in advance."""
        limits = [self.options.steps] if self.options.steps is not None else []
        if self.options.epochs is not None:
            limits.append(math.ceil(self.options.epochs * per_pass))
        return min(limits) if limits else None

    def _schedule_ends_run(self, loader: Loader, steps: int | None) -> bool:
        """Rounds that adapt make a pass longer, and how much is not known when a schedule is drawn: a schedule that
        goes down to its end then ends the run, with fewer passes loaded."""
        falls = self.options.schedule in ("cosine", "onecycle")
        if not falls or loader.plan["residence"] != "buffered" or self.options.rounds != "auto":
            return False
        self.decide(
            "updates", steps, "the schedule's end; each further round on a buffer saves loading fresh rows"
        )
        return True

    def _rules(self, steps: int | None, *, also_steps: bool = False) -> StopRules:
        epochs = self.options.epochs
        whole = epochs is not None and float(epochs).is_integer()
        by_steps = self.options.steps if (whole or epochs is None) and not also_steps else steps
        return StopRules(
            passes=int(epochs) if epochs is not None and whole else None,
            steps=by_steps,
            seconds=self.options.seconds,
            target_loss=self.options.target_loss,
            patience=self.options.early_stop,
        )


@contextmanager
def _torch_settings(options: FitOptions) -> Iterator[None]:
    """torch's generators, switches for determinism and threads: set for the run, given back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    products = torch.get_float32_matmul_precision()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(options.seed)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        if options.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was[0], warn_only=was[1])
            torch.backends.cudnn.benchmark = benchmark
            torch.set_float32_matmul_precision(products)
            torch.set_num_threads(threads)
