"""SIGINT and SIGTERM as a wish: the step is finished and saved before anything ends.

A second signal does not wait. Outside the main thread Python allows no handlers; then nothing is changed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class GracefulStop:
    """While entered, ``received`` is the first signal that asked to stop, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def raise_received(self) -> None:
        """End as the signal asked, now that everything is saved."""
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.received is not None:
            raise KeyboardInterrupt
