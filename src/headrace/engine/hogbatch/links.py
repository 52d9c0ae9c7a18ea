"""The way between host memory and a device: streams, events and pinned memory on CUDA, plain copies on a CPU.

`HostLink` takes the same calls as `CudaLink`, so that everything above it runs, and is tested, on a CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_capturing = threading.Lock()
"""A capture begins by waiting for the whole device, which is refused while another thread's capture is under way:
two workers on one device that began together failed in this way."""


class Link(Protocol):
    """How a device worker moves memory and runs steps."""

    device: torch.device
    captures: bool
    """Whether `capture` makes an act cheaper to repeat than to do."""

    def on_host(self, like: Tensor) -> Tensor:
        """Host memory that the device can copy to and from in the background."""
        ...

    def fits(self, size: int) -> bool:
        """Whether so many bytes of data may stay on the device."""
        ...

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """The stream of steps."""
        ...

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """The stream of copies, which runs beside the stream of steps."""
        ...

    def mark(self) -> Any:
        """A point in the present stream."""
        ...

    def wait_here(self, mark: Any) -> None:
        """Block this thread until the point is reached."""
        ...

    def wait_there(self, mark: Any) -> None:
        """Let the present stream wait for the point."""
        ...

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        """``act`` made cheap to repeat; it must use the same tensors each time."""
        ...


class HostLink:
    """A CPU core that stands in for a device."""

    captures = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def on_host(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def fits(self, size: int) -> bool:
        return True

    def working(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    copying = working

    def mark(self) -> Any:
        return None

    def wait_here(self, mark: Any) -> None: ...

    wait_there = wait_here

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        return act


class CudaLink:
    """A stream of steps and a stream of copies on one CUDA device."""

    captures = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._steps = torch.cuda.Stream(self.device)
        self._copies = torch.cuda.Stream(self.device)

    def on_host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def fits(self, size: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        return size < 0.5 * free  # the rest is for parameters, graphs and other workers on the device

    def working(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._steps)

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait_here(self, mark: Any) -> None:
        mark.synchronize()

    def wait_there(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other workers use the device from their threads meanwhile; only this thread's calls are captured.
        with _capturing, torch.cuda.graph(graph, stream=self._steps, capture_error_mode="thread_local"):
            act()
        return graph.replay
