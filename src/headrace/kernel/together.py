"""What a cluster is told to train on a kernel machine, and one machine's part of it.

The function is that of `streaming`: p centres, and data streamed past them. Every machine has the centres, the
subsample and both preconditioners, and a range of the rows of its own. It pulls the centres' weights, takes
preconditioned steps over a block of its rows, projects back onto the centres and pushes the difference. One step, as
the cluster counts, is one block with its projection.

Differences are averaged over all machines that are there. Each machine's steps are as large as the kernel bears, so
what a block teaches along the leading directions is nearly all of what is to be learned there; the sum of such
differences would be as many times too large as there are machines.

Invariant: of every pass each row is in exactly one machine's steps. A machine that was lost goes on behind its last
merged push.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import OptionError
from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.fitting import AfterEpoch, Settings
from headrace.kernel.model import Model
from headrace.kernel.stream_data import Chunk, MemoryChunks, SourceChunks, SourceRows
from headrace.kernel.streaming import Period, prepare_stream, steps_over
from headrace.types import Learned

CENTERS = 4000
"""Centres when the user names none: so many rows at random. A guess; a projection costs their square."""
EVERYONE = 1_000_000
"""M of the cluster's merging: a group waits for all machines that are alive."""


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """A kernel machine as a cluster sees it: one flat vector, the weights of p × c."""

    model: Model
    settings: Settings
    chunks: MemoryChunks | SourceChunks
    """All rows; every node gets them once, or opens the source."""
    passes: int
    total_steps: int | None
    compress: Any = None
    seed: int = 0
    world_size: int = 1

    def values(self) -> Tensor:
        return self.model.expansion.gather().reshape(-1)

    def statistics_from(self) -> int | None:
        return None

    def take(self, vector: Tensor) -> None:
        weights = self.model.expansion.first.weights_pc
        weights.copy_(vector.reshape(weights.shape))

    def local(self, rank: int) -> KernelSteps:
        return KernelSteps(self, rank)


class KernelSteps:
    """One machine's steps; the `LocalSteps` of headrace.cluster."""

    def __init__(self, work: KernelWork, rank: int) -> None:
        self.work, self.rank = work, rank
        part, stream = work.model.expansion.first, work.model.stream
        if stream.projector_layout.cached and stream.cache is None:
            stream = replace(stream, cache=KernelCache(part.product, part.product.operands.dtype))
        own = Part(product=part.product, weights_pc=part.weights_pc.clone(), start=0)
        # A step that was halved here is halved here alone.
        self.model = replace(work.model, expansion=Expansion([own]), stream=replace(stream))
        n = work.chunks.shape[0]
        self.low, self.high = n * rank // work.world_size, n * (rank + 1) // work.world_size
        self.block_rows = min(stream.period_rows, max(1, self.high - self.low))
        self.blocks = -(-(self.high - self.low) // self.block_rows)
        self.period: Period | None = None
        self.passes, self.at = 0, 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def resume(self, place: Any) -> None:
        if place is not None:
            self.passes, self.at = int(place["passes"]), int(place["block"])

    def advance(self, vector: Tensor, steps: int) -> Learned:
        """Up to ``steps`` blocks of rows from ``vector``."""
        weights = self.model.expansion.first.weights_pc
        weights.copy_(vector.reshape(weights.shape))
        square, rows, taken = 0.0, 0, 0
        with self.work.settings.devices.precision(self.work.settings.tf32):
            if self.period is None:
                self.period = Period(self.model, self.work.settings)
            self.period.begin()
            while taken < steps and self._has_block():
                for one, count in steps_over(self.model, self.period, self._block()):
                    square, rows = square + one, rows + count
                self.period.project()
                self.at, taken = self.at + 1, taken + 1
        finished = not self._has_block()
        return Learned(
            vector=weights.reshape(-1).cpu().clone(),
            steps=taken,
            rows=rows,
            loss=square / max(1, rows),
            place={"passes": self.passes, "block": self.at},
            finished=finished,
        )

    def _has_block(self) -> bool:
        """Have rows left; False when the last pass is over."""
        if self.at >= self.blocks and self.passes < self.work.passes:
            self.passes, self.at = self.passes + 1, 0
        return self.blocks > 0 and self.passes < self.work.passes

    def _block(self) -> Chunk:
        """The rows of the block at hand; their order is that of this machine and this pass, whoever asks."""
        if self._order is None or self._order[0] != self.passes:
            random = np.random.RandomState([self.work.seed, self.rank, self.passes])
            self._order = (self.passes, random.permutation(self.high - self.low))
        start = self.at * self.block_rows
        return self.work.chunks.sample(self.low + self._order[1][start : start + self.block_rows])


def fit_together(
    rows: Any,
    targets: Any,
    row_weights_n: NDArray[np.float64] | None,
    centers: Any,
    settings: Settings,
    cluster: Any,
    *,
    earlier: Model | None = None,
    after_epoch: AfterEpoch | None = None,
) -> tuple[Model, Any]:
    """Train on a cluster; the model and how it went."""
    from headrace.training import run_on_cluster

    options = cluster_options(cluster)
    if settings.devices.several:
        raise OptionError(
            "cluster= uses one device on each machine; give a single device=, or leave out cluster="
        )
    n = rows.shape[0]
    chosen = min(n, CENTERS) if centers is None else centers
    chunks = (
        SourceChunks(rows, targets)
        if isinstance(rows, SourceRows)
        else MemoryChunks(rows, targets, row_weights_n)
    )
    model = prepare_stream(chunks, chosen, settings, earlier)
    if centers is None:
        why = "random rows, since machines share the weights of centres that all of them have; centers= names others"
        model.plan = model.plan.with_("centers", model.expansion.centers, why)
        settings.say(f"centers = {model.expansion.centers}: {why}")
    model.stream.cache = None  # every machine makes its own, if it has room for one
    blocks = max(1, n // model.stream.period_rows)
    work = KernelWork(
        model=model,
        settings=settings,
        chunks=chunks,
        passes=settings.epochs,
        total_steps=settings.epochs * blocks,
        seed=settings.seed,
    )
    watch = _Watch(work, n, after_epoch)
    result = run_on_cluster(work, options, watch.progress)
    model.plan = model.plan.with_(
        "cluster",
        len(result.workers),
        f"machines, each with a range of the rows; differences are merged after {result.local_steps} block(s) of "
        f"{model.stream.period_rows} rows",
    )
    return model, result


def cluster_options(cluster: Any) -> dict[str, Any]:
    """``cluster=`` as a mapping, with the merging that such differences need unless it says otherwise."""
    from headrace.training import asked_of_cluster

    ours: dict[str, Any] = {"accept": EVERYONE, "merge": "mean", "local_steps": 1}
    return asked_of_cluster(cluster, ours)


class _Watch:
    """Follows a cluster's passes."""

    def __init__(self, work: KernelWork, rows: int, after: AfterEpoch | None) -> None:
        self.work, self.rows, self.after = work, rows, after
        self.square, self.seen, self.ended = 0.0, 0, False

    def progress(self, status: dict[str, Any], vector: Callable[[], Tensor]) -> bool:
        for _, loss, rows in status["losses"]:
            self.square, self.seen = self.square + loss * rows, self.seen + rows
            if self.seen >= self.rows and not self.ended:
                self._pass_is_over(vector)
        return self.ended

    def _pass_is_over(self, vector: Callable[[], Tensor]) -> None:
        model, settings = self.work.model, self.work.settings
        residual = math.sqrt(self.square / self.seen / max(model.stream.first_square, 1e-300))
        self.square, self.seen = 0.0, 0
        model.residuals.append(residual)
        epoch = len(model.residuals)
        settings.say(f"epoch {epoch}: residual {residual:.3g} of the targets")
        if self.after is not None:
            self.work.take(vector())
            self.ended = self.after(model, epoch)
        self.ended = self.ended or residual <= settings.tol
