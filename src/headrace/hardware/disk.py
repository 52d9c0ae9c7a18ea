"""How fast the disk under a folder reads: in large pieces, and 4 KiB at random places.

The page cache must not be what is measured, so the file is opened with O_DIRECT, or, where the file system
refuses that, dropped from the cache before each pass. A temporary file of random bytes (zeros may be stored
as a hole) is written for a part of the budget and deleted; in a folder where nothing can be written, the
largest file that lies there is read instead. Both rates are 0.0 when neither is possible.

Known shortcomings: a disk's or a hypervisor's own cache cannot be switched off from here and may serve a
file that was written a moment ago; Python's calls bound the random rate at roughly 200,000 reads a second.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PIECE = 4 * 2**20
"""Bytes of one sequential read: long enough that the call costs nothing beside it."""
BLOCK = 4096
READERS = 4
"""Threads that read at once. Solid-state disks need several requests under way; more than 4 was not tried."""
MAX_FILE_BYTES = 256 * 2**20
MIN_FILE_BYTES = 4 * PIECE
LOOKED_AT = 1000
"""Directory entries looked at for a file to read, so that a folder with a million images costs nothing."""
REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}

Clock = Callable[[], float]


def rates(folder: Path, budget_s: float) -> tuple[float, float]:
    """(bytes a second in large pieces, random 4 KiB reads a second); 0.0 for what cannot be measured."""
    try:
        with _file_to_read(folder, budget_s / 3) as file:
            sequential = _run(file, PIECE, sequential=True, budget_s=budget_s / 3)
            reads = _run(file, BLOCK, sequential=False, budget_s=budget_s / 3)
    except OSError:  # a disk that fails here must not end a training run that may never need it
        return 0.0, 0.0
    return sequential * PIECE, reads


@contextmanager
def _file_to_read(folder: Path, write_s: float) -> Iterator[Path]:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".headrace-probe-", dir=folder)
    except OSError:
        yield _largest_file(folder)
        return
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            _fill(file.fileno(), folder, write_s)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _fill(descriptor: int, folder: Path, write_s: float) -> None:
    """Write random pieces until the time, the size or a tenth of the free space is used."""
    size = min(MAX_FILE_BYTES, _free_bytes(folder) // 10)
    end = time.monotonic() + write_s
    written = 0
    piece = bytearray(os.urandom(PIECE))
    while written < max(size, PIECE):
        piece[:8] = written.to_bytes(8, "little")  # no two pieces alike: some disks store equal blocks once
        written += os.write(descriptor, piece)
        if time.monotonic() > end and written >= MIN_FILE_BYTES:
            break
    os.fsync(descriptor)


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _largest_file(folder: Path) -> Path:
    """The largest of the folder's first entries; an OSError when none is long enough to tell anything."""
    best, best_size = None, MIN_FILE_BYTES - 1
    with os.scandir(folder) as entries:
        for _, entry in zip(range(LOOKED_AT), entries, strict=False):
            with contextlib.suppress(OSError):
                size = entry.stat().st_size if entry.is_file() else 0
                if size > best_size:
                    best, best_size = Path(entry.path), size
    if best is None:
        raise FileNotFoundError(f"{folder} holds no file of {MIN_FILE_BYTES} bytes, and none can be written")
    return best


def _run(file: Path, size: int, *, sequential: bool, budget_s: float) -> float:
    """Reads of ``size`` bytes per second by all threads together, until the budget or the file ends."""
    places = _places(file.stat().st_size, size, sequential=sequential)
    _forget(file)
    start = time.perf_counter()
    end = start + budget_s
    done = [0] * READERS
    failures: list[OSError] = []

    def work(number: int) -> None:
        try:
            done[number] = _read(file, places[number::READERS], size, end)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,), name=f"headrace-probe-{n}") for n in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(done) / max(time.perf_counter() - start, 1e-9)


def _places(file_bytes: int, size: int, *, sequential: bool) -> list[int]:
    """Offsets to read, each once, so that no read can be served by one before it."""
    places = list(range(0, file_bytes - size + 1, size))
    if not sequential:
        random.Random(0).shuffle(places)
    return places


def _read(file: Path, places: list[int], size: int, end: float) -> int:
    """Read at each place until the time is over; how many reads were made."""
    descriptor = _open(file)
    try:
        with mmap.mmap(-1, size) as page_aligned:  # O_DIRECT wants memory that starts on a page
            for count, place in enumerate(places):
                if time.perf_counter() > end and count > 0:
                    return count
                os.preadv(descriptor, [page_aligned], place)
    finally:
        os.close(descriptor)
    return len(places)


def _open(file: Path) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(file, os.O_RDONLY | direct)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    return os.open(file, os.O_RDONLY)


def _forget(file: Path) -> None:
    """Drop the file's pages from the page cache; what is not yet on the disk would stay there."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
