"""Host slots → device slots, on a copy stream of its own, so that the device computes while the next buffer
comes.

One thread takes full host slots, waits until a device slot is free, copies, waits until the copy is complete
and only then frees the host slot and publishes the device slot. A device slot is free when the consumer has
released it *and* the device has passed the event recorded at that moment: the consumer's own work on it may
still be queued.

Without CUDA the same code copies from memory to memory, which is how it is tested.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.buffer.pipeline import Loaded, Pause, Pipeline, nothing
from headrace.buffer.worker import Worker
from headrace.types import Columns


@dataclass(frozen=True)
class DeviceSlot:
    """Memory for one buffer on the device."""

    index: int
    columns: Columns


class DeviceStage:
    """Brings a pipeline's buffers to the device, in order."""

    def __init__(
        self, pipeline: Pipeline, device: torch.device, *, slots: int = 2, pause: Pause = nothing
    ) -> None:
        self.pipeline = pipeline
        self._device = device
        self._pause = pause
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: queue.SimpleQueue[tuple[DeviceSlot, Any] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Loaded | Exception | None] = queue.SimpleQueue()
        self._ended = False
        self.slots = [self._make_slot(k) for k in range(slots)]
        for slot in self.slots:
            self._free.put((slot, None))
        self._thread = Worker("copier", self._copy_all)

    def start(self) -> None:
        """Start the readers and the copier. Whoever calls this holds the stage, and closes it whatever
        happens."""
        self.pipeline.start()
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the slots take."""
        return sum(values.nbytes for slot in self.slots for values in slot.columns.values())

    def _make_slot(self, index: int) -> DeviceSlot:
        host = self.pipeline.slots[0]
        return DeviceSlot(
            index,
            {
                lane.name: torch.empty((host.capacity, *lane.shape), dtype=lane.dtype, device=self._device)
                for lane in host.lanes
            },
        )

    def _copy_all(self) -> None:
        try:
            while (loaded := self.pipeline.take()) is not None:
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
        self.pipeline.release(loaded)
        columns = {name: values[: loaded.rows] for name, values in slot.columns.items()}
        return replace(loaded, columns=columns, fill=slot)

    def _enqueue(self, loaded: Loaded, slot: DeviceSlot) -> None:
        for name, values in loaded.columns.items():
            slot.columns[name][: loaded.rows].copy_(values, non_blocking=True)

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
        """End the copier and the pipeline behind it; device memory goes with the last reference."""
        self._ended = True
        self._free.put(None)
        # The copier may wait for a host slot: closing the pipeline wakes it. It may be copying: then the
        # memory must stay until it is done, so the pipeline's slots go only after the thread has ended.
        self.pipeline.stop()
        self._thread.end()
        self.pipeline.close()
        self.slots = []
