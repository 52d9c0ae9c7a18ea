"""`fit` on a cluster: the house's records, checkpoints and stop rules around `run_cluster`.

The run folder is that of any other run. Its checkpoints are the master's; a run that is resumed begins there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from headrace.cluster.driver import ClusterResult, Observer, run_cluster
from headrace.cluster.layout import Layout
from headrace.cluster.options import ClusterOptions
from headrace.cluster.planning import warnings_for
from headrace.cluster.sending import sendable
from headrace.cluster.training import Job
from headrace.engine.evaluate import evaluate
from headrace.engine.fit import EPOCHS_WHEN_UNSAID, Basis, _Fitting, _torch_settings
from headrace.engine.keeping import config_of, load_resumed, open_run
from headrace.engine.options import FitOptions
from headrace.engine.records import Records
from headrace.engine.run import Run
from headrace.engine.signals import GracefulStop
from headrace.engine.stopping import Best, StopRules
from headrace.errors import DivergenceError, OptionError
from headrace.types import State


def fit_on_cluster(model: Any, data: Any, **options: Any) -> Run:
    """`headrace.fit` with ``cluster=`` given."""
    given = FitOptions.of(options)
    if not given.stops:
        given = FitOptions.of({**options, "epochs": EPOCHS_WHEN_UNSAID})
    check_fits(given)
    return _ClusterFitting(model, data, given).run()


def check_fits(options: FitOptions) -> None:
    """What a cluster cannot do, said before anything starts."""
    refused = {
        "an order of your own": not isinstance(options.order, str),
        "deterministic=True": options.deterministic,
        "schedule='plateau'": options.schedule == "plateau",
    }
    for name, asked in refused.items():
        if asked:
            raise OptionError(f"{name} and cluster= do not go together; leave out one of them")


def on_each_machine(cluster: ClusterOptions, options: FitOptions) -> ClusterOptions:
    """``workers=`` beside ``cluster=`` says what each of the cluster's workers runs on."""
    workers = options.workers
    if workers not in ("auto", "single"):
        if not isinstance(workers, Mapping) or not {"cpu", "cuda"} >= set(workers) or len(workers) != 1:
            raise OptionError(
                f"workers={workers!r} and cluster= do not go together: on a cluster each worker has cores, "
                "workers={'cpu': 2}, or a GPU, workers={'cuda': 1}"
            )
        cluster = (
            replace(cluster, cores=workers["cpu"])
            if "cpu" in workers
            else replace(cluster, gpus=workers["cuda"])
        )
    if cluster.cores > 1 and options.order == "balanced":
        raise OptionError(
            "order='balanced' and several cores in a worker do not go together; take more workers"
        )
    return cluster


class _ClusterFitting(_Fitting):
    """Wires one run on a cluster."""

    def run(self) -> Run:
        options, state, folder = self.options, None, None
        cluster = on_each_machine(ClusterOptions.of(options.cluster), options)
        config = config_of(self.model, self.data, options)
        if options.resume:
            assert options.out is not None
            state, folder = load_resumed(options.out, config)
            self.decide("resumed", state["standing"]["step"], "continues from the checkpoint of this step")
        with _torch_settings(options):
            basis = self._basis("cpu")
            records = open_run(folder, state, options, config)
            self._open = records
            try:
                return self._train(basis, cluster, records, state)
            finally:
                records.close()

    def _train(self, basis: Basis, cluster: ClusterOptions, records: Records, state: State | None) -> Run:
        options = self.options
        per_pass = -(-len(basis.source) // (options.batch_size * options.accumulate))
        steps = self._step_limit(per_pass)
        rules = self._rules(steps)
        job = self._job(basis, cluster, rules, steps)
        self.decide("cluster", str(options.cluster), "asked for")
        records.write_plan(self.plan)
        with self._bar(records, state, steps) as progress, GracefulStop() as graceful:
            watcher = Watcher(basis, records, rules, graceful, progress.update)
            result = run_cluster(
                job,
                cluster,
                watcher,
                folder=records.path / "state" if records.path is not None else None,
                resume=state is not None,
                steps=rules.steps,
            )
        self._decide_what_happened(result)
        why = watcher.why or (
            f"{graceful.received.name} was received"
            if graceful.received
            else rules.after_update(result.steps, records.seconds) or f"{watcher.passes} epochs done"
        )
        ended = f"after {result.steps} updates and {watcher.passes} epochs"
        return self._ended(basis.task.module, records, why, ended, result.steps, graceful)

    def _job(self, basis: Basis, cluster: ClusterOptions, rules: StopRules, steps: int | None) -> Job:
        options = self.options
        workers = cluster.workers if isinstance(cluster.workers, int) else 0
        for sentence in (
            warnings_for(steps, workers=workers, cores=cluster.cores) if steps is not None else ()
        ):
            self.decide("workers_bound", workers, sentence)
            warnings.warn(sentence, stacklevel=2)
        if workers > len(basis.source):
            raise OptionError(f"{workers} workers cannot share {len(basis.source)} rows; take fewer workers")
        # Rows held out as a share are left out by each worker by the same seed, so it gets the whole data.
        whole = basis.source if not isinstance(options.validation, float) else None
        data = self.data if whole is None else sendable(self.data, whole)
        held = options.validation if isinstance(options.validation, float) else None
        return Job(
            module=basis.task.module,
            data=data,
            options=replace(options, metrics={}, validation=held, out=None, resume=False, cluster=None),
            world_size=workers,
            passes=rules.passes,
            total_steps=steps,
            compress=cluster.compress,
            seed=options.seed,
            cores=cluster.cores,
            rows=len(basis.source),
        )

    def _decide_what_happened(self, result: ClusterResult) -> None:
        for found in result.plan:
            self.decide(found.name, found.value, found.reason)
        self.decide("last_local_steps", result.local_steps, "steps between two pushes at the end of the run")
        self.decide(
            "communication", round(result.communication, 3), "share of the workers' time; above 0.1 is much"
        )
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(result.staleness.items()))
        self.decide("staleness", ages, "versions missed by a merged push: how often; low is fresh")
        for number, note in enumerate(result.notes):
            self.decide(f"cluster_note_{number}", True, note)


class Watcher(Observer):
    """Turns what the master tells into rows, and into the end of the run."""

    def __init__(
        self,
        basis: Basis,
        records: Records,
        rules: StopRules,
        graceful: GracefulStop,
        show: Callable[[int, Any, int], None],
    ) -> None:
        self.basis, self.records, self.rules, self.graceful = basis, records, rules, graceful
        self.show = show
        self.layout = Layout.of(basis.task.module)
        self.best = Best()
        self.why: str | None = None
        self.passes = max((int(row["epoch"]) for row in records.rows if row["kind"] == "epoch"), default=0)
        self._sum, self._rows = 0.0, 0

    def standing(self) -> tuple[float, int]:
        return self.records.seconds, len(self.records.rows)

    def note(self, sentence: str) -> None:
        self.records.instant("cluster", sentence)

    def progress(self, status: dict[str, Any], vector: Callable[[], Tensor]) -> bool:
        losses, now_s = status["losses"], self.records.seconds
        for name, ago_s, took_s, sent_s in status["spans"]:
            self.records.span(name, "steps", now_s - ago_s - took_s, now_s - ago_s)
            if sent_s > 0:
                self.records.span(name, "exchange", now_s - ago_s - took_s - sent_s, now_s - ago_s - took_s)
        for _, loss, rows in losses:
            self._sum += loss * rows
            self._rows += rows
        if losses:
            self._train_row(status, losses)
        passes = status["rows"] // len(self.basis.source)
        if passes > self.passes and self._rows:
            self._epoch_row(passes, status, vector)
        self.why = self.why or self.rules.after_update(status["steps"], self.records.seconds)
        return self.why is not None or self.graceful.received is not None

    def _train_row(self, status: dict[str, Any], losses: list[tuple[int, float, int]]) -> None:
        rows = sum(count for _, _, count in losses)
        loss = sum(value * count for _, value, count in losses) / max(1, rows)
        if not math.isfinite(loss):
            raise DivergenceError(
                f"the loss became {loss:g} by step {status['steps']}; lower lr, set clip= or look at the data"
            )
        row: dict[str, Any] = {
            "kind": "train",
            "epoch": self.passes,
            "step": status["steps"],
            "seconds": self.records.seconds,
            "examples": status["rows"],
            "loss": loss,
            "version": status["version"],
            "local_steps": status["local_steps"],
        }
        ages = status["staleness"]
        if ages:
            row["staleness"] = sum(age * count for age, count in ages.items()) / sum(ages.values())
        for name, (steps, *_) in status["members"].items():
            row[f"updates/{name}"] = steps
        self.records.metrics(row)
        self.show(status["steps"], loss, status["rows"])

    def _epoch_row(self, passes: int, status: dict[str, Any], vector: Callable[[], Tensor]) -> None:
        loss = self._sum / self._rows
        self._sum, self._rows, self.passes = 0.0, 0, passes
        row: dict[str, Any] = {
            "kind": "epoch",
            "epoch": passes,
            "step": status["steps"],
            "seconds": self.records.seconds,
            "examples": status["rows"],
            "loss": loss,
            "staleness": histogram(status["staleness"]),
        }
        if self.basis.validation is not None:
            self.layout.scatter(vector())
            found = evaluate(self.basis.task, self.basis.validation, self.basis.metrics)
            row.update({f"validation_{name}": value for name, value in found.items()})
            loss = found["loss"]
        self.records.metrics(row)
        self.best.observe(loss)
        self.why = self.rules.after_loss(loss) or self.rules.after_pass(passes, self.best)


def histogram(ages: Mapping[int, int]) -> list[int]:
    """Pushes that missed no version, 1, 2 to 3, 4 to 7, ...: as the report draws staleness."""
    counts = [0] * (max(ages, default=0).bit_length() + 1)
    for age, count in ages.items():
        counts[age.bit_length()] += count
    return counts
