"""Thin shells around a `Runner`: a thread, and a process.

Both take grants from a mailbox and answer into one inbox of the coordinator. A process answers through a
pipe, and a listener thread carries its answers, and the news of its death, into the same inbox. Processes
are spawned, never forked: the parent's threads may hold locks that a fork would copy in their locked
state. They ignore Ctrl-C, which the terminal sends to every process: the parent decides, and a child
whose parent is gone finds its pipe closed and ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.engine.hogbatch.coordinator import Grant
from headrace.engine.hogbatch.runner import Report, Runner, Work
from headrace.engine.hogbatch.shared import CANCEL
from headrace.errors import OptionError


@dataclass(frozen=True)
class Ready:
    """A worker can take grants."""

    worker: str
    life: int


@dataclass(frozen=True)
class Finished:
    """A worker is through with a grant."""

    worker: str
    life: int
    report: Report


@dataclass(frozen=True)
class Failed:
    """A worker's step raised; ``text`` is the traceback."""

    worker: str
    life: int
    grant: Grant | None
    text: str
    error: BaseException | None = None


@dataclass(frozen=True)
class Gone:
    """A worker's process ended without being asked."""

    worker: str
    life: int
    exit_code: int | None


Event = Ready | Finished | Failed | Gone
Inbox = queue.SimpleQueue[Event]


class Worker(Protocol):
    """What the coordinator's shell needs of a worker."""

    name: str
    life: int

    def give(self, grant: Grant, lr: float) -> None: ...

    def cancel(self) -> None:
        """Finish the present batch and answer the rest of what was given at once."""
        ...

    def end(self) -> None:
        """Stop for good, at the latest after the present batch; a process is ended by force if need be."""
        ...

    def kill(self) -> None:
        """Give the worker up without waiting for it."""
        ...


class ThreadWorker:
    """A worker in this process."""

    def __init__(self, work: Work, life: int, make: Callable[[], Any], inbox: Inbox) -> None:
        self.name, self.life = work.name, life
        self._work, self._make, self._inbox = work, make, inbox
        self._mail: queue.SimpleQueue[tuple[Grant, float] | None] = queue.SimpleQueue()
        self._token = _new_token(work)
        self._thread = threading.Thread(target=self._live, name=f"headrace-{work.name}", daemon=True)
        self._thread.start()

    def give(self, grant: Grant, lr: float) -> None:
        self._mail.put((grant, lr))

    def cancel(self) -> None:
        self._work.board.cells[self._work.number, CANCEL] = self._token + 1

    def end(self) -> None:
        self.kill()
        self._thread.join(timeout=10.0)

    def kill(self) -> None:
        # A thread cannot be ended from outside. It finds its token replaced before its next batch.
        self.cancel()
        self._mail.put(None)

    def _live(self) -> None:
        grant, runner = None, None
        try:
            settle(self._work)
            runner = self._make()
            self._inbox.put(Ready(self.name, self.life))
            while (mail := self._mail.get()) is not None:
                grant, lr = mail
                report = runner.run(grant, lr, self._token)
                if self._mail.empty():  # nothing that would carry this grant's last changes along
                    runner.flush()
                self._inbox.put(Finished(self.name, self.life, report))
        except Exception as error:
            self._inbox.put(Failed(self.name, self.life, grant, traceback.format_exc(), error))
        finally:
            if runner is not None:
                runner.close()


class ProcessWorker:
    """A worker in a process of its own."""

    def __init__(self, work: Work, life: int, inbox: Inbox) -> None:
        self.name, self.life = work.name, life
        self._work, self._inbox = work, inbox
        self._token = _new_token(work)
        parcel = pack(work)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        bare = replace(work, module=nn.Identity(), loss=nn.Identity())
        arguments = (bare, parcel, life, self._token, theirs)
        name = f"headrace-{work.name}"
        self.process = context.Process(target=live_in_process, args=arguments, name=name, daemon=True)
        self.process.start()
        theirs.close()
        self._asked_to_end = False
        self._listener = threading.Thread(target=self._listen, name=f"headrace-{work.name}-pipe", daemon=True)
        self._listener.start()

    def give(self, grant: Grant, lr: float) -> None:
        with contextlib.suppress(OSError):  # the listener tells of its death
            self._pipe.send((grant, lr))

    def cancel(self) -> None:
        self._work.board.cells[self._work.number, CANCEL] = self._token + 1

    def end(self) -> None:
        self._asked_to_end = True
        self.cancel()
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(timeout=5.0)
        self.kill()

    def kill(self) -> None:
        self._asked_to_end = True
        if self.process.is_alive():
            self.process.kill()
        self.process.join(timeout=10.0)
        self._listener.join(timeout=10.0)
        self._pipe.close()

    def _listen(self) -> None:
        """Carry answers to the inbox until the process is gone."""
        while True:
            ready = connection.wait([self._pipe, self.process.sentinel])
            if self._pipe in ready:
                try:
                    self._inbox.put(self._pipe.recv())
                    continue
                except (EOFError, OSError):
                    pass
            self.process.join(timeout=10.0)
            if not self._asked_to_end:
                self._inbox.put(Gone(self.name, self.life, self.process.exitcode))
            return


def pack(work: Work) -> bytes:
    """The module and the loss for another process of ours.

    As plain bytes: torch's own way to send a tensor to a process would move its memory under the module.
    """
    try:
        return pickle.dumps((work.module, work.loss))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the module or the loss cannot be sent to a process ({error}); define it at the top level of an "
            "importable file, or use threads with processes=False"
        ) from error


def live_in_process(bare: Work, parcel: bytes, life: int, token: int, pipe: Any) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grant, work = None, bare
    try:
        module, loss = pickle.loads(parcel)
        work = replace(bare, module=module, loss=loss)
        settle(work)
        torch.manual_seed(work.seed + 1_000_003 * life)
        assert work.data is not None
        columns = work.data.views()
        runner = Runner(work, columns, columns.pop("order"))
        pipe.send(Ready(work.name, life))
        while (mail := pipe.recv()) is not None:
            grant, lr = mail
            pipe.send(Finished(work.name, life, runner.run(grant, lr, token)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(Failed(work.name, life, grant, traceback.format_exc()))


def settle(work: Work) -> None:
    """One intra-op thread, and cores of its own where asked."""
    torch.set_num_threads(1)
    if work.cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, work.cores)


def _new_token(work: Work) -> int:
    """What the board names while this worker may go on. A worker that was given up finds another."""
    token = time.monotonic_ns()
    work.board.cells[work.number, CANCEL] = token
    return token


def thread_worker(
    work: Work, life: int, columns: dict[str, Tensor], order: Tensor, inbox: Inbox
) -> ThreadWorker:
    return ThreadWorker(work, life, lambda: Runner(work, columns, order), inbox)


def process_worker(work: Work, life: int, inbox: Inbox) -> ProcessWorker:
    return ProcessWorker(work, life, inbox)
