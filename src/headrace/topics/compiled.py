"""How the kernels are compiled: once per machine, kept on disk, and never in silence.

`jit` compiles without the interpreter lock and keeps the result in numba's cache (beside this file, or in the
user's cache folder when that is not writable; not at all, where neither is). `announce` says what is
happening when a compilation takes long enough to be noticed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit

PATIENCE_S = 2.0
"""Loading from the cache stays below this on a slow disk; compiling takes several seconds."""


_uncached: set[str] = set()
"""Functions that found no folder for their cache."""


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for nopython mode, releasing the interpreter lock, cached where a cache can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # numba found no folder to write to (a read-only container): compile in every process instead.
        _uncached.add(function.__name__)
        return njit(**options)(function)  # type: ignore[no-any-return]


def how_often() -> str:
    """When the next compilation is due."""
    if not _uncached:
        return "once on this machine"
    return "in every process: no cache folder can be written, set NUMBA_CACHE_DIR to one"


@contextmanager
def announce(what: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Print one line when the work inside takes longer than ``patience_s``, and its duration at the end."""
    started = time.monotonic()
    done = threading.Event()

    def wait() -> None:
        if not done.wait(patience_s):
            say(f"headrace: compiling {what}, {how_often()} ...", end="")
            done.wait()
            say(f" {time.monotonic() - started:.0f} s")

    def say(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)  # noqa: T201 - progress belongs on stderr

    watcher = threading.Thread(target=wait, name="headrace-compiling", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
