"""Any number of centres, data streamed past them: EigenPro 4.

A batch becomes temporary centres with weights −(η/m)G, and the preconditioner's part goes to the subsample S
of the data. So between projections the steps are those of EigenPro 2 and touch no p×p matrix. After about p
streamed rows the function is projected back onto the p centres Z: with h = its values on Z without those of
α, K(Z, Z)θ = h is solved (by `solver.solve`, EigenPro 2 on the centres), α += θ, and the temporary centres
are forgotten.

Unlike the full method the residual does not vanish at the solution when rows outnumber centres, so a
constant step leaves noise. The weights of the last epoch's projections are therefore averaged.

A ridge shrinks every coefficient by (1 − η·ridge/n) a step: the gradient of ½ ridge‖f‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DataError, DivergenceError, OptionError
from headrace.kernel.bandwidth import SEARCH_ROWS
from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.fitting import (
    AfterEpoch,
    Settings,
    layout_for,
    make_operands,
    starting_weights,
    with_bandwidth,
    with_less_memory,
    workload,
)
from headrace.kernel.formulas import critical_batch, step_size
from headrace.kernel.inputs import merge_copies
from headrace.kernel.losses import Loss, find_loss
from headrace.kernel.memory import memory_budget, words
from headrace.kernel.model import Model
from headrace.kernel.operands import Operands
from headrace.kernel.planning import Layout
from headrace.kernel.precondition import Preconditioner, build_preconditioner
from headrace.kernel.products import KernelProduct, times
from headrace.kernel.rates import wanted_batch
from headrace.kernel.solver import Course, Problem, solve
from headrace.kernel.stream_data import Chunk, MemoryChunks, SourceChunks, SourceRows

PROJECTION_EPOCHS = 4
PROJECTION_TOL = 0.02
"""How exactly a projection is solved; a guess that the averaging makes uncritical."""
MOST_DATA_SAMPLES = 2000
GROWTH = 4.0
MOST_HALVINGS = 20


@dataclass(kw_only=True)
class Stream:
    """What training from a stream keeps between chunks."""

    sample: KernelProduct
    """S."""
    preconditioner: Preconditioner
    projector: Preconditioner
    projector_layout: Layout
    cache: KernelCache | None
    batch: int
    step: float
    period_rows: int
    """Rows between projections."""
    chunk_rows: int
    rows_seen: int
    """n, for the ridge's share of a step."""
    first_square: float
    """Mean squared gradient of the zero function on the sample."""


def fit_stream(
    rows: Any,
    targets: Any,
    row_weights_n: NDArray[np.float64] | None,
    centers: Any,
    settings: Settings,
    *,
    earlier: Model | None = None,
    after_epoch: AfterEpoch | None = None,
) -> Model:
    """Train ``centers`` (a number or rows) on arrays, or on a source's rows with a reader of targets."""
    chunks = (
        SourceChunks(rows, targets)
        if isinstance(rows, SourceRows)
        else MemoryChunks(rows, targets, row_weights_n)
    )
    if settings.devices.several:
        raise OptionError(
            "centers= uses one device; give a single device=, or centers=None to split all rows"
        )
    random = np.random.RandomState(settings.seed)
    model = prepare_stream(chunks, centers, settings, earlier, random)
    averaged = None
    for epoch in range(settings.epochs):
        last = epoch == settings.epochs - 1
        residual, averaged = _epoch(model, chunks, settings, random, average=last)
        model.residuals.append(residual)
        settings.say(f"epoch {epoch + 1}: residual {residual:.3g} of the targets")
        if (after_epoch is not None and after_epoch(model, epoch + 1)) or residual <= settings.tol:
            return model
    if averaged is not None and after_epoch is None:
        model.expansion.first.weights_pc.copy_(averaged)
    return model


def prepare_stream(
    chunks: MemoryChunks | SourceChunks,
    centers: Any,
    settings: Settings,
    earlier: Model | None,
    random: np.random.RandomState | None = None,
) -> Model:
    """Centres, preconditioners and pace within the budget; no row has been trained on yet."""
    draws = np.random.RandomState(settings.seed) if random is None else random

    def attempt(allowed: int, retry: int) -> Model:
        return _prepare(chunks, centers, settings, earlier, draws, allowed, retry)

    return with_less_memory(attempt, memory_budget(settings.max_memory, settings.devices.first), settings.say)


def extend_stream(
    model: Model,
    rows: Any,
    targets_nc: NDArray[np.float64],
    row_weights_n: NDArray[np.float64] | None,
    settings: Settings,
) -> Model:
    """One pass over further rows with the same centres."""
    if model.stream is None:
        raise DataError(
            "a model with centers= that was loaded from a file predicts only; fit it anew to train on"
        )
    chunks = MemoryChunks(rows, targets_nc, row_weights_n)
    model.stream.rows_seen += rows.shape[0]
    residual, _ = _epoch(model, chunks, settings, np.random.RandomState(settings.seed), average=False)
    model.residuals = [*model.residuals, residual]
    return model


def _prepare(
    chunks: MemoryChunks | SourceChunks,
    centers: Any,
    settings: Settings,
    earlier: Model | None,
    random: np.random.RandomState,
    budget: int,
    retry: int,
) -> Model:
    n, d = chunks.shape
    sample_rows = min(n, max(SEARCH_ROWS, MOST_DATA_SAMPLES))
    sample = chunks.sample(random.permutation(n)[:sample_rows])
    merged = merge_copies(sample.rows, sample.targets_nc, sample.row_weights_n)
    settings, plan = with_bandwidth(sample.rows, merged, settings)
    if isinstance(centers, int):
        given = chunks.sample(random.permutation(n)[: min(centers, n)]).rows
        why = "random rows of the data"
    else:
        given, why = centers, "given"
    distinct = merge_copies(given, np.zeros((given.shape[0], 1)), None)
    order = random.permutation(len(distinct.index))
    index, keys = distinct.index[order], distinct.keys[order]
    p = len(index)
    dtype, dtype_why = settings.precision(max(p, sample_rows))
    operands = make_operands(sample.rows, settings, dtype, settings.bandwidth or 1.0)
    plan = plan.with_("centers", p, why)
    plan = plan.with_("dtype", str(dtype).removeprefix("torch."), dtype_why)
    plan = plan.with_("device", settings.devices.name, settings.devices.reason)
    plan = plan.with_("products", *settings.devices.products(operands, n * (p + sample_rows)))
    plan = plan.with_("memory", words(budget), "allowed for this fit")
    # Half for the centres and their projection; the stream's chunks and temporary centres have the other
    # half.
    projecting = replace(settings, batch_size=None)
    layout = layout_for(workload(given, p, settings, dtype), projecting, dtype, budget // 2, retry)
    product = KernelProduct(
        operands,
        operands.right(given, index),
        block_values=layout.block_values,
        fused=settings.devices.fuses(operands),
        compiled=plan["products"] == "compiled",
    )
    outputs = settings.loss.outputs
    weights = torch.zeros(p, outputs, dtype=dtype, device=operands.device)
    weights = starting_weights(keys, earlier, weights)
    model = Model(
        expansion=Expansion([Part(product=product, weights_pc=weights, start=0)]),
        loss=settings.loss,
        plan=plan,
        keys=keys,
    )
    with settings.devices.precision(settings.tf32):
        model.stream = _make_stream(model, sample, settings, layout, n, d, budget)
    for decision in model.plan.decisions:
        settings.say(f"{decision.name} = {decision.value}: {decision.reason}")
    return model


def _make_stream(
    model: Model,
    sample: Chunk,
    settings: Settings,
    layout: Layout,
    n: int,
    d: int,
    budget: int,
) -> Stream:
    operands, product = model.operands, model.expansion.first.product
    p, c, itemsize = product.rows, model.outputs, product.right_pk.element_size()
    # With every copy of a row: batches hold them too, and a spectrum without them makes steps too large by far.
    every = np.arange(sample.rows.shape[0])
    sample_product = KernelProduct(
        operands,
        operands.right(sample.rows, every),
        block_values=layout.block_values,
        fused=product.fused,
        compiled=product.compiled,
    )
    s = sample_product.rows
    weights = sample.row_weights_n
    row_weights = (
        None if weights is None else torch.from_numpy(weights).to(product.right_pk.device, operands.dtype)
    )
    ridge = settings.ridge / settings.loss.curvature
    # A batch and its kernel values with all centres; the block that is kept decides.
    wanted = settings.batch_size or wanted_batch(operands.device, operands.dtype, d)
    batch = max(1, min(wanted, n, max(32, s // 2), budget // 8 // max(1, itemsize * (p + s))))
    preconditioner = build_preconditioner(
        sample_product, s, batch, rows=n, ridge=ridge, row_weights_n=row_weights, seed=settings.seed
    )
    limit = critical_batch(preconditioner.top, preconditioner.peak)
    batch = min(batch, max(1, limit))
    step = step_size(batch, peak=preconditioner.peak, top=preconditioner.top)
    projector = build_preconditioner(
        product, layout.samples, layout.batch, rows=p, deterministic=layout.whole, seed=settings.seed
    )
    room = budget // 8
    period = max(batch, min(max(p, 4 * batch), room // (itemsize * (d + c + 4))))
    chunk = max(batch, min(n, 65_536, room // (4 * (itemsize * d + 8 * c) + 1)))
    plan = model.plan
    plan = plan.with_("cached", layout.cached, "the centres' kernel matrix, for projections")
    plan = plan.with_("samples", s, "rows of the data that the preconditioner stands on")
    plan = plan.with_("directions", preconditioner.directions, f"moves the useful batch to {limit}")
    plan = plan.with_("batch", batch, "the smallest of what device, kernel and memory allow")
    plan = plan.with_("step", step, "the largest stable step for this batch and spectrum")
    plan = plan.with_("period", period, "rows between two projections onto the centres")
    model.plan = plan.with_(
        "chunk", chunk, "rows taken at a time; a source is buffered two of them at a time"
    )
    targets = torch.from_numpy(sample.targets_nc.astype(np.float64))
    zero = settings.loss.gradient(torch.zeros_like(targets), targets)
    return Stream(
        sample=sample_product,
        preconditioner=preconditioner,
        projector=projector,
        projector_layout=layout,
        cache=KernelCache(product, operands.dtype) if layout.cached else None,
        batch=batch,
        step=step,
        period_rows=period,
        chunk_rows=chunk,
        rows_seen=n,
        first_square=float(zero.square().sum()) / len(zero),
    )


def _epoch(
    model: Model,
    chunks: MemoryChunks | SourceChunks,
    settings: Settings,
    random: np.random.RandomState,
    *,
    average: bool,
) -> tuple[float, Tensor | None]:
    """One pass over the data: (relative residual seen on the way, the mean of the projections' weights)."""
    total, count, total_weights, projections = 0.0, 0, None, 0
    with settings.devices.precision(settings.tf32):
        period = Period(model, settings)
        for chunk in chunks.epoch(model.stream.chunk_rows, random, model.operands.device):
            for square, rows in steps_over(model, period, chunk):
                total, count = total + square, count + rows
                if average and period.filled == 0:
                    current = model.expansion.first.weights_pc
                    total_weights = current.clone() if total_weights is None else total_weights.add_(current)
                    projections += 1
        period.project()
    mean = None if total_weights is None else total_weights / projections
    return math.sqrt(total / max(1, count) / max(model.stream.first_square, 1e-300)), mean


def steps_over(model: Model, period: Period, chunk: Chunk) -> Any:
    """Steps over one chunk; yields (sum of squared gradients, rows) for each projection, and once at the
    end.
    """
    stream, operands = model.stream, model.operands
    n = chunk.rows.shape[0]
    count = -(-n // stream.batch)
    square, rows = 0.0, 0
    for number in range(count):
        start, stop = n * number // count, n * (number + 1) // count
        right = operands.right(chunk.rows[start:stop])
        right = right.to_dense() if right.layout == torch.sparse_csr else right
        targets = torch.from_numpy(np.ascontiguousarray(chunk.targets_nc[start:stop])).to(right)
        weights = chunk.row_weights_n
        row_weights = None if weights is None else torch.from_numpy(weights[start:stop]).to(right)
        square += period.step(right, targets, row_weights)
        rows += stop - start
        if period.due:
            period.project()
            yield square, rows
            square, rows = 0.0, 0
    if rows:
        yield square, rows


class Period:
    """The steps between two projections."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.stream: Stream = model.stream
        operands, stream = model.operands, self.stream
        width, c = operands.width(_features(operands, stream.sample.right_pk)), model.outputs
        device = operands.device
        room = stream.period_rows + stream.batch
        self.right = torch.empty(room, width, dtype=operands.dtype, device=device)
        self.weights = torch.empty(room, c, dtype=operands.dtype, device=device)
        self.temporary = KernelProduct(
            operands,
            self.right,
            block_values=stream.sample.block_values,
            fused=stream.sample.fused,
            compiled=stream.sample.compiled,
        )
        self.on_sample = torch.zeros(stream.sample.rows, c, dtype=operands.dtype, device=device)
        self.values_p = torch.zeros(model.expansion.centers, c, dtype=operands.dtype, device=device)
        self.ridge = settings.ridge / settings.loss.curvature
        self.loss: Loss = find_loss(settings.loss.name, c)
        self.halvings = 0
        self.begin()

    def begin(self) -> None:
        """From the weights as they are now."""
        self.filled = 0
        self.square = 0.0
        self.on_sample.zero_()
        self.values_p.zero_()
        self.before = self.model.expansion.first.weights_pc.clone()

    @property
    def due(self) -> bool:
        return self.filled >= self.stream.period_rows

    def step(self, right_mk: Tensor, targets_mc: Tensor, row_weights_m: Tensor | None) -> float:
        """One batch; the sum of its squared gradients."""
        stream, part = self.stream, self.model.expansion.first
        m = right_mk.shape[0]
        left = self.model.operands.left(right_mk)
        kernel_mp = part.product.evaluate(
            left, 0, part.product.rows, part.product.buffer("centres", m, part.product.rows)
        )
        kernel_ms = stream.sample.evaluate(
            left, 0, stream.sample.rows, stream.sample.buffer("keep", m, stream.sample.rows)
        )
        values = times(kernel_mp, part.weights_pc).add_(times(kernel_ms, self.on_sample))
        if self.filled:
            self.temporary.right_pk = self.right[: self.filled]
            values += self.temporary.multiply(left, self.weights[: self.filled])
        gradient = self.loss.gradient(values, targets_mc)
        if row_weights_m is not None:
            gradient = gradient * row_weights_m[:, None]
        square = float(gradient.double().square().sum())
        self.square += square
        rate = stream.step / m
        if self.ridge:
            shrink = 1 - stream.step * self.ridge / stream.rows_seen
            for coefficients in (part.weights_pc, self.weights[: self.filled], self.on_sample, self.values_p):
                coefficients.mul_(shrink)
        self.on_sample.add_(stream.preconditioner.correction(kernel_ms, gradient), alpha=rate)
        self.values_p.add_(times(kernel_mp.T, gradient), alpha=-rate)
        stop = self.filled + m
        self.right[self.filled : stop] = right_mk
        torch.mul(gradient, -rate, out=self.weights[self.filled : stop])
        self.filled = stop
        return square

    def project(self) -> None:
        """Back onto the centres; or back to the period's start with half the step when the residual grew."""
        if not self.filled:
            return
        if not self.square / self.filled <= GROWTH * self.stream.first_square:
            self._retreat()
            return
        stream, model = self.stream, self.model
        product = model.expansion.first.product
        self._add_sample_values(product)
        theta = torch.zeros_like(self.values_p)
        expansion = Expansion([Part(product=product, weights_pc=theta, start=0)])
        layout, projector = stream.projector_layout, stream.projector
        batch = (
            product.rows if layout.whole else min(layout.batch, critical_batch(projector.top, projector.peak))
        )
        solve(
            Problem(
                expansion=expansion,
                targets_nc=self.values_p,
                loss=find_loss("squared", model.outputs),
                cache=stream.cache,
            ),
            projector,
            Course(
                batch=batch,
                step=step_size(batch, peak=projector.peak, top=projector.top, rows=product.rows),
                epochs=PROJECTION_EPOCHS,
                tol=PROJECTION_TOL,
                seed=self.settings.seed,
            ),
        )
        model.expansion.first.weights_pc.add_(expansion.first.weights_pc)
        self.begin()

    def _add_sample_values(self, product: KernelProduct) -> None:
        """values_p += K(Z, S) b."""
        from headrace.kernel.operands import slice_rows

        for start in range(0, product.rows, 1024):
            stop = min(product.rows, start + 1024)
            left = product.operands.left(slice_rows(product.right_pk, start, stop))
            self.values_p[start:stop] += self.stream.sample.multiply(left, self.on_sample)

    def _retreat(self) -> None:
        self.halvings += 1
        self.stream.step /= 2
        if self.halvings > MOST_HALVINGS:
            raise DivergenceError(
                f"the residual still grows after the step was halved {MOST_HALVINGS} times; "
                "is the kernel positive semidefinite, and are X and y free of huge values?"
            )
        self.settings.say(f"the residual grew: the step is halved to {self.stream.step:.4g}")
        self.model.expansion.first.weights_pc.copy_(self.before)
        self.begin()


def _features(operands: Operands, right_nk: Tensor) -> int:
    return int(right_nk.shape[1]) - operands.width(0)
