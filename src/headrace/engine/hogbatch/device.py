"""A worker on a device: a replica there, captured steps, and merges that the steps do not wait for.

The replica ``W`` takes several local steps, then pushes ``W - S``, what changed since the last exchange,
and sets ``S = W``. A helper thread adds that to the shared parameters ``H`` in pieces, and brings ``H``
back. By then ``W`` has moved on. What the others contributed meanwhile is ``H - S``, and adding it to
both ``W`` and ``S`` leaves the local steps made since the push as the next difference. (Overwriting ``H``
with ``W`` would lose the updates that CPU workers made since the pull; overwriting ``W`` with ``H`` would
lose the device's own.)

One exchange is under way at a time. When the next is due before it came back, the device goes on with
local steps and pushes later: a slow link makes the replica staler, never idle. Work is reported as
finished only when its changes are in ``H``, or when another grant waits and will carry them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from headrace.engine.hogbatch.adaptive import step_scale
from headrace.engine.hogbatch.coordinator import Grant
from headrace.engine.hogbatch.links import CudaLink, HostLink, Link
from headrace.engine.hogbatch.options import HogbatchOptions
from headrace.engine.hogbatch.rows import Rows
from headrace.engine.hogbatch.runner import Report, Work
from headrace.engine.hogbatch.shared import BEAT, BUSY_NS, CANCEL, GRANT, MERGES, ROWS, UPDATES, flat
from headrace.engine.hogbatch.steppers import ChainStepper, make_stepper
from headrace.engine.hogbatch.workers import Inbox, ThreadWorker

PIECE = 1 << 20
"""Elements that the helper merges at a time: other threads get the memory bus and the lock in between."""

GRAPHS = 8
"""Captured steps kept: one per batch size and step size in use."""

RUN = 16
"""Steps of one replay, at most. Beside fourteen busy CPU workers a host that issued every step alone fed an H200 1,900
of the 8,000 steps a second that it takes."""


class Exchange:
    """Carries differences to the shared parameters and theirs back, in a helper thread."""

    def __init__(self, shared: dict[str, Tensor], canary: Tensor, link: Link) -> None:
        self._link = link
        self._canary = canary
        with link.working():  # memory that another stream fills could be read before it is filled
            self.parameters, self._local = _flat(shared, link.device)
            self._snapshot = [tensor.clone() for tensor in self._local]
            self._way = [tensor.clone() for tensor in self._local]  # on the device: out, then back
        self._host = [link.on_host(tensor) for tensor in self._way]
        self._pieces = _pieces(shared, self._host)
        self._jobs: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.under_way = False
        self._helper = threading.Thread(target=self._help, name="headrace-exchange", daemon=True)
        self._helper.start()

    def push(self) -> None:
        """Send the changes since the last push on their way; none may be under way."""
        assert not self.under_way
        with self._link.working():
            for local, snapshot, way in zip(self._local, self._snapshot, self._way, strict=True):
                torch.sub(local, snapshot, out=way)
                snapshot.copy_(local)
            ready = self._link.mark()
        with self._link.copying():
            self._link.wait_there(ready)
            for host, way in zip(self._host, self._way, strict=True):
                host.copy_(way, non_blocking=True)
            mark = self._link.mark()
        self.under_way = True
        self._jobs.put(mark)

    def absorb(self, wait: bool = False) -> bool:
        """Take in what the others contributed, if an exchange came back; True when one did."""
        if not self.under_way:
            return False
        try:
            came = self._back.get(block=wait)
        except queue.Empty:
            return False
        self.under_way = False
        if isinstance(came, BaseException):
            raise came
        with self._link.working():
            self._link.wait_there(came)
            for local, snapshot, way in zip(self._local, self._snapshot, self._way, strict=True):
                way.sub_(snapshot)
                local.add_(way)
                snapshot.add_(way)
        return True

    def close(self) -> None:
        self._jobs.put(self)
        self._helper.join(timeout=10.0)

    def _help(self) -> None:
        torch.set_num_threads(1)
        while (mark := self._jobs.get()) is not self:
            try:
                self._link.wait_here(mark)
                for shared, host in self._pieces:
                    shared.add_(host)
                    host.copy_(shared)
                self._canary += 1
                with self._link.copying():
                    for way, host in zip(self._way, self._host, strict=True):
                        way.copy_(host, non_blocking=True)
                    self._back.put(self._link.mark())
            except Exception as error:
                self._back.put(error)


def _flat(shared: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Copies on the device, by name, that lie one behind the other, and for each dtype the whole of them.

    An exchange is then five kernels and two copies however many parameters there are: on small networks forty
    little kernels took a tenth of the device's time.
    """
    wholes = [
        torch.zeros(sum(_padded(t) for t in shared.values() if t.dtype == dtype), dtype=dtype, device=device)
        for dtype in dict.fromkeys(t.dtype for t in shared.values())
    ]
    found = {}
    for (name, tensor), part in zip(shared.items(), _parts(shared, wholes), strict=True):
        # Weights under CSR rows lie column by column, here as there.
        found[name] = part.view(tensor.shape) if tensor.is_contiguous() else part.view(tensor.shape[::-1]).t()
        found[name].copy_(tensor)
    return found, wholes


def _padded(tensor: Tensor) -> int:
    """Numbers until the next one that lies well for products: sixteen at a time."""
    return -(-tensor.numel() // 16) * 16


def _parts(shared: dict[str, Tensor], wholes: list[Tensor]) -> list[Tensor]:
    """Each parameter's stretch of the whole of its dtype."""
    ends = {whole.dtype: 0 for whole in wholes}
    of = {whole.dtype: whole for whole in wholes}
    parts = []
    for tensor in shared.values():
        start = ends[tensor.dtype]
        parts.append(of[tensor.dtype][start : start + tensor.numel()])
        ends[tensor.dtype] = start + _padded(tensor)
    return parts


def _pieces(shared: dict[str, Tensor], host: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The shared parameters and the host's copies of them, cut into pieces."""
    pieces = []
    for tensor, part in zip(shared.values(), _parts(shared, host), strict=True):
        pieces += list(zip(flat(tensor).split(PIECE), part.split(PIECE), strict=True))
    return pieces


class DeviceRunner:
    """A device worker's state between grants."""

    def __init__(
        self, work: Work, columns: dict[str, Tensor], order: Tensor, options: HogbatchOptions, link: Link
    ) -> None:
        self._work, self._order, self._link, self._options = work, order, link, options
        self._cells = work.board.cells[work.number]
        self._exchange = Exchange(work.parameters.views(), work.canary.views()["merges"], link)
        size = sum(column.numel() * column.element_size() for column in columns.values())
        stays = link.fits(size)
        self._columns = {name: c.to(link.device) if stays else c for name, c in columns.items()}
        # CSR rows become dense batch by batch where they lie, on the device if there is room for them.
        self._sparse = Rows(self._columns, "x") if "x" not in columns else None
        with link.working():
            buffers = {name: b.to(link.device) for name, b in work.buffers.views().items()}
            self._stepper = make_stepper(
                work.module, work.loss, work.optimiser, self._exchange.parameters, buffers
            )
            self._loss = torch.zeros((), device=link.device)
        self._steps: dict[tuple[int, float], tuple[Tensor, Tensor, Callable[[], None]]] = {}
        self._runs: dict[tuple[int, float], tuple[Tensor, Callable[[], None]]] = {}
        # A bound on staleness is looked at after every step, and CSR rows become dense outside the captured steps.
        together = link.captures and stays and self._sparse is None and options.staleness_bound is None
        self._together = min(RUN, options.device_local_steps) if together else 1
        self._since_push = self._since_mark = 0
        self._seen = 0
        self._marks: deque[object] = deque()
        self._prepare()

    def _prepare(self) -> None:
        """Capture the step that the run begins with before training time does: a trial's turn is hardly longer."""
        options, columns = self._options, self._columns
        if not self._link.captures or not isinstance(self._stepper, ChainStepper):
            return  # nothing to capture, or an optimiser, whose first step would leave its moments behind
        batch = min(options.device_batch_size, len(self._order))
        factor = options.schedule(0) if options.schedule else 1.0
        lr = options.optimiser.lr * factor * step_scale(batch, options.batch_size, options.scaling)
        width = columns["x"].shape[1:] if self._sparse is None else (int(columns["x.width"]),)
        kind = columns["x"].dtype if self._sparse is None else columns["x.values"].dtype
        y = columns["y"]
        with self._link.working():
            x = torch.zeros(batch, *width, dtype=kind, device=self._link.device)
            y = torch.zeros(batch, *y.shape[1:], dtype=y.dtype, device=self._link.device)
            self._stepper.step(x, y, 0.0)  # allocates what a capture must find; changes nothing
            self._steps[batch, lr] = self._captured(x, y, lr)

    def run(self, grant: Grant, lr: float, token: int) -> Report:
        started = time.perf_counter()
        cells, done = self._cells, 0
        cells[ROWS] = 0
        cells[GRANT] = grant.number
        with self._link.working():
            self._loss.zero_()
            for rows, steps, act in self._acts(grant, lr):
                if cells[CANCEL] != token:
                    break
                act()
                done += rows
                cells[UPDATES] += steps
                cells[BEAT] += steps
                cells[ROWS] = done
                self._since_push += steps
                self._exchange_if_due()
                self._since_mark += steps
                if self._since_mark >= self._options.device_local_steps:
                    self._since_mark = 0
                    self._throttle()
            loss = float(self._loss)
        stopped = time.perf_counter()
        cells[BUSY_NS] += int((stopped - started) * 1e9)
        return Report(grant.worker, grant.number, done, loss, started, stopped)

    def flush(self) -> None:
        """Wait until all changes are in the shared parameters, and take in the others'."""
        self._exchange.absorb(wait=True)
        if self._since_push:
            self._push()
            self._exchange.absorb(wait=True)

    def close(self) -> None:
        self._exchange.close()

    def _throttle(self) -> None:
        """Let the host run at most two merges' worth of steps ahead of the device.

        Issuing a captured step takes a seventh of its time. A host that issues a whole grant at once finds each
        exchange come back when the next two hundred steps wait in the stream already, before which it can
        neither be taken in nor the next one be sent: the replica would be as stale as a grant is long.
        """
        self._marks.append(self._link.mark())
        if len(self._marks) > 2:
            self._link.wait_here(self._marks.popleft())

    def _exchange_if_due(self) -> None:
        bound = self._options.staleness_bound
        others = self._work.board.others_updates(self._work.number)
        stale = bound is not None and others - self._seen >= bound
        self._exchange.absorb(wait=stale)
        due = self._since_push >= self._options.device_local_steps or stale
        if due and not self._exchange.under_way:
            self._push()

    def _push(self) -> None:
        now = self._work.board.others_updates(self._work.number)
        self._work.board.saw_staleness(self._work.number, now - self._seen)
        self._seen, self._since_push = now, 0
        self._exchange.push()
        self._cells[MERGES] += 1

    def _acts(self, grant: Grant, lr: float) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """The grant in pieces: how many rows, how many updates, and what makes them."""
        at = grant.start
        if self._together > 1:
            rows, size = self._order[at : grant.stop].to(self._link.device), self._together * grant.batch
            while at + size <= grant.stop:
                piece = rows[at - grant.start :][:size]
                yield size, self._together, partial(self._run_of_steps, piece, grant.batch, lr)
                at += size
        if at < grant.stop:
            for x, y in self._batches(grant, at):
                yield len(x), 1, partial(self._step, x, y, lr, full=len(x) == grant.batch)

    def _run_of_steps(self, rows: Tensor, batch: int, lr: float) -> None:
        """Several full steps over these rows in one replay."""
        key = (batch, lr)
        if key not in self._steps:  # the first ones run as they are, and warm up what a capture must find
            for part in rows.split(batch):
                x, y = (self._columns[name].index_select(0, part) for name in ("x", "y"))
                self._step(x, y, lr, full=True)
            return
        if key not in self._runs:
            if len(self._runs) >= GRAPHS:
                self._runs.pop(next(iter(self._runs)))
            self._runs[key] = self._captured_run(rows, batch, lr)
        into, replay = self._runs[key]
        into.copy_(rows)
        replay()

    def _captured_run(self, rows: Tensor, batch: int, lr: float) -> tuple[Tensor, Callable[[], None]]:
        into = rows.clone()

        def act() -> None:
            x, y = (self._columns[name].index_select(0, into).split(batch) for name in ("x", "y"))
            for xb, yb in zip(x, y, strict=True):
                self._loss.add_(self._stepper.step(xb, yb, lr), alpha=batch)

        return into, self._link.capture(act)

    def _batches(self, grant: Grant, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The grant's batches from a position on, on the device."""
        rows = self._order[start : grant.stop]
        y = self._gather(self._columns["y"], rows).split(grant.batch)
        if self._sparse is None:
            return zip(self._gather(self._columns["x"], rows).split(grant.batch), y, strict=True)
        where = self._columns["x.values"].device
        dense = self._sparse.batches(rows.to(where), grant.batch)
        return zip((x.to(self._link.device) for x in dense), y, strict=True)

    def _gather(self, column: Tensor, rows: Tensor) -> Tensor:
        """Rows on the device: gathered there when the column is there, else sent pinned."""
        if column.device == self._link.device:
            return column.index_select(0, rows.to(self._link.device))
        staged = self._link.on_host(column[:1].expand(len(rows), *column.shape[1:]))
        torch.index_select(column, 0, rows, out=staged)
        return staged.to(self._link.device, non_blocking=True)

    def _step(self, x: Tensor, y: Tensor, lr: float, full: bool) -> None:
        if not self._link.captures or not full:
            began = time.perf_counter()
            self._loss += self._stepper.step(x, y, lr) * len(x)
            if self._options.standin_slowdown > 1 and self._link.device.type == "cpu":
                time.sleep((self._options.standin_slowdown - 1) * (time.perf_counter() - began))
            return
        key = (len(x), lr)
        if key not in self._steps:
            # The first step of a size runs as it is: it warms up what a capture must find allocated.
            self._loss += self._stepper.step(x, y, lr) * len(x)
            if len(self._steps) >= GRAPHS:
                self._steps.pop(next(iter(self._steps)))
            self._steps[key] = self._captured(x, y, lr)
            return
        into_x, into_y, replay = self._steps[key]
        into_x.copy_(x)
        into_y.copy_(y)
        replay()

    def _captured(self, x: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor, Callable[[], None]]:
        into_x, into_y = x.clone(), y.clone()

        def act() -> None:
            self._loss.add_(self._stepper.step(into_x, into_y, lr), alpha=len(into_x))

        return into_x, into_y, self._link.capture(act)


def device_worker(
    work: Work,
    life: int,
    columns: dict[str, Tensor],
    order: Tensor,
    options: HogbatchOptions,
    inbox: Inbox,
) -> ThreadWorker:
    """A worker on a CUDA device, by the number in its name, or on a CPU core that stands in for one."""

    def make() -> DeviceRunner:
        link: Link = HostLink()
        if work.name.startswith("cuda"):
            link = CudaLink(int(work.name.removeprefix("cuda")) % torch.cuda.device_count())
        return DeviceRunner(work, columns, order, options, link)

    return ThreadWorker(work, life, make, inbox)
