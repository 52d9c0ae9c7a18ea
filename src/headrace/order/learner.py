"""From the records of a backward pass to signs: the part of an order that learns.

A `Learner` owns the hooks on one model, the projections, the balancer, the drift meter and one sign per row. Nothing in
it waits for the device. A sign belongs to the row, not to its position in the batch.

Signals:

- ``sketch``: rows of k numbers for every example (`headrace.order.sketch`). Memory O(k) beside the projections.
- ``exact``: whole gradients through inner products (`headrace.order.pieces`). Memory 2d (pairs) or 3d (mean) floats.
- ``microbatch``: the sketch of a whole group's gradient; the "examples" are fixed groups of rows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ModelError, OptionError, UsageError
from headrace.order.balance import has_kernel, warm_pairs, warm_walk
from headrace.order.balancers import Balancer, MeanBalancer, PairBalancer, Rows, TreeBalancer, VectorRows
from headrace.order.coordinated import Exchange, WorkerPairs
from headrace.order.deferred import Deferred, Held
from headrace.order.drift import DriftMeter
from headrace.order.herding import VectorStore
from headrace.order.options import LearnerOptions
from headrace.order.pieces import Dense, Factors, LongRows, Piece, project_inputs
from headrace.order.reduction import warn_of_sum
from headrace.order.sketch import Projection, Projections, SketchSum, join
from headrace.order.watch import CollectLinear, Record, Watcher
from headrace.types import State

CHUNK = 512  # rows signed at once; from 256 on the fixed cost no longer shows


class Learner:
    """Watches a model and signs rows."""

    def __init__(
        self,
        n: int,
        options: LearnerOptions,
        *,
        workers: int = 1,
        exchange: Exchange | None = None,
        next_indices: Callable[[], Tensor | None] = lambda: None,
        take_rows: Callable[[int], Tensor] | None = None,
        to_unit: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> None:
        if options.signal == "exact" and workers > 1:
            raise OptionError("workers= exchange sketches; use signal='sketch' with more than one worker")
        if workers > 1 and options.kind != "pair":
            raise OptionError(
                f"workers={workers} share a walk over pairs; kind={options.kind!r} cannot, use 'pair'"
            )
        self.n = n
        self.options = options
        self.workers = workers
        self.exchange = exchange
        self.projections = Projections(options.k, options.seed)
        self.watcher: Watcher | None = None
        self.scaler: Any = None
        self.seen = 0
        self.signs = torch.zeros(n, options.depth if options.kind == "recursive" else 1, dtype=torch.int8)
        self._next_indices = next_indices
        self._take_rows = take_rows
        self._to_unit = to_unit
        self._places: dict[int, tuple[int, torch.Size]] = {}
        self._balancer: Balancer | TreeBalancer | WorkerPairs | VectorStore | None = None
        self._meter: DriftMeter | None = None
        self._waiting: Tensor | None = None
        self._pending_state: State | None = None
        self._chunk: list[tuple[Tensor, SketchSum, float | Tensor]] = []
        self._chunk_rows = 0
        self._signed = False
        self._grad_hooks: list[Any] = []
        self.deferred: Deferred | None = None
        """While a CUDA graph is captured: what its batches leave for later."""

    # Watching

    def watch(self, model: nn.Module, *, scaler: Any = None, batch_dim: int = 0) -> None:
        if self.watcher is not None:
            if self.watcher.model is model:
                return
            raise UsageError(
                "this sampler already watches a model; an order is learned from one model: make another sampler, "
                "or put both models into one torch.nn.ModuleList"
            )
        trained = self.know(model)
        self.scaler = scaler
        self.watcher = Watcher(
            model,
            collect=self._collect,
            linear_collector=self._linear_collector if self.options.signal == "sketch" else None,
            finish=self._finish,
            next_indices=self._next_indices,
            batch_dim=batch_dim,
            tap_layers=self.options.signal != "microbatch",
            check_output=warn_of_sum if self.options.reduction == "mean" and scaler is None else None,
        )
        if self.options.signal == "microbatch":
            self._tap_gradients([p for _, p in trained])
        elif self.watcher.share() == 0.0:
            raise ModelError(
                "no layer of this model is known, so its gradients cannot be split by example; "
                "use signal='microbatch', or give per-example gradients to observe()"
            )
        if self.watcher.left_out or self.watcher.approximate:
            warnings.warn(f"order: {self.watcher.coverage()}", stacklevel=4)

    def know(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Make ready for a model's gradients; returns its trained parameters."""
        if not isinstance(model, nn.Module):
            raise ModelError(f"watch() takes a torch.nn.Module, not {type(model).__name__}")
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ModelError("the model has no parameter that is trained, so there is nothing to learn from")
        self.projections.name(trained)
        self.projections.know(model)
        self._lay_out(trained)
        self._build_early([p for _, p in trained])
        return trained

    def unwatch(self) -> None:
        if self.watcher is not None:
            self.watcher.remove()
            self.watcher = None
        for handle in self._grad_hooks:
            handle.remove()
        self._grad_hooks = []

    def _lay_out(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        start = 0
        for _, parameter in trained:
            self._places[id(parameter)] = (start, parameter.shape)
            start += parameter.numel()
        self._dim = start

    def _tap_gradients(self, parameters: list[nn.Parameter]) -> None:
        def hook_for(parameter: nn.Parameter) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                watcher = self.watcher
                if watcher is None or not watcher._queue:
                    return
                record = watcher._queue[0]
                with torch.no_grad():
                    Dense(parameter, gradient[None]).sketch(self._sum_of(record, 1))
                record.fired += 1
                if record.fired == len(parameters):
                    watcher.complete(record)

            return hook

        self._grad_hooks = [p.register_hook(hook_for(p)) for p in parameters]

    # Records

    def _sum_of(self, record: Record, batch: int) -> SketchSum:
        if record.sketch is None:
            record.sketch = SketchSum(batch, self.projections)
        return record.sketch

    def _collect(self, record: Record, pieces: list[Piece]) -> None:
        if self.deferred is not None:
            record.pieces.extend(pieces)
            return
        into = self._sum_of(record, record.layout.batch)
        for piece in pieces:
            piece.sketch(into)
        if self.options.signal == "exact":
            record.pieces.extend(pieces)

    def _linear_collector(self, module: nn.Linear) -> CollectLinear:
        """`_collect` for the commonest layer without its detours: they cost as much as the arithmetic."""
        known: Projection | None = None

        def collect(record: Record, x: Tensor, delta: Tensor) -> None:
            nonlocal known
            if self.deferred is not None:
                left, right = delta[:, None, :], x.detach()[:, None, :]
                record.pieces.append(Factors(module.weight, module._parameters["bias"], left, right))
                return
            projection = known
            if (
                projection is None
                or projection.rows.dtype is not delta.dtype
                or projection.rows.device != delta.device
            ):
                projection = known = self.projections.of(module.weight, delta)
            into = record.sketch
            if into is None:
                into = record.sketch = SketchSum(record.layout.batch, self.projections)
            left = torch.mm(projection.rows_t, delta.T)
            into.add_outer(left, project_inputs(x, projection, module._parameters["bias"]))

        return collect

    def _finish(self, record: Record) -> None:
        if not record.pieces and (record.sketch is None or record.sketch.empty):
            return
        batch = record.layout.batch
        indices = record.indices
        if indices is None and self._take_rows is not None:
            indices = self._take_rows(batch)
        if indices is None:
            raise UsageError(
                "a backward pass ran, but the rows of its batch are unknown: call begin_batch(indices) before the "
                "forward pass"
            )
        if self.deferred is not None:
            self.deferred.add(Held(indices, record.pieces, self._scale(batch)))
            return
        assert record.sketch is not None
        if self.options.signal == "microbatch":
            self._collect_chunk(self._to_unit(indices), record.sketch, self._scale(1))
        elif self.options.signal == "exact":
            scale = self._scale(batch)
            rows = LongRows(record.pieces, self._places, batch, scale)
            self._sign(self._count(indices), rows, join([record.sketch], [scale]))
        else:
            self._collect_chunk(indices, record.sketch, self._scale(batch))

    def _scale(self, batch: int) -> float | Tensor:
        """What undoes the mean over the batch and the loss scale of AMP."""
        scale = float(batch) if self.options.reduction == "mean" else 1.0
        if self.scaler is None or not self.scaler.is_enabled():
            return scale
        on_device = getattr(self.scaler, "_scale", None)
        # The tensor, where there is one: get_scale() would wait for the device.
        return scale / on_device if isinstance(on_device, Tensor) else scale / self.scaler.get_scale()

    def _count(self, indices: Tensor) -> Tensor:
        self.seen += len(indices)
        return indices

    def learn(self, indices: Tensor, vectors_bk: Tensor) -> None:
        """Take in one batch of vectors that the caller made."""
        whole = SketchSum(len(vectors_bk), self.projections)
        whole.summed = vectors_bk.T.clone()
        self._collect_chunk(indices, whole, 1.0)

    def take_sketch(self, indices: Tensor, sketch: SketchSum, scale: float) -> None:
        """Take in one batch whose derivatives, times ``scale``, are those of its loss."""
        with torch.no_grad():
            self._collect_chunk(indices, sketch, scale * self._scale(len(indices)))

    def _collect_chunk(self, indices: Tensor, sketch: SketchSum, scale: float | Tensor) -> None:
        """Sign a batch, or keep it until ``CHUNK`` rows are there.

        The walk is the same, its fixed cost is paid less often. Workers in one walk have to keep step, and what a CUDA
        graph captures must be complete: both sign every batch at once.
        """
        self._count(indices)
        if _captures(indices):
            # What was collected before stays for later: in here it would be signed again by every replay.
            vectors = join([sketch], [scale])
            self._sign(indices, VectorRows(vectors), vectors)
            return
        # A copy: the tensor may be the one that names the next batch, too.
        self._chunk.append((indices.clone(), sketch, scale))
        self._chunk_rows += len(indices)
        if self._chunk_rows >= CHUNK or self.exchange is not None:
            self.flush()

    def flush(self) -> None:
        """Sign what was collected."""
        if self._chunk:
            indices, sums, scales = zip(*self._chunk, strict=True)
            self._chunk, self._chunk_rows = [], 0
            vectors = join(sums, scales)
            together = torch.cat(indices) if len(indices) > 1 else indices[0]
            self._sign(together, VectorRows(vectors), vectors)

    def settle(self) -> None:
        """Finish everything that backward passes left to do."""
        self.settle_watcher()
        self.flush()
        if self.deferred is not None:
            self.deferred.settle()

    def settle_watcher(self) -> None:
        """Take in the batches of finished backward passes, without signing them yet."""
        if self.watcher is not None:
            self.watcher.settle()

    def _sign(self, indices: Tensor, rows: Rows, vectors_bk: Tensor) -> None:
        built = self._meter.sums.device if self._meter is not None else None
        if built is None or (built != vectors_bk.device and not self._signed):
            self._build(rows, vectors_bk)
        assert self._meter is not None
        self._signed = True
        indices = indices.to(self.signs.device, non_blocking=True)
        balancer = self._balancer
        if self._walks_pairs(rows):
            from headrace.order.walk_triton import sign_pairs

            sign_pairs(vectors_bk, indices, self.signs, balancer.running, self._meter)  # type: ignore[union-attr]
            return
        if vectors_bk.device.type != "cpu":  # on a CPU the walk looks for overflows itself
            torch.nan_to_num_(vectors_bk, 0.0, 0.0, 0.0)
        self._meter.update(vectors_bk)
        if isinstance(balancer, TreeBalancer):
            balancer.step(vectors_bk, indices, self.signs)
            return
        if isinstance(balancer, VectorStore):
            balancer.put(indices, vectors_bk)
            return
        if isinstance(balancer, WorkerPairs):
            settled, signs = balancer.step(vectors_bk, indices)
            self.signs[settled, 0] = signs.to(torch.int8)
            return
        assert isinstance(balancer, Balancer)
        waited = balancer.waits
        signs = balancer.step(rows)
        if waited:
            assert self._waiting is not None
            indices = torch.cat([self._waiting, indices])
        self._waiting = indices[-1:] if balancer.waits else None
        self.signs[:, 0].index_copy_(0, indices, signs.to(torch.int8))

    def _build_early(self, parameters: list[nn.Parameter]) -> None:
        """On a CUDA device the memory that signing needs is there before a graph can be captured."""
        devices = {p.device for p in parameters}
        device = devices.pop()
        if device.type != "cuda" or devices or self.options.signal == "exact" or self._balancer is not None:
            return
        dtype = torch.float64 if parameters[0].dtype is torch.float64 else torch.float32
        self._build_for(device, dtype, self.options.k, self.options.k)
        if has_kernel(device):
            warm_pairs(device, dtype, self.options.k)

    def _walks_pairs(self, rows: Rows) -> bool:
        """Whether one kernel takes these rows: vectors on a device with Triton, in pairs, none waiting."""
        balancer = self._balancer
        if not isinstance(balancer, PairBalancer) or balancer.waits or not isinstance(rows, VectorRows):
            return False
        greedy = balancer.walker.rule.name == "greedy"
        return greedy and len(rows) % 2 == 0 and has_kernel(rows.vectors.device)

    def _build(self, rows: Rows, vectors: Tensor) -> None:
        dim = self._dim if isinstance(rows, LongRows) else vectors.shape[1]
        self._build_for(vectors.device, vectors.dtype, dim, vectors.shape[1])

    def _build_for(self, device: torch.device, dtype: torch.dtype, dim: int, sketched: int) -> None:
        kind = self.options.kind
        self.signs = self.signs.to(device)
        self._meter = DriftMeter(self.n, sketched, device)
        common: dict[str, Any] = {"device": device, "dtype": dtype, "seed": self.options.seed}
        common["rule"] = self.options.rule()
        if self.workers > 1:
            self._balancer = WorkerPairs(dim, self.workers, self.exchange, **common)
        elif kind == "recursive":
            self._balancer = TreeBalancer(dim, depth=self.options.depth, **common)
        elif kind in ("greedy", "herding"):
            self._balancer = VectorStore(self.n, dim, device=device, dtype=dtype)
        else:
            self._balancer = (MeanBalancer if kind == "mean" else PairBalancer)(dim, **common)
        if self._pending_state is not None:
            self._restore(self._pending_state)
            self._pending_state = None

    # Capturing

    @contextlib.contextmanager
    def capturing(self, device: torch.device, batch: int, stretches: Sequence[int]) -> Iterator[None]:
        """Between here and the end, what `settle` needs is complete and waits for nothing; then all is as before.

        ``stretches``: the rows between two calls of `settle`, in batches of ``batch``.
        """
        self.settle()
        before = self.state_dict()
        if isinstance(self._balancer, Balancer):
            self._balancer.waits = False  # a graph cannot know that a row waits for its partner
        self._waiting = None
        self.deferred = Deferred(self.projections, CHUNK, self._sign_vectors, device)
        warm_walk(device, self._walk_lengths(batch, stretches))
        try:
            yield
        finally:
            self.deferred = None
            self._chunk, self._chunk_rows = [], 0
            if self.watcher is not None:
                self.watcher.drop()
            self._rewind(before)

    def _walk_lengths(self, batch: int, stretches: Sequence[int]) -> set[int]:
        """How many vectors the walks of such stretches have."""
        full, last = batch * -(-CHUNK // batch), min(stretches)  # the last update is signed by itself
        parts = {last, *(stretch - last for stretch in stretches), *stretches}
        rows = {length for part in parts for length in (min(full, part), part % full)}
        return {part // 2 if self.options.kind == "pair" else part for part in rows if part}

    def _sign_vectors(self, indices: Tensor, vectors_bk: Tensor) -> None:
        self._sign(indices, VectorRows(vectors_bk), vectors_bk)

    def _rewind(self, state: State) -> None:
        """Forget what was learned since, in place: a graph knows these tensors by their address."""
        self.signs.copy_(state["signs"])
        self.seen = int(state["seen"])
        if self._balancer is None or self._meter is None:
            return
        if "balancer" in state:
            self._restore(state)
            return
        self._clear(self._balancer, self._meter)

    def _clear(self, fresh: Any, meter: DriftMeter) -> None:
        meter.finish()
        for name in fresh.vectors:
            getattr(fresh, name).zero_()
        fresh.end_epoch()
        self._waiting = None

    # Epochs

    @property
    def learned(self) -> bool:
        """True when this epoch brought at least one batch, or may have: a replayed graph leaves no trace here."""
        return self.seen > 0 or (
            self._signed and self._meter is not None and self._meter.sums.device.type != "cpu"
        )

    def end_epoch(self) -> tuple[Tensor, Tensor] | None:
        """Close the epoch: clear sums and signs, return (H, H / √energy), None when nothing was learned."""
        self.settle()
        if not self.learned or self._meter is None or self._balancer is None:
            return None
        result = self._meter.finish()
        self._balancer.end_epoch()
        self.signs.zero_()
        self._waiting = None
        self.seen = 0
        return result

    def grow(self, n: int) -> None:
        """Go on with ``n`` rows; between epochs only."""
        self.n = n
        self.signs = torch.zeros(n, self.signs.shape[1], dtype=torch.int8, device=self.signs.device)
        if self._meter is not None:
            self._meter.n = n
        if isinstance(self._balancer, VectorStore):
            self._balancer.grow(n)

    @property
    def store(self) -> VectorStore | None:
        return self._balancer if isinstance(self._balancer, VectorStore) else None

    def bytes(self) -> int:
        """Memory that learning holds from batch to batch, beside one byte per row for the signs."""
        walk = self._balancer.bytes() if self._balancer is not None else 0
        meter = sum(t.nbytes for t in (self._meter.sums, self._meter.counts)) if self._meter else 0
        return walk + meter + self.projections.bytes()

    def state_dict(self) -> State:
        self.settle()
        state: State = {"signs": self.signs.clone(), "seen": self.seen}
        if self._balancer is not None and self._meter is not None:
            state["balancer"] = self._balancer.state_dict()
            state["meter"] = self._meter.state_dict()
            state["waiting"] = None if self._waiting is None else self._waiting.clone()
        elif self._pending_state is not None:
            state = {**self._pending_state, **state}
        return state

    def load_state_dict(self, state: State) -> None:
        self._chunk, self._chunk_rows = [], 0
        if self.signs.shape == state["signs"].shape:
            self.signs.copy_(state["signs"])  # in place: a graph knows the tensor by its address
        else:
            self.signs = state["signs"].clone()
        self.seen = int(state["seen"])
        if self._balancer is not None:
            if "balancer" in state:
                self._restore(state)
            elif isinstance(self._balancer, Balancer) and self._meter is not None:
                self._clear(self._balancer, self._meter)
            else:
                self._balancer = self._meter = None
        elif "balancer" in state:
            # The device and the dtype of the gradients are not known before the first batch.
            self._pending_state = state

    def _restore(self, state: State) -> None:
        assert self._balancer is not None
        assert self._meter is not None
        self._balancer.load_state_dict(state["balancer"])
        self._meter.load_state_dict(state["meter"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else waiting.to(self.signs.device)


def _captures(indices: Tensor) -> bool:
    return indices.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
