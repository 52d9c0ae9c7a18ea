"""Reading one buffer ahead through `Source.read`, for data that are not ranges of files.

One thread reads: a dataset written by a user may not bear two. The buffers are ordinary tensors, so at most
three lie in memory: the one in use, the one that waits, and the one being read. `stage.DeviceStage` brings them to a
device; sparse columns, whose sizes differ, are moved when they are taken.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.buffer.passes import Ranges, row_numbers
from headrace.buffer.pipeline import Failure, Loaded, OnError
from headrace.buffer.worker import Worker
from headrace.errors import HeadraceError, WorkerError
from headrace.types import Columns, Rows, Source


class ReadAhead:
    """The buffers that ``plan`` yields, read in the background."""

    def __init__(
        self,
        source: Source,
        plan: Iterable[tuple[Any, Ranges]],
        device: torch.device,
        *,
        on_error: OnError = "raise",
    ) -> None:
        self._source, self._plan, self._device, self._on_error = source, iter(plan), device, on_error
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._permits.put(None)
        self._ready: queue.SimpleQueue[Loaded | BaseException | None] = queue.SimpleQueue()
        self._closed = False
        self._ended = False
        self._thread = Worker("reader", self._read_all)

    def start(self) -> None:
        """Start the reader. Whoever calls this holds the object, and closes it whatever happens."""
        self._thread.start()

    def _read_all(self) -> None:
        try:
            for key, ranges in self._plan:
                self._permits.get()
                if self._closed:
                    return
                self._ready.put(self._read(key, ranges))
        except Exception as error:
            self._ready.put(error)
        finally:
            self._ready.put(None)

    def _read(self, key: Any, ranges: Ranges) -> Loaded:
        began_s = time.perf_counter()
        numbers = row_numbers(ranges)
        failures: list[Failure] = []
        if self._on_error == "skip":
            columns = read_what_can_be(self._source, numbers, failures)
        else:
            columns = read_rows(self._source, numbers)
        return Loaded(
            key=key,
            rows=len(numbers),
            columns=columns,
            load_s=time.perf_counter() - began_s,
            bad=tuple((first, last) for first, last, _ in failures),
            failures=tuple(error for *_, error in failures),
            fill=None,
        )

    def take(self) -> Loaded | None:
        """The next buffer, on the device; None at the end."""
        if self._ended:
            return None
        loaded = self._ready.get()
        if isinstance(loaded, BaseException):
            self._ended = True
            raise loaded
        if loaded is None:
            self._ended = True
            return None
        self._permits.put(None)
        if self._device.type != "cpu":
            for name, values in loaded.columns.items():
                loaded.columns[name] = values.to(self._device)
        return loaded

    def release(self, loaded: Loaded) -> None:
        """The buffer's memory goes with its last reference."""

    def stop(self) -> None:
        """Read no more; whoever waits is woken and gets None."""
        self._closed = True
        self._permits.put(None)
        self._ready.put(None)

    def close(self) -> None:
        """End the thread, after the read that it is in."""
        self.stop()
        self._ended = True
        self._thread.end()


def as_rows(numbers: np.ndarray[Any, Any]) -> Rows:
    """Row numbers as a range where they are one."""
    if (
        len(numbers)
        and int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
        and (np.diff(numbers) == 1).all()
    ):
        return range(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers)


def read_rows(source: Source, numbers: np.ndarray[Any, Any]) -> Columns:
    """The rows, or an error that names them."""
    try:
        return source.read(as_rows(numbers))
    except HeadraceError:
        raise
    except Exception as error:
        raise WorkerError(
            f"reading {len(numbers)} rows of {getattr(source, 'origin', source)!s}, the first of them row "
            f"{int(numbers[0])}, failed: {type(error).__name__}: {error}"
        ) from error


def read_what_can_be(
    source: Source, numbers: np.ndarray[Any, Any], failures: list[Failure], first: int = 0
) -> Columns:
    """The rows, with zeros where a row cannot be read; those are noted in ``failures`` with their
    positions."""
    try:
        return read_rows(source, numbers)
    except Exception as error:
        if len(numbers) == 1:
            failures.append((first, first + 1, error))
            return {c.name: torch.zeros((1, *c.shape), dtype=c.dtype) for c in source.columns}
    half = len(numbers) // 2
    parts = [
        read_what_can_be(source, numbers[:half], failures, first),
        read_what_can_be(source, numbers[half:], failures, first + half),
    ]
    joined: dict[str, Tensor] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined
