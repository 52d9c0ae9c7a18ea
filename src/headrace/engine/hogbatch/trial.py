"""Which workers to use: a short measured trial instead of a rule.

Each candidate trains a copy of the module from the same start, for the same time, in short turns; what
counts is how far the loss of a fixed sample fell per second. One worker is always among the candidates,
and more are used only when they win by a margin above the noise: more workers make gradients staler, and
a tie is no gain.

The trial measures the first seconds of training. Configurations whose advantage shows late (a small final
step size, a large batch against noise) are not seen by it; neither is a machine that gets busier later,
for which `Watch` looks: when the throughput stays away from what the choice was made with, the trial is
made again.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.hogbatch.observer import HogbatchResult, Observer
from headrace.engine.hogbatch.options import HogbatchOptions, cores
from headrace.engine.hogbatch.rows import Rows, to_parts
from headrace.engine.hogbatch.run import run_hogbatch
from headrace.errors import DivergenceError

MARGIN = 1.05
"""By what factor several workers must beat one to be chosen: the noise of a trial of a second."""

SAMPLE_ROWS = 2048

Train = Callable[[nn.Module, float, int], tuple[int, float]]
"""``(module, seconds, seed)`` → rows used and seconds taken."""
TURNS = 2


@dataclass(frozen=True)
class Verdict:
    """What the trial found."""

    chosen: str
    options: HogbatchOptions
    scores: dict[str, float]
    """Loss decrease per second; higher is better; negative when the loss rose."""
    rows_per_s: float
    """Throughput of the chosen configuration in the trial."""
    seconds: float
    reason: str


def candidates(options: HogbatchOptions, n_cores: int, n_cuda: int) -> dict[str, HogbatchOptions]:
    """Configurations worth measuring on a machine with so many cores and devices, the simplest first."""

    compiled = (
        True if options.compiled == "auto" else options.compiled
    )  # one worker as fast as each of several

    def with_(**changes: Any) -> HogbatchOptions:
        return dataclasses.replace(options, compiled=compiled, **changes)

    found = {"one CPU worker": with_(cpu=1, cuda=0, standin=0, algorithm="hogwild")}
    if n_cores > 1:
        found[f"{n_cores} CPU workers"] = with_(cpu=n_cores, cuda=0, standin=0, algorithm="hogwild")
    if n_cuda:
        feeders = cores_beside(n_cores, n_cuda)
        small, large = options.batch_size, options.device_batch_size
        for batch in sorted({small, large}):
            found[f"{n_cuda} CUDA at {batch}"] = with_(
                cpu=0, cuda=n_cuda, standin=0, algorithm="minibatch", device_batch_size=batch
            )
            found[f"{n_cuda} CUDA at {batch} and {feeders} CPU"] = with_(
                cpu=feeders, cuda=n_cuda, standin=0, algorithm="hogbatch", device_batch_size=batch
            )
        found[f"adaptive, {n_cuda} CUDA and {feeders} CPU"] = with_(
            cpu=feeders, cuda=n_cuda, standin=0, algorithm="adaptive"
        )
    return found


def cores_beside(n_cores: int, n_cuda: int) -> int:
    """CPU workers beside devices: a core stays free for each device's thread, and one for the threads that merge."""
    return max(1, n_cores - n_cuda - (1 if n_cores > 4 else 0))


def decide(scores: dict[str, float], simple: set[str]) -> tuple[str, str]:
    """The winner and why; a configuration that is not ``simple`` must win by `MARGIN`."""
    best = max(scores, key=lambda name: scores[name])
    plain = max((name for name in scores if name in simple), key=lambda name: scores[name])
    listed = ", ".join(f"{name} {score:.3g}" for name, score in scores.items())
    if best == plain:
        return plain, f"{plain}: the loss fell fastest in the trial (per second: {listed})"
    if scores[plain] > 0 and scores[best] < MARGIN * scores[plain]:
        return plain, f"{plain}: {best} was no more than {MARGIN - 1:.0%} faster in the trial ({listed})"
    return best, f"{best}: the loss fell fastest in the trial (per second: {listed})"


def run_trial(
    module: nn.Module,
    columns: dict[str, Tensor],
    loss: Callable[..., Tensor],
    choices: dict[str, HogbatchOptions],
    budget_s: float,
    others: dict[str, tuple[Train, HogbatchOptions]] | None = None,
) -> Verdict:
    """Measure each choice and decide. The module is left as it was.

    ``others`` are ways to train that are no runs of workers, each with the options that stand for it.
    """
    others = others or {}
    began = time.monotonic()
    count = columns["x"].shape[0]
    picked = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:SAMPLE_ROWS]
    x, y = (next(Rows(to_parts(columns), name).batches(picked, SAMPLE_ROWS)) for name in ("x", "y"))
    stand_for = {**{name: options for name, (_, options) in others.items()}, **choices}
    turn_s = budget_s / TURNS / len(stand_for)
    before = _loss_of(module, x, y, loss)
    fall, spent, used = (
        dict.fromkeys(stand_for, 0.0),
        dict.fromkeys(stand_for, 0.0),
        dict.fromkeys(stand_for, 0),
    )
    for turn in range(TURNS):
        for name, options in stand_for.items():
            trained = copy.deepcopy(module)
            try:
                rows, seconds = _take_turn(trained, columns, loss, options, others.get(name), turn_s, turn)
            except DivergenceError:
                fall[name], spent[name] = float("-inf"), max(spent[name], turn_s)
                continue
            after = _loss_of(trained, x, y, loss)
            fall[name] += before - after if math.isfinite(after) else float("-inf")
            spent[name] += seconds
            used[name] += rows
    scores = {name: fall[name] / spent[name] for name in stand_for}
    simple = {name for name, options in stand_for.items() if options.workers == 1}
    chosen, reason = decide(scores, simple or set(stand_for))
    rate, took = used[chosen] / spent[chosen], time.monotonic() - began
    return Verdict(chosen, stand_for[chosen], scores, rate, took, reason)


def _take_turn(
    module: nn.Module,
    columns: dict[str, Tensor],
    loss: Callable[..., Tensor],
    options: HogbatchOptions,
    other: tuple[Train, HogbatchOptions] | None,
    turn_s: float,
    turn: int,
) -> tuple[int, float]:
    """Train a copy for a turn; rows used and seconds."""
    if other is not None:
        return other[0](module, turn_s, turn)
    short = dataclasses.replace(
        options,
        epochs=1_000_000,
        seconds=turn_s,
        seed=turn,
        updates=None,
        grant_s=min(options.grant_s, turn_s / 5),
    )
    result = run_hogbatch(module, columns, loss, short)
    return result.rows, result.seconds


def _loss_of(module: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> float:
    was_training = module.training
    module.eval()
    with torch.no_grad():
        value = float(loss(module(x), y))
    module.train(was_training)
    return value


@dataclass
class Watch:
    """Says when the throughput has shifted for good: pure, fed with rows and seconds as they come."""

    expected: float
    """Rows per second to begin with."""
    band: float = 1.5
    """Away by more than this factor is a shift."""
    patience: int = 6
    """So many looks in a row: at two looks a second, three seconds."""
    _away: int = 0
    _last: tuple[float, int] = field(default=(0.0, 0))

    def look(self, seconds: float, rows: int) -> bool:
        """True when a new trial is due."""
        since_s, since_rows = seconds - self._last[0], rows - self._last[1]
        self._last = (seconds, rows)
        if since_s <= 0:
            return False
        ratio = since_rows / since_s / self.expected
        self._away = self._away + 1 if not 1 / self.band <= ratio <= self.band else 0
        return self._away >= self.patience


class _Watching(Observer):
    """Passes everything on, and ends the run when the watch calls."""

    def __init__(self, inner: Observer, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        self.shifted = False
        self.span, self.note = inner.span, inner.note  # type: ignore[method-assign]
        self.epoch_ended = inner.epoch_ended  # type: ignore[method-assign]
        self.resumable = inner.resumable  # type: ignore[method-assign]

    def metrics(self, row: dict[str, Any]) -> None:
        self._inner.metrics(row)
        if row["kind"] == "workers":
            self.shifted = self.shifted or self._watch.look(row["seconds"], row["examples"])

    def stopping(self) -> bool:
        return self.shifted or self._inner.stopping()


def run_auto(
    module: nn.Module,
    columns: dict[str, Tensor],
    loss: Callable[..., Tensor],
    options: HogbatchOptions,
    observer: Observer | None = None,
    *,
    expected_s: float | None = None,
    order: Callable[[int], Tensor] | None = None,
    trials: int = 3,
    first: Verdict | None = None,
    resume: dict[str, Any] | None = None,
) -> tuple[HogbatchResult, list[Verdict]]:
    """`run_hogbatch` with the workers that a trial chooses, made again when the throughput shifts.

    A trial takes 3 % of ``expected_s``, the run's expected time, and at most 5 s. The result is that of
    the last part of the run; `state` and parameters carry over from part to part. ``first`` is the verdict
    of a trial that was made already; the trials to come weigh several workers against one.
    """
    observer = observer or Observer()
    verdicts: list[Verdict] = []
    state, left_s = resume, options.seconds
    while True:
        budget_s = min(5.0, 0.03 * expected_s if expected_s is not None else 5.0)
        if first is not None and not verdicts:
            verdicts.append(first)
        else:
            choices = candidates(
                options, cores(), torch.cuda.device_count() if torch.cuda.is_available() else 0
            )
            verdicts.append(run_trial(module, columns, loss, choices, budget_s))
            observer.note(f"workers: {verdicts[-1].reason}")
        watching = _Watching(observer, Watch(verdicts[-1].rows_per_s))
        chosen = dataclasses.replace(verdicts[-1].options, seconds=left_s)
        result = run_hogbatch(module, columns, loss, chosen, watching, order=order, resume=state)
        if not watching.shifted or len(verdicts) >= trials or result.epochs >= options.epochs:
            return result, verdicts
        left_s = max(1e-3, left_s - result.seconds) if left_s is not None else None
        state = result.state
