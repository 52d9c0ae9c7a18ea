"""Host buffers → device slots, on a copy stream of its own, so that the device computes while the next buffer
comes.

One thread takes full host buffers, waits until a device slot is free, copies, waits until the copy is complete
and only then frees the host buffer and publishes the device slot. A device slot is free when the consumer has
released it *and* the device has passed the event recorded at that moment: the consumer's own work on it may
still be queued.

A slot's columns are published at their full capacity, of which the first ``rows`` are valid: a captured step
bakes in where a column lies and how long it is, so neither may change from buffer to buffer. The rows' numbers
come through the same stream, so that nothing that follows a buffer waits for the device.

Without CUDA the same code copies from memory to memory, which is how it is tested.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.buffer.passes import row_numbers
from headrace.buffer.pipeline import Loaded, Pause, nothing
from headrace.buffer.slots import Lane
from headrace.buffer.worker import Worker
from headrace.types import Columns


class HostStage(Protocol):
    """Whoever has full buffers in host memory."""

    def start(self) -> None: ...

    def take(self) -> Loaded | None: ...

    def release(self, loaded: Loaded) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class DeviceSlot:
    """Memory for one buffer on the device."""

    index: int
    columns: Columns
    row_ids: Tensor


class DeviceStage:
    """Brings a host stage's buffers to the device, in order."""

    def __init__(
        self,
        host: HostStage,
        lanes: tuple[Lane, ...],
        rows: int,
        device: torch.device,
        *,
        slots: int = 2,
        pause: Pause = nothing,
    ) -> None:
        self.host = host
        self._device = device
        self._pause = pause
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: queue.SimpleQueue[tuple[DeviceSlot, Any] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Loaded | Exception | None] = queue.SimpleQueue()
        self._ended = False
        self._numbers = torch.empty(rows, dtype=torch.int64, pin_memory=self._stream is not None)
        self.slots = [make_slot(k, lanes, rows, device) for k in range(slots)]
        for slot in self.slots:
            self._free.put((slot, None))
        self._thread = Worker("copier", self._copy_all)

    def start(self) -> None:
        """Start the readers and the copier. Whoever calls this holds the stage, and closes it whatever
        happens."""
        self.host.start()
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the slots take."""
        return sum(values.nbytes for slot in self.slots for values in (*slot.columns.values(), slot.row_ids))

    def _copy_all(self) -> None:
        try:
            while (loaded := self.host.take()) is not None:
                self._pause("slot")
                free = self._free.get()
                if free is None:
                    return
                self._ready.put(self._copy(loaded, *free))
        except Exception as error:
            self._ready.put(error)
            return
        self._ready.put(None)

    def _copy(self, loaded: Loaded, slot: DeviceSlot, released: Any) -> Loaded:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                if released is not None:
                    self._stream.wait_event(released)
                self._enqueue(loaded, slot)
            # Only a finished copy may free the host slot; this wait holds neither the lock nor the consumer.
            self._stream.synchronize()
        else:
            self._enqueue(loaded, slot)
        self._pause("copied")
        self.host.release(loaded)
        return replace(loaded, columns=slot.columns, row_ids=slot.row_ids[: loaded.rows], fill=slot)

    def _enqueue(self, loaded: Loaded, slot: DeviceSlot) -> None:
        for name, values in loaded.columns.items():
            slot.columns[name][: loaded.rows].copy_(values, non_blocking=True)
        # The last copy from these numbers is complete: `_copy` waited for it.
        self._numbers.numpy()[: loaded.rows] = row_numbers(loaded.key)
        slot.row_ids[: loaded.rows].copy_(self._numbers[: loaded.rows], non_blocking=True)

    def take(self) -> Loaded | None:
        """The next buffer, complete on the device; None at the end of the plan."""
        if self._ended:
            return None
        staged = self._ready.get()
        if isinstance(staged, Exception):
            self._ended = True
            raise staged
        self._ended = staged is None
        return staged

    def release(self, loaded: Loaded) -> None:
        """The consumer has queued its last work on the buffer."""
        event = None
        if self._stream is not None:
            event = torch.cuda.current_stream(self._device).record_event()
        self._free.put((loaded.fill, event))

    def close(self) -> None:
        """End the copier and the stage behind it; device memory goes with the last reference."""
        self._ended = True
        self._free.put(None)
        # The copier may wait for a host buffer: stopping the stage wakes it. It may be copying: then the
        # memory must stay until it is done, so the host's slots go only after the thread has ended.
        self.host.stop()
        self._thread.end()
        self.host.close()
        self.slots = []


def make_slot(index: int, lanes: tuple[Lane, ...], rows: int, device: torch.device) -> DeviceSlot:
    """Uninitialised memory for so many rows."""
    columns = {lane.name: torch.empty((rows, *lane.shape), dtype=lane.dtype, device=device) for lane in lanes}
    return DeviceSlot(index, columns, torch.empty(rows, dtype=torch.int64, device=device))
