"""Training on rows that lie in memory, every row a centre: wires the decisions to the solver.

Order of events: merge equal rows → bandwidth → layout within the budget → operands (S first) → eigensystem →
pace → epochs. When an allocation fails all the same, everything is laid out again in half the memory, twice;
then the error says what would fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import assert_all_finite
from torch import Tensor

from headrace.errors import OptionError
from headrace.kernel.bandwidth import SEARCH_ROWS, choose_bandwidth
from headrace.kernel.cache import KernelCache
from headrace.kernel.devices import DeviceChoice
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.functions import KernelFunction
from headrace.kernel.inputs import Merged, merge_copies, row_keys
from headrace.kernel.losses import Loss
from headrace.kernel.memory import Workload, is_out_of_memory, memory_budget, words
from headrace.kernel.model import Model
from headrace.kernel.operands import Operands, slice_rows
from headrace.kernel.planning import WHOLE_ROWS_CPU, WHOLE_ROWS_CUDA, Layout, lay_out, set_pace
from headrace.kernel.precondition import build_preconditioner
from headrace.kernel.products import CPU_BLOCK_VALUES, CUDA_BLOCK_VALUES, FUSED_OUTPUTS, KernelProduct
from headrace.kernel.rates import wanted_batch
from headrace.kernel.replay import cuda_graph, decide_replay
from headrace.kernel.resident import all_finite, place_rows
from headrace.kernel.solver import Course, Problem, solve
from headrace.types import Plan

MEMORY_RETRIES = 2
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose, checked."""

    kernel: KernelFunction
    bandwidth: float | None
    ridge: float
    loss: Loss
    epochs: int
    tol: float
    batch_size: int | None
    momentum: object
    devices: DeviceChoice
    dtype: str
    max_memory: object
    seed: int
    say: Say = lambda sentence: None

    def precision(self, rows: int) -> tuple[torch.dtype, str]:
        """The dtype for that many centres, and why."""
        if self.dtype == "auto":
            limit = WHOLE_ROWS_CUDA if self.devices.on_cuda else WHOLE_ROWS_CPU
            if rows <= limit and not self.devices.several:
                return torch.float64, "few rows: precision costs nothing that can be felt"
            return torch.float32, "products in TF32 on centred rows" if self.devices.on_cuda else "full speed"
        return (torch.float64 if self.dtype == "float64" else torch.float32), "given"

    @property
    def tf32(self) -> bool:
        return self.devices.on_cuda and self.dtype in ("auto", "tf32")


AfterEpoch = Callable[[Model, int], bool]


def fit_rows(
    rows: Any,
    targets_nc: NDArray[np.float64],
    row_weights_n: NDArray[np.float64] | None,
    settings: Settings,
    *,
    earlier: Model | None = None,
    after_epoch: AfterEpoch | None = None,
) -> Model:
    """Train on all rows; starts from the weights of ``earlier`` where it knows a row."""
    budget = memory_budget(settings.max_memory, settings.devices.first)
    placed, held = place_rows(rows, settings.devices.first, budget)
    if settings.devices.on_cuda:
        check_finite(rows, placed)
    merged = merge_copies(placed, targets_nc, row_weights_n)
    settings, plan = with_bandwidth(rows, merged, settings)
    if merged.copies:
        plan = plan.with_("copies_merged", merged.copies, "equal rows count once, with their weights added")

    def attempt(allowed: int, retry: int) -> Model:
        return _fit_within(placed, merged, settings, plan, allowed, retry, earlier, after_epoch)

    return with_less_memory(attempt, budget - held, settings.say)


def check_finite(rows: Any, placed: Any) -> None:
    """scikit-learn's check, which a sum on the device answers when all is well."""
    if not isinstance(placed, Tensor) or not all_finite(placed):
        assert_all_finite(rows.data if hasattr(rows, "tocsr") else rows, input_name="X")


def with_less_memory(attempt: Callable[[int, int], Model], budget: int, say: Say) -> Model:
    """Try within the budget; when memory runs out, in half and a quarter of it, with blocks a quarter the
    size.

    ``attempt`` is given the budget and how often it was tried before.
    """
    for retry in range(MEMORY_RETRIES + 1):
        allowed = budget >> retry
        try:
            return attempt(allowed, retry)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            if retry == MEMORY_RETRIES:
                raise OptionError(
                    f"memory ran out with max_memory={words(budget)}, and again within {words(allowed)} "
                    f"({reason}); "
                    f"a fit within {words(allowed // 2)} may do: lower max_memory, or choose fewer centres "
                    "(centers=)"
                ) from error
            say(f"memory ran out within {words(allowed)}; trying again within {words(allowed // 2)}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    raise AssertionError


def with_bandwidth(rows: Any, merged: Merged, settings: Settings) -> tuple[Settings, Plan]:
    """The settings with a bandwidth, and a plan that begins with why."""
    n = len(merged.index)
    plan = Plan()
    if settings.bandwidth is not None:
        return settings, plan.with_("bandwidth", settings.bandwidth, "given")
    chosen = np.arange(n)
    if n > SEARCH_ROWS:
        chosen = np.sort(np.random.RandomState(settings.seed).permutation(n)[:SEARCH_ROWS])
    sample = rows[merged.index[chosen]]
    if not hasattr(sample, "tocsr"):
        sample = np.asarray(sample, dtype=np.float64)
    weights = None if merged.row_weights_n is None else torch.from_numpy(merged.row_weights_n[chosen])
    operands = make_operands(sample, settings, torch.float64, 1.0)
    bandwidth, why = choose_bandwidth(
        replace(operands, device=torch.device("cpu"), mean_d=_on_cpu(operands.mean_d)),
        sample,
        torch.from_numpy(merged.targets_nc[chosen].astype(np.float64)),
        ridge=settings.ridge * len(chosen) / n,
        row_weights_s=weights,
    )
    return replace(settings, bandwidth=bandwidth), plan.with_("bandwidth", bandwidth, why)


def _on_cpu(mean_d: Tensor | None) -> Tensor | None:
    return None if mean_d is None else mean_d.cpu()


def make_operands(rows: Any, settings: Settings, dtype: torch.dtype, bandwidth: float) -> Operands:
    """Operands centred on the mean of dense rows."""
    mean = None
    if settings.kernel.family == "radial" and not hasattr(rows, "tocsr"):
        if isinstance(rows, Tensor):
            mean = rows.mean(dim=0, dtype=torch.float64)
        else:
            mean = torch.from_numpy(np.asarray(rows.mean(axis=0, dtype=np.float64)))
        mean = mean.to(settings.devices.first, dtype)
    return Operands(
        kernel=settings.kernel,
        bandwidth=bandwidth,
        mean_d=mean,
        dtype=dtype,
        device=settings.devices.first,
        exact_norms=settings.tf32 and dtype == torch.float32,
    )


def workload(rows: Any, n: int, settings: Settings, dtype: torch.dtype) -> Workload:
    sparse = hasattr(rows, "tocsr")
    itemsize = torch.finfo(dtype).bits // 8
    return Workload(
        rows=n,
        features=rows.shape[1],
        outputs=settings.loss.outputs,
        itemsize=itemsize,
        scratch=settings.kernel.needs_scratch,
        dense_bytes=int(rows.nnz * (n / rows.shape[0]) * (16 + 2 * itemsize)) if sparse else None,
        packed_bytes=n * (2 * rows.shape[1] + 132) if settings.tf32 and settings.kernel.code >= 0 else 0,
    )


def layout_for(work: Workload, settings: Settings, dtype: torch.dtype, budget: int, retry: int = 0) -> Layout:
    on_cuda = settings.devices.on_cuda
    whole_limit = WHOLE_ROWS_CUDA if on_cuda else WHOLE_ROWS_CPU
    wanted = work.rows
    if not settings.batch_size and work.rows > whole_limit:
        with settings.devices.precision(settings.tf32):
            wanted = wanted_batch(settings.devices.first, dtype, work.features)
    return lay_out(
        work,
        budget,
        wanted_batch=wanted,
        on_cuda=on_cuda,
        block_values=(CUDA_BLOCK_VALUES if on_cuda else CPU_BLOCK_VALUES) >> (2 * retry),
        cache_itemsize=2 if on_cuda and dtype == torch.float32 else work.itemsize,
        cacheable=not settings.devices.several and not retry,
        fixed_batch=settings.batch_size,
    )


def _fit_within(
    rows: Any,
    merged: Merged,
    settings: Settings,
    plan: Plan,
    budget: int,
    retry: int,
    earlier: Model | None,
    after_epoch: AfterEpoch | None,
) -> Model:
    n = len(merged.index)
    dtype, why = settings.precision(n)
    plan = plan.with_("dtype", str(dtype).removeprefix("torch."), why)
    plan = plan.with_("device", settings.devices.name, settings.devices.reason)
    plan = plan.with_("memory", words(budget), "allowed for this fit")
    layout = layout_for(workload(rows, n, settings, dtype), settings, dtype, budget, retry)
    order = np.random.RandomState(settings.seed).permutation(n)
    assert settings.bandwidth is not None
    operands = make_operands(rows, settings, dtype, settings.bandwidth)
    plan = plan.with_("products", *settings.devices.products(operands, n * n))
    index = merged.index[order]
    device = settings.devices.first
    targets = torch.from_numpy(np.ascontiguousarray(merged.targets_nc[order])).to(device, dtype)
    weights = merged.row_weights_n
    row_weights = None if weights is None else torch.from_numpy(weights[order]).to(device, dtype)
    keys = merged.keys[order]
    start = starting_weights(keys, earlier, targets)
    expansion = split_over(operands, rows, index, start, settings, layout)
    model = Model(
        expansion=expansion,
        loss=settings.loss,
        plan=join(plan, layout.plan),
        keys=keys,
        targets_nc=targets,
        row_weights_n=row_weights,
    )
    train(model, settings, layout, after_epoch)
    return model


def starting_weights(keys: NDArray[np.uint64], earlier: Model | None, targets_nc: Tensor) -> Tensor:
    """Zero, or an earlier model's weights for the rows it knows."""
    start = torch.zeros_like(targets_nc)
    if earlier is None or not len(earlier.keys) or earlier.outputs != targets_nc.shape[1]:
        return start
    by_key = np.argsort(earlier.keys)
    place = np.searchsorted(earlier.keys, keys, sorter=by_key).clip(max=len(by_key) - 1)
    found = by_key[place]
    known = torch.from_numpy(np.flatnonzero(earlier.keys[found] == keys))
    old = earlier.expansion.gather()[torch.from_numpy(found)[known]]
    start[known.to(start.device)] = old.to(start)
    return start


def split_over(
    operands: Operands,
    rows: Any,
    index: NDArray[np.int64],
    start_nc: Tensor,
    settings: Settings,
    layout: Layout,
) -> Expansion:
    """The centres' operands and weights, in equal contiguous ranges, one for each device."""
    n = len(index)
    parts = []
    for device, (low, high) in zip(
        settings.devices.devices, settings.devices.ranges(n, layout.samples), strict=True
    ):
        mean = operands.mean_d
        local = replace(operands, device=device, mean_d=None if mean is None else mean.to(device))
        right = local.right(rows, index[low:high])
        product = KernelProduct(
            local,
            right,
            block_values=layout.block_values,
            fused=settings.devices.fuses(local),
            compiled=settings.devices.products(local, n * n)[0] == "compiled",
        )
        parts.append(Part(product=product, weights_pc=start_nc[low:high].to(device), start=low))
    return Expansion(parts)


def join(first: Plan, second: Plan) -> Plan:
    return Plan(decisions=(*first.decisions, *second.decisions))


def train(
    model: Model,
    settings: Settings,
    layout: Layout,
    after_epoch: AfterEpoch | None,
    *,
    first_row: int = 0,
) -> None:
    """Eigensystem, pace and epochs for a model whose operands, targets and weights are in place."""
    curvature = settings.loss.curvature
    ridge = settings.ridge / curvature
    product, n = model.expansion.first.product, model.expansion.centers
    with settings.devices.precision(settings.tf32):
        preconditioner = build_preconditioner(
            product,
            layout.samples,
            layout.batch,
            rows=n,
            ridge=ridge,
            row_weights_n=model.row_weights_n,
            deterministic=layout.whole,
            seed=settings.seed,
        )
        pace = set_pace(layout, preconditioner, rows=n, ridge=ridge, wants_momentum=settings.momentum)
        model.plan = join(model.plan, Plan(decisions=pace.plan.decisions[len(layout.plan.decisions) :]))
        replays = False
        if settings.devices.on_cuda:
            reads_rows = layout.cached and first_row == 0 and settings.tf32 and product.fused
            replays, why = decide_replay(
                reads_rows and model.outputs <= FUSED_OUTPUTS, settings.epochs * -(-n // pace.batch)
            )
            model.plan = model.plan.with_("steps", "replayed" if replays else "launched", why)
        if settings.loss.name == "logistic":
            model.plan = model.plan.with_(
                "curvature", curvature, "largest of the logistic loss; steps use it"
            )
        for decision in model.plan.decisions:
            settings.say(f"{decision.name} = {_short(decision.value)}: {decision.reason}")
        assert model.targets_nc is not None
        cache = None
        if layout.cached and first_row == 0:
            cache_dtype = (
                torch.float16 if settings.devices.on_cuda and settings.tf32 else product.operands.dtype
            )
            cache = KernelCache(product, cache_dtype)
        problem = Problem(
            expansion=model.expansion,
            targets_nc=model.targets_nc,
            loss=settings.loss,
            ridge=ridge,
            row_weights_n=model.row_weights_n,
            cache=cache,
            first_row=first_row,
        )

        def ended(epoch: int, residual: float) -> bool:
            settings.say(f"epoch {epoch}: residual {residual:.3g} of the targets")
            return after_epoch is not None and after_epoch(model, epoch)

        outcome = solve(
            problem,
            preconditioner,
            Course(
                batch=pace.batch,
                step=pace.step,
                epochs=settings.epochs,
                tol=settings.tol,
                momentum=pace.momentum,
                capture=cuda_graph(settings.devices.first) if replays else None,
                check_inside=not settings.devices.on_cuda,
                seed=settings.seed,
                say=settings.say,
                after_epoch=ended,
            ),
        )
    if outcome.capture_failed:
        model.plan = model.plan.with_("steps", "launched", f"capturing failed: {outcome.capture_failed}")
    model.residuals = outcome.residuals
    model.halvings = outcome.halvings


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def extend(
    model: Model,
    rows: Any,
    targets_nc: NDArray[np.float64],
    row_weights_n: NDArray[np.float64] | None,
    settings: Settings,
) -> Model:
    """One epoch over new rows, which become further centres; rows the model knows only get a new target."""
    merged = merge_copies(rows, targets_nc, row_weights_n)
    new = ~np.isin(merged.keys, model.keys)
    old_count, fresh = model.expansion.centers, int(new.sum())
    operands, part = model.operands, model.expansion.first
    assert model.targets_nc is not None
    if not fresh:
        return model
    order = np.random.RandomState(settings.seed).permutation(np.flatnonzero(new))
    n = old_count + fresh
    budget = memory_budget(settings.max_memory, settings.devices.first)
    layout = layout_for(workload(rows, n, settings, operands.dtype), settings, operands.dtype, budget)
    layout = replace(layout, whole=False, batch=min(layout.batch, fresh), samples=min(layout.samples, n))
    right = operands.right(rows, merged.index[order])
    targets = torch.from_numpy(merged.targets_nc[order]).to(model.targets_nc)
    part.product = KernelProduct(
        operands,
        concatenate(part.product.right_pk, right),
        block_values=layout.block_values,
        fused=part.product.fused,
        compiled=part.product.compiled,
    )
    part.weights_pc = torch.cat([part.weights_pc, torch.zeros_like(targets)])
    model.targets_nc = torch.cat([model.targets_nc, targets])
    if model.row_weights_n is not None or merged.row_weights_n is not None:
        given = merged.row_weights_n
        added = np.ones(fresh) if given is None else given[order]
        kept = model.row_weights_n
        kept = torch.ones(old_count, dtype=operands.dtype, device=operands.device) if kept is None else kept
        model.row_weights_n = torch.cat([kept, torch.from_numpy(added).to(kept)])
    model.keys = np.concatenate([model.keys, merged.keys[order]])
    model.plan = join(
        Plan(decisions=tuple(d for d in model.plan.decisions if d.name in ("bandwidth", "dtype", "device"))),
        layout.plan,
    )
    train(model, replace(settings, epochs=1), layout, None, first_row=old_count)
    return model


def concatenate(first_nk: Tensor, second_nk: Tensor) -> Tensor:
    """Operands below one another."""
    if first_nk.layout != torch.sparse_csr:
        return torch.cat([first_nk, second_nk])
    from headrace.kernel.operands import csr_tensor

    return csr_tensor(
        torch.cat([first_nk.crow_indices(), second_nk.crow_indices()[1:] + len(first_nk.values())]),
        torch.cat([first_nk.col_indices(), second_nk.col_indices()]),
        torch.cat([first_nk.values(), second_nk.values()]),
        (first_nk.shape[0] + second_nk.shape[0], first_nk.shape[1]),
        first_nk.dtype,
        first_nk.device,
    )


__all__ = ["Settings", "extend", "fit_rows", "row_keys", "slice_rows"]
