"""Bringing files that fit in memory into the page cache, in order, while their rows are already in use.

Rows gathered at random from a cold memory map make the disk seek for each of them; the same file read from its
beginning to its end comes 5 to 30 times faster. So one thread reads it so, once, and batches find their rows in
memory soon. Nothing is kept: the pages belong to the system, and go when others need the room.

Short of: a file system that does not use the page cache gains nothing from this.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable

from headrace.buffer.worker import Worker
from headrace.types import Span

CHUNK_BYTES = 1 << 20
LEAST_BYTES = 8 << 20
"""Smaller files are there after a few reads anyway; a guess."""
CANNOT_TELL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EIO)
"""What file systems and kernels answer that do not know which pages are in memory."""
PROBES = 64
"""Places of a file at which we look whether it lies in the page cache already."""


class Fetch:
    """One thread that reads local files through the page cache. `close` ends it within a chunk."""

    def __init__(self, spans: Iterable[Span]) -> None:
        files = {span.path: span.file_bytes for span in spans if span.filesystem is None}
        self._files = {path: size for path, size in files.items() if size >= LEAST_BYTES}
        self._closed = False
        self.notes: list[str] = []
        """What a file system answered that nobody expected, a sentence each."""
        self._thread = Worker("fetcher", self._read_all)

    def start(self) -> None:
        if self._files:
            self._thread.start()

    def _read_all(self) -> None:
        scratch = mmap.mmap(-1, CHUNK_BYTES)
        for path, size in self._files.items():
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # whoever reads the rows says it better
            try:
                if not self._has(path, file, size):
                    self._read(file, size, scratch)
            except OSError:
                continue
            finally:
                os.close(file)

    def _has(self, path: str, file: int, size: int) -> bool:
        """Whether the file needs no reading. One that nobody can tell about is read: that costs one pass."""
        try:
            return is_cached(file, size)
        except OSError as error:
            if error.errno not in CANNOT_TELL:
                self.notes.append(
                    f"{path}: asked which of its pages are in memory, the file system answered {error.strerror!r} "
                    f"(error {error.errno}); the whole file is read instead"
                )
            return False

    def _read(self, file: int, size: int, scratch: mmap.mmap) -> None:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for offset in range(0, size, CHUNK_BYTES):
            if self._closed or os.preadv(file, [scratch], offset) == 0:
                return

    def wait(self) -> None:
        """Until everything was read once."""
        self._thread.end()

    def close(self) -> None:
        self._closed = True
        self._thread.end()


def is_cached(file: int, size: int) -> bool:
    """Whether a file seems to lie in the page cache: a byte at each of some places can be had without waiting.

    Raises what the file system answers when it does not know.
    """
    for k in range(PROBES):
        try:
            os.preadv(file, [bytearray(1)], k * (size - 1) // (PROBES - 1), os.RWF_NOWAIT)
        except BlockingIOError:
            return False
    return True
