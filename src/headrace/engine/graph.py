"""Steps captured in CUDA graphs: several updates a replay, the gather and the counters on the device.

Invariant: between two host reads nothing is copied from the device. The order, the columns and the step sizes
lie at fixed addresses; a device counter walks over them. A replay gathers the rows and the step sizes of all
its updates at once, and every update takes slices: ten small kernels a replay, not an update. What capture needs
but training must not see (warm-up updates) is undone: parameters, buffers, optimizer state and random state are
put back in place.

The very first update of a run is taken eagerly: it creates the optimizer's state at addresses that the graph
can then use, whatever that state is. Short last batches are eager too. When a capture fails, the next way is
tried, and at the end every update is eager; the reason is reported.

An order that watches batches is told each batch's rows while capturing, by a tensor at a fixed address.

Short-coming: a buffer whose columns move (two device slots) is captured once per slot.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headrace.engine.bias import BiasInTwoSums, serves
from headrace.engine.steps import EagerStepper, Listener, Stretch
from headrace.engine.task import TorchTask
from headrace.types import Columns

Graphs: TypeAlias = "dict[int, torch.cuda.CUDAGraph]"
"""Updates a replay → the graph that takes them."""
Batch: TypeAlias = "tuple[tuple[Tensor, ...], Tensor]"
"""Inputs and target."""

UPDATES_PER_REPLAY = (16, 4, 1)  # a replay costs the host about 10 µs; at 16 updates that is under 1 µs each
ROWS_AHEAD_BYTES = 64 << 20  # the most that the gathered rows of one replay may take; a guess
MOST_SLOTS = 4  # graphs hold their activations; more slots than two host buffers can make is a bug


class GraphStepper:
    """Replays captured updates; needs a CUDA device."""

    name = "graph"

    def __init__(
        self,
        task: TorchTask,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None,
        window: int,
        longest_order: int,
        compiled: bool,
        listener: Listener | None,
        on_choice: Callable[[str, str], None],
    ) -> None:
        before_batch = None if listener is None else listener.begin_batch
        self.listener = listener
        self.eager = EagerStepper(task, optimizer, clip=clip, before_batch=before_batch)
        self.before_batch = before_batch
        self.ways = [("graph", "captured in a CUDA graph", task.loss)]
        self.refused: list[str] = []
        if compiled and listener is not None:
            self.refused.append("not compiled: the hooks of a learned order break the code at every layer")
        elif compiled:
            loss = torch.compile(task.loss, dynamic=False)
            self.ways.insert(0, ("graph of compiled step", "compiled, then captured in a CUDA graph", loss))
        self.on_choice: Callable[[str, str], None] | None = on_choice
        self.task, self.optimizer = task, optimizer
        device = task.device
        self.eager_rates = [
            torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            for group in optimizer.param_groups
        ]
        self._take_rates(self.eager_rates)
        groups = len(optimizer.param_groups)
        self.order = torch.zeros(longest_order, dtype=torch.int64, device=device)
        self.row_ids = torch.zeros_like(self.order) if before_batch is not None else None
        self.counted: list[Tensor] = []  # what graphs read must live as long as they do
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.slot = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(window, device=device)
        self.rates = torch.zeros(window, groups, device=device)
        self.host_rates = [_HostRates(window, groups) for _ in range(2)]
        self.graphs: dict[tuple[int, ...], Graphs] = {}
        self.loaded: tuple[int, int, int] | None = None
        self.stepped = bool(optimizer.state)

    def run(self, stretch: Stretch) -> None:
        done = 0
        if not self.stepped:
            done = self._first_update(stretch)
        full = (stretch.stop - stretch.start) // stretch.group
        if done < full:
            graphs = self._graphs_for(stretch)
            if graphs:
                self._replay(stretch, graphs, done, full)
                done = full
        self._eagerly(stretch, done)

    def _first_update(self, stretch: Stretch) -> int:
        """Take the run's first update eagerly, so that all optimizer state exists from here on."""
        last = min(stretch.start + stretch.group, stretch.stop)
        self.eager.set_rates(stretch.rates[0])
        stretch.losses[0] = self.eager.update(stretch, stretch.start, last)
        self.stepped = True
        self._settle()
        return 1

    def _settle(self) -> None:
        if self.listener is not None:
            self.listener.settle()

    def _eagerly(self, stretch: Stretch, first_update: int) -> None:
        for update in range(first_update, stretch.updates):
            first = stretch.start + update * stretch.group
            self.eager._rates = None
            self.eager.set_rates(stretch.rates[update])
            stretch.losses[update] = self.eager.update(
                stretch, first, min(first + stretch.group, stretch.stop)
            )
        self._settle()

    def _replay(self, stretch: Stretch, graphs: Graphs, done: int, full: int) -> None:
        self._load(stretch)
        self.host_rates.append(self.host_rates.pop(0))
        self.host_rates[0].send(stretch.rates[:full], self.rates)
        self.cursor.fill_(stretch.start + done * stretch.group)
        self.slot.fill_(done)
        left = full - done
        for size in sorted(graphs, reverse=True):
            while left >= size:
                graphs[size].replay()
                left -= size
        stretch.losses[done:full].copy_(self.losses[done:full])

    def _load(self, stretch: Stretch) -> None:
        """Put this round's order where the graph reads it."""
        key = (stretch.buffer.pass_index, stretch.buffer.index, stretch.buffer.round)
        if key != self.loaded:
            self.order[: len(stretch.buffer.order)].copy_(stretch.buffer.order)
            ids = stretch.buffer.row_ids
            if self.row_ids is not None and ids is not None:
                self.row_ids[: len(ids)].copy_(ids)
            self.loaded = key

    def _graphs_for(self, stretch: Stretch) -> Graphs | None:
        """The graphs for where this buffer lies; None when no way of capturing works."""
        key = (
            *(c.data_ptr() for c in stretch.buffer.columns.values()),
            stretch.batch_size,
            stretch.accumulate,
            stretch.buffer.row_ids is not None,
        )
        if key not in self.graphs:
            if len(self.graphs) >= MOST_SLOTS:
                self.graphs.clear()
            found = self._try_capture(stretch)
            if found is None:
                return None
            self.graphs[key] = found
        return self.graphs[key]

    def _try_capture(self, stretch: Stretch) -> Graphs | None:
        if self.listener is not None and not self.listener.capturable(stretch.batch_size):
            self.ways = []
            self.refused.append(
                "the signs of this order at this batch size depend on values that a graph cannot read"
            )
        while self.ways:
            name, reason, self.loss = self.ways[0]
            try:
                graphs = self._capture(stretch)
            except Exception as error:
                self.refused.append(f"{name} failed ({type(error).__name__}: {str(error).splitlines()[:1]})")
                self.ways.pop(0)
                continue
            self._say(name, reason)
            return graphs
        self._say("eager", "one operation at a time")
        return None

    def _say(self, name: str, reason: str) -> None:
        if self.on_choice is not None:
            self.on_choice(name, "; ".join([reason, *self.refused]))
            self.on_choice = None

    def _capture(self, stretch: Stretch) -> Graphs:
        before = _snapshot(self.task, self.optimizer)
        ahead = sum(column[:1].nbytes for column in stretch.buffer.columns.values()) * stretch.group
        sizes = [n for n in UPDATES_PER_REPLAY if n == 1 or n * ahead <= ROWS_AHEAD_BYTES]
        counting = torch.arange(sizes[0] * stretch.group, device=self.order.device)
        try:
            with self._listening(stretch, sizes):
                graphs = self._record(stretch, counting, sizes)
        finally:
            self._take_rates(self.eager_rates)
            _restore(before, self.task, self.optimizer)
        self.counted.append(counting)
        return graphs

    def _listening(self, stretch: Stretch, sizes: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """A learned order learns nothing from warming up."""
        if self.listener is None:
            return contextlib.nullcontext()
        return self.listener.capturing(stretch.batch_size, [size * stretch.group for size in sizes])

    def _record(self, stretch: Stretch, counting: Tensor, sizes: Sequence[int]) -> Graphs:
        """Warm up, then capture a graph of every size, on one stream: gradients are added up on the stream on which
        their parameter was first used as long as anything holds that graph, and a capture must wait for no other."""
        gc.collect()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        by_hand = self.ways[0][0] == "graph" and serves(self.task.module)
        sums = BiasInTwoSums if by_hand else contextlib.nullcontext
        with torch.cuda.stream(side), sums():
            for _ in range(3):
                self.cursor.zero_()
                self.slot.zero_()
                self._updates(stretch, counting, 1)
        torch.cuda.current_stream().wait_stream(side)
        graphs: Graphs = {}
        for size in sizes:
            self.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            # A loader's thread may wait for its own copies meanwhile; that is no business of this capture.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"), sums():
                self._updates(stretch, counting, size)
            graphs[size] = graph
        return graphs

    def _take_rates(self, rates: Sequence[Tensor]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _updates(self, stretch: Stretch, counting: Tensor, size: int) -> None:
        """So many updates as the graph records them: everything they read or write has a fixed address."""
        batch, accumulate = stretch.batch_size, stretch.accumulate
        slots = self.slot + counting[:size]
        rates = self.rates.index_select(0, slots)
        index = self.order.index_select(0, self.cursor + counting[: size * accumulate * batch])
        batches = self._batches({n: c.index_select(0, index) for n, c in stretch.buffer.columns.items()})
        if self.row_ids is not None and stretch.buffer.row_ids is not None:
            index = self.row_ids.index_select(0, index)
        totals = []
        for update in range(size):
            self._take_rates(rates[update].unbind())
            if self.listener is not None and 0 < update == size - 1:
                self.listener.flush()
            first = update * accumulate * batch
            parts = [slice(first + k * batch, first + (k + 1) * batch) for k in range(accumulate)]
            totals.append(self._one(batches, index, parts))
        self._settle()
        self.losses.index_copy_(0, slots, torch.stack(totals).float())
        self.cursor.add_(len(index))
        self.slot.add_(size)

    def _batches(self, rows: Columns) -> Callable[[slice], Batch]:
        """Slices of the gathered rows as inputs and target; a user's transform sees one batch at a time."""
        if self.task.prepare.transform is not None:
            return lambda part: self.task.prepare({name: values[part] for name, values in rows.items()})
        inputs, target = self.task.prepare(rows)
        return lambda part: (tuple(x[part] for x in inputs), target[part])

    def _one(self, batches: Callable[[slice], Batch], index: Tensor, parts: Sequence[slice]) -> Tensor:
        """One update from these slices of the gathered rows; returns the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for part in parts:
            if self.before_batch is not None:
                self.before_batch(index[part])
            loss = self.loss(*batches(part))
            if len(parts) > 1:
                loss = loss / len(parts)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.eager.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.eager.parameters, self.eager.clip)
        self.optimizer.step()
        assert total is not None
        return total


class _HostRates:
    """Step sizes on their way to the device: pinned, and not written again before they have left."""

    def __init__(self, window: int, groups: int) -> None:
        self.pinned = torch.zeros(window, groups, pin_memory=True)
        self.left = torch.cuda.Event()

    def send(self, rates: Sequence[Sequence[float]], to: Tensor) -> None:
        self.left.synchronize()
        here = self.pinned[: len(rates)]
        here.copy_(torch.tensor(rates))
        to[: len(rates)].copy_(here, non_blocking=True)
        self.left.record()


def _snapshot(task: TorchTask, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = [
        (s, k, v.clone()) for s in optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor)
    ]
    module = [(t, t.detach().clone()) for t in (*task.module.parameters(), *task.module.buffers())]
    return {"optimizer": state, "module": module, "random": torch.cuda.get_rng_state(task.device)}


def _restore(before: dict[str, Any], task: TorchTask, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for tensor, value in before["module"]:
            tensor.copy_(value)
        for state, key, value in before["optimizer"]:
            state[key].copy_(value)
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.set_rng_state(before["random"], task.device)
