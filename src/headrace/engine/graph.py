"""Steps captured in CUDA graphs: several updates a replay, the gather and the counters on the device.

Invariant: between two host reads nothing is copied from the device. The order, the columns and the step sizes
lie at fixed addresses; a device counter walks over them. What capture needs but training must not see (warm-up
updates) is undone: parameters, buffers, optimizer state and random state are put back in place.

The very first update of a run is taken eagerly: it creates the optimizer's state at addresses that the graph
can then use, whatever that state is. Short last batches are eager too. When a capture fails, the next way is
tried, and at the end every update is eager; the reason is reported.

An order that watches batches is told each batch's rows while capturing, by a tensor at a fixed address.

Short-coming: a buffer whose columns move (two device slots) is captured once per slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headrace.engine.steps import BatchHook, EagerStepper, Stretch
from headrace.engine.task import TorchTask
from headrace.types import Columns

Graphs: TypeAlias = "dict[int, torch.cuda.CUDAGraph]"
"""Updates a replay → the graph that takes them."""

UPDATES_PER_REPLAY = 16  # a replay costs the host about 10 µs; at 16 updates that is under 1 µs each
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
        before_batch: BatchHook | None,
        on_choice: Callable[[str, str], None],
    ) -> None:
        self.eager = EagerStepper(task, optimizer, clip=clip, before_batch=before_batch)
        self.before_batch = before_batch
        self.ways = [("graph", "captured in a CUDA graph", task.loss)]
        if compiled:
            loss = torch.compile(task.loss, dynamic=False)
            self.ways.insert(0, ("graph of compiled step", "compiled, then captured in a CUDA graph", loss))
        self.on_choice: Callable[[str, str], None] | None = on_choice
        self.refused: list[str] = []
        self.task, self.optimizer = task, optimizer
        device = task.device
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        groups = len(optimizer.param_groups)
        self.order = torch.zeros(longest_order, dtype=torch.int64, device=device)
        self.offsets: dict[int, Tensor] = {}  # by batch size; graphs read them for as long as they live
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(window, device=device)
        self.rates = torch.zeros(window, groups, device=device)
        self.host_rates = [torch.zeros(window, groups, pin_memory=True) for _ in range(2)]
        self.turn = 0
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
        return 1

    def _eagerly(self, stretch: Stretch, first_update: int) -> None:
        for update in range(first_update, stretch.updates):
            first = stretch.start + update * stretch.group
            self.eager._rates = None
            self.eager.set_rates(stretch.rates[update])
            stretch.losses[update] = self.eager.update(
                stretch, first, min(first + stretch.group, stretch.stop)
            )

    def _replay(self, stretch: Stretch, graphs: Graphs, done: int, full: int) -> None:
        self._load(stretch)
        host = self.host_rates[self.turn]
        self.turn = 1 - self.turn
        host[:full] = torch.tensor(stretch.rates[:full])
        self.rates[:full].copy_(host[:full], non_blocking=True)
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
            self.loaded = key

    def _graphs_for(self, stretch: Stretch) -> Graphs | None:
        """The graphs for where this buffer lies; None when no way of capturing works."""
        key = (
            *(c.data_ptr() for c in stretch.buffer.columns.values()),
            stretch.batch_size,
            stretch.accumulate,
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
        columns, batch, accumulate = stretch.buffer.columns, stretch.batch_size, stretch.accumulate
        offsets = self.offsets.setdefault(batch, torch.arange(batch, device=self.order.device))
        graphs: Graphs = {}
        try:
            self.cursor.zero_()
            self.slot.zero_()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.cursor.zero_()
                    self.slot.zero_()
                    self._one(columns, offsets, accumulate)
            torch.cuda.current_stream().wait_stream(side)
            for size in (UPDATES_PER_REPLAY, 1):
                self.optimizer.zero_grad(set_to_none=True)
                graph = torch.cuda.CUDAGraph()
                # "thread_local": the loader's copier may wait for its stream while this thread captures. With torch's
                # default that wait is an error in the copier, and it breaks the capture too.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(size):
                        self._one(columns, offsets, accumulate)
                graphs[size] = graph
        finally:
            _restore(before, self.task, self.optimizer)
        return graphs

    def _one(self, columns: Columns, offsets: Tensor, accumulate: int) -> None:
        """One update as the graph records it: everything it reads or writes has a fixed address."""
        rates = self.rates.index_select(0, self.slot)[0]
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"].copy_(rates[number])
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for _ in range(accumulate):
            index = self.order.index_select(0, self.cursor + offsets)
            batch = {name: column.index_select(0, index) for name, column in columns.items()}
            if self.before_batch is not None:
                self.before_batch(index)
            loss = self.loss(*self.task.prepare(batch))
            if accumulate > 1:
                loss = loss / accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            self.cursor.add_(len(offsets))
        if self.eager.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.eager.parameters, self.eager.clip)
        self.optimizer.step()
        assert total is not None
        self.losses.index_copy_(0, self.slot, total.reshape(1).float())
        self.slot.add_(1)


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
