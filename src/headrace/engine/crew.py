"""`fit` over several workers: the house's records, checkpoints and stop rules around `hogbatch`.

A run over workers is checkpointed where all of them rest: at the end of an epoch and when it stops. Its metrics
have the same rows as any other run's, plus rows of kind ``"workers"`` with updates, batch sizes and utilisation
of each worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine import checkpoint
from headrace.engine.auto_workers import choose, workers_of
from headrace.engine.evaluate import evaluate
from headrace.engine.hogbatch import (
    HogbatchOptions,
    HogbatchResult,
    Observer,
    OptimiserSpec,
    run_auto,
    run_hogbatch,
)
from headrace.engine.hogbatch.options import ALGORITHMS
from headrace.engine.hogbatch.shared import staleness_labels
from headrace.engine.hogbatch.trial import Verdict, cores_beside
from headrace.engine.loader import Loader
from headrace.engine.optimizers import USUAL_LR
from headrace.engine.options import FitOptions
from headrace.engine.records import Records
from headrace.engine.residence import load
from headrace.engine.schedules import Schedule
from headrace.engine.session import SAVING_SHARE, clone, load_module
from headrace.engine.signals import GracefulStop
from headrace.engine.stopping import Best, StopRules
from headrace.engine.task import TorchTask
from headrace.errors import OptionError, unknown
from headrace.hardware.system import usable_cores
from headrace.order.basic import permutation
from headrace.report.progress import Progress
from headrace.types import Source, State

FIXED = {"batch_size", "epochs", "updates", "seconds", "optimiser", "schedule", "seed", "algorithm"}
"""Options of a run over workers that `fit` has names of its own for."""


def worker_options(workers: Any) -> dict[str, Any]:
    """What ``workers=`` asks for, as options of `HogbatchOptions`; checked for spelling."""
    if isinstance(workers, str):
        if workers not in ALGORITHMS:
            raise unknown("workers", workers, ("auto", "single", *ALGORITHMS))
        cores = max(1, usable_cores())
        counts: dict[str, Any] = {"cpu": cores}
        if workers != "hogwild":
            counts["cpu"] = 0 if workers == "minibatch" else cores_beside(cores, 1)
            counts["cuda"] = max(1, torch.cuda.device_count() if torch.cuda.is_available() else 1)
        return {**counts, "algorithm": workers}
    if not isinstance(workers, Mapping):
        raise OptionError(
            f"workers={workers!r}: give 'auto', 'single', an algorithm, or counts such as {{'cpu': 2}}"
        )
    known = {f.name for f in dataclasses.fields(HogbatchOptions)} - FIXED | {"algorithm"}
    for name in workers:
        if name not in known:
            raise unknown("option in workers=", name, known)
    counts = (
        {"cpu": 0, **workers} if any(k in workers for k in ("cuda", "standin")) else {"cpu": 1, **workers}
    )
    if "algorithm" not in counts:
        counts["algorithm"] = "hogbatch" if counts.get("cuda") or counts.get("standin") else "hogwild"
    return counts


def optimiser_spec(options: FitOptions) -> OptimiserSpec:
    """The optimizer in its asynchronous form; only some have one."""
    if not isinstance(options.optimizer, str):
        raise OptionError("several workers take an optimizer by name: sgd, adam or adamw")
    given = dict(options.optimizer_options)
    for name in ("momentum", "weight_decay"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    known = {f.name for f in dataclasses.fields(OptimiserSpec)} - {"name", "lr", "clip_norm"}
    for name in given:
        if name not in known:
            raise unknown("optimizer option for several workers", name, known)
    lr = options.lr if options.lr is not None else USUAL_LR.get(options.optimizer, 0.001)
    return OptimiserSpec(name=options.optimizer, lr=lr, clip_norm=options.clip, **given)


def check_fits(options: FitOptions, task: TorchTask, source: Source) -> None:
    """What several workers cannot do, said before anything starts."""
    refused = {
        "accumulate=": options.accumulate > 1,
        "precision='bf16'": task.bf16,
        "transform=": options.transform is not None,
        "deterministic=True": options.deterministic,
        "a learned order": not isinstance(options.order, str) or options.order == "balanced",
        "more than one input column": len(task.prepare.inputs) != 1,
    }
    for name, asked in refused.items():
        if asked:
            raise OptionError(f"{name} and several workers do not go together; use workers='single'")


def worker_columns(task: TorchTask, source: Source) -> dict[str, Tensor]:
    """The columns as workers take them; CSR stays CSR."""
    columns, prepare = load(source, torch.device("cpu")), task.prepare
    x = columns[prepare.inputs[0]]
    if x.layout == torch.sparse_csr:
        return {
            "x": x.to(prepare.floating),
            "y": columns[prepare.target].to(prepare.target_type).contiguous(),
        }
    inputs, target = prepare(columns)
    return {"x": inputs[0].contiguous(), "y": target.contiguous()}


@dataclass(kw_only=True)
class Crew:
    """A run over workers: what `Session` is to one device."""

    options: FitOptions
    workers: dict[str, Any]
    task: TorchTask
    source: Source
    schedule: Schedule
    rules: StopRules
    updates_per_pass: int
    records: Records
    validation: Loader | None
    metrics: dict[str, Any]
    say: Callable[[str, Any, str], None]
    state: State | None = None
    verdict: Verdict | None = None
    """Of the trial that chose the workers, when nobody named them: it is made again when the throughput shifts."""
    columns: dict[str, Tensor] | None = None
    """What workers take, once it was loaded: the trial's are the run's."""

    def run(self, progress: Progress) -> tuple[HogbatchResult, str, GracefulStop]:
        """Train; returns the result, why it ended, and the signal that asked for it, if any."""
        check_fits(self.options, self.task, self.source)
        columns = self._loaded()
        options = self.hogbatch_options()
        resume = None
        if self.state is not None:
            load_module(self.task.module, self.state["module"])
            resume = self.state["workers"]
        with GracefulStop() as graceful:
            watcher = Watcher(self, graceful, progress)
            if self.state is not None:
                watcher.load(self.state)
            result = self._train(columns, options, watcher, resume)
            watcher.save(result.state)
            watcher.summarise(result)
        why = watcher.why or (
            f"{graceful.received.name} was received" if graceful.received else f"{result.stopped_by} reached"
        )
        return result, why, graceful

    def _train(
        self, columns: dict[str, Tensor], options: HogbatchOptions, watcher: Watcher, resume: State | None
    ) -> HogbatchResult:
        module, loss = self.task.module, self.task.loss_of
        if self.verdict is None:
            return run_hogbatch(module, columns, loss, options, watcher, order=self._order, resume=resume)
        first = dataclasses.replace(self.verdict, options=options)
        result, verdicts = run_auto(
            module, columns, loss, options, watcher, order=self._order, first=first, resume=resume
        )
        if len(verdicts) > 1:
            self.say("workers", workers_of(verdicts[-1].options), verdicts[-1].reason)
        return result

    def hogbatch_options(self) -> HogbatchOptions:
        rules, options = self.rules, self.options
        return HogbatchOptions(
            **self.workers,
            batch_size=options.batch_size,
            epochs=rules.passes if rules.passes is not None else 10**9,
            updates=rules.steps,
            seconds=rules.seconds,
            optimiser=optimiser_spec(options),
            schedule=lambda epoch: self.schedule(epoch * self.updates_per_pass),
            seed=options.seed,
        )

    def choose(self, cores: int, devices: int, seconds: float) -> Verdict:
        """A trial of this run's workers against one device."""
        return choose(self.task, self._loaded(), self.hogbatch_options(), cores, devices, seconds)

    def _loaded(self) -> dict[str, Tensor]:
        if self.columns is None:
            self.columns = worker_columns(self.task, self.source)
        return self.columns

    def _order(self, epoch: int) -> Tensor:
        """The same permutation that the loader would make for this epoch."""
        rows = len(self.source)
        if self.options.order == "sequential":
            return torch.arange(rows)
        return permutation(rows, self.options.seed, epoch)


class Watcher(Observer):
    """Turns what the workers tell into rows, spans, checkpoints and the end of the run."""

    def __init__(self, crew: Crew, graceful: GracefulStop, progress: Progress) -> None:
        self.crew = crew
        self.graceful = graceful
        self.progress = progress
        self.best = Best()
        self.why: str | None = None
        self.passes = 0
        self._notes = 0
        self._began_s = crew.records.seconds
        self._next_save_s = self._began_s + crew.options.checkpoint_s

    def metrics(self, row: dict[str, Any]) -> None:
        crew = self.crew
        if row["kind"] == "epoch":
            self._epoch_row = row
            return
        if row["loss"] != row["loss"]:  # NaN: nothing was reported yet
            return
        row = {**row, "seconds": crew.records.seconds, "step": row["updates"], "epoch": self.passes}
        crew.records.metrics(row)
        self.progress.update(row["updates"], row["loss"], row["examples"], 0.0, _by_kind(row))

    def summarise(self, result: HogbatchResult) -> None:
        """A last row: what each worker did, and how stale its writes were."""
        labels = staleness_labels()
        lists = {}
        for worker in result.workers:
            counts = [worker.staleness.get(label, 0) for label in labels]
            last = max((i for i, count in enumerate(counts) if count), default=0)
            lists[worker.name] = counts[: last + 1]
        row: dict[str, Any] = {"kind": "summary", "epoch": self.passes, "step": result.updates}
        row |= {"seconds": self.crew.records.seconds, "examples": result.rows, "staleness": lists}
        for worker in result.workers:
            row[f"utilisation/{worker.name}"] = worker.utilisation
            row[f"share_of_updates/{worker.name}"] = result.update_ratios[worker.name]
        if result.lost_merges == result.lost_merges:  # not NaN: there were merges
            row["lost_merges"] = result.lost_merges
        self.crew.records.metrics(row)

    def span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        self.crew.records.span(lane, name, self._began_s + start_s, self._began_s + end_s)

    def note(self, sentence: str) -> None:
        self.crew.records.instant("workers", sentence)
        self._notes += 1
        number = f"_{self._notes}" if self._notes > 1 else ""
        self.crew.say(f"workers_note{number}", sentence, "from the workers")

    def stopping(self) -> bool:
        limit, passed = self.crew.rules.seconds, self.crew.records.seconds
        if limit is not None and passed >= limit:  # by the wall clock: validation and earlier parts count
            self.why = f"{limit:g} s are over"
        return self.graceful.received is not None or self.why is not None

    def epoch_ended(self, epoch: int) -> bool:
        crew, row = self.crew, self._epoch_row
        self.passes = epoch + 1
        loss = row["loss"]
        new = {**row, "kind": "epoch", "epoch": self.passes, "seconds": crew.records.seconds}
        if crew.validation is not None:
            found = evaluate(crew.task, crew.validation, crew.metrics)
            new.update({f"validation_{name}": value for name, value in found.items()})
            loss = found["loss"]
        crew.records.metrics(new)
        self.progress.update(row["updates"], row["loss"], row["examples"], 0.0, _by_kind(row))
        self.best.observe(loss)
        crew.schedule.observe(loss)
        self.why = self.why or crew.rules.after_loss(loss) or crew.rules.after_pass(self.passes, self.best)
        if crew.records.seconds >= self._next_save_s:
            started_s = crew.records.seconds
            self.save(self._workers_state)
            cost = crew.records.seconds - started_s
            self._next_save_s = crew.records.seconds + max(crew.options.checkpoint_s, cost / SAVING_SHARE)
        return self.why is not None

    def resumable(self, workers: State) -> None:
        """Kept until `epoch_ended`, which decides whether it is time to write it."""
        self._workers_state = workers

    def save(self, workers: State) -> None:
        """A checkpoint of everything, while the workers rest."""
        crew = self.crew
        if crew.records.path is None:
            return
        crew.records.flush()
        state = {
            "module": clone(
                {k: v for k, v in crew.task.module.state_dict().items() if isinstance(v, Tensor)}
            ),
            "workers": workers,
            "crew": dict(crew.workers),
            "passes": self.passes,
            "best": self.best.state_dict(),
            "schedule": crew.schedule.state_dict(),
            "seconds": crew.records.seconds,
            "rows": len(crew.records.rows),
            "standing": {"step": sum(worker["updates"] for worker in workers["workers"].values())},
        }
        checkpoint.save_checkpoint(crew.records.path / "state", state["standing"]["step"], state)

    def load(self, state: State) -> None:
        self.passes = int(state["passes"])
        self.best.load_state_dict(state["best"])
        self.crew.schedule.load_state_dict(state["schedule"])


def _by_kind(row: Mapping[str, Any]) -> str:
    """For the progress bar: each kind of worker's share of the updates, its batch and how busy it is."""
    told = []
    total = max(1, sum(value for key, value in row.items() if key.startswith("updates/")))
    for kind in ("cpu", "cuda", "standin"):
        names = [key.removeprefix("batch/") for key in row if key.startswith(f"batch/{kind}")]
        if names:
            share = sum(row[f"updates/{name}"] for name in names) / total
            busy = sum(row[f"utilisation/{name}"] for name in names) / len(names)
            sizes = {row[f"batch/{name}"] for name in names}
            size = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)}–{max(sizes)}"
            told.append(f"{len(names)} {kind}: {share:.0%} of updates, batch {size}, {busy:.0%} busy")
    return "; ".join(told)
