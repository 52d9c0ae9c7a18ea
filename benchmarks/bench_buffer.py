"""How fast do shuffled batches come from .npy files that are not in the page cache, and at what CPU?

Command: ``python benchmarks/bench_buffer.py --folder /path/on/the/disk [--rows 600000] [--seconds 4]``

Rows are 3072 bytes of uint8 (a 32×32 colour image) with an int64 label; batches have 256 rows. Before every
measurement the files are pushed out of the page cache (posix_fadvise DONTNEED after fsync), so sizes below
memory stand for sizes beyond it during the first pass. Each side runs for ``--seconds`` or one pass, in
turn, twice; the better of the two counts. CPU time is of the process and its children. ``dd iflag=direct
bs=4M`` bounds them all.

Two shared cores under a load average of 28 (other programs; so rates are low and CPU times are what to compare),
virtual disk, 600,000 rows = 1.8 GB, Python 3.11, torch 2.13 CPU, torchdata 0.11, SPDL 0.8; FFCV did not install.
Cold, ``--seconds 2``; dd iflag=direct 2003 MB/s:

| side | samples/s | of dd's rate | CPU µs each | first side is faster by |
| headrace, direct | 117,095 | 18% | 1.44 | 1.00 × |
| headrace, page cache | 141,388 | 22% | 2.86 | 0.83 × |
| headrace, buffers alone | 211,258 | 32% | 0.58 | 0.55 × |
| headrace, direct, rounds=4 | 259,430 | 40% | 0.92 | 0.45 × |
| batched memmap | 5,482 | 1% | 27.22 | 21.36 × |
| torchdata.nodes, batched memmap | 44,846 | 7% | 5.32 | 2.61 × |
| SPDL, batched memmap | 29,429 | 5% | 8.67 | 3.98 × |
| DataLoader, 2 workers | 1,407 | 0% | 139.91 | 83.20 × |

``--warm``, everything in the page cache:

| headrace, in memory | 215,925 | | 1.44 | 1.00 × |
| batched memmap | 157,171 | | 1.89 | 1.37 × |
| torchdata.nodes, batched memmap, 4 threads | 698,866 | | 1.31 | 0.31 × |
| SPDL, batched memmap, 4 threads | 314,762 | | 2.39 | 0.69 × |

Threads that prefetch win a warm race that nobody trains in: the loader gathers when it is asked, and takes the same
CPU. Reading alone has come to 85 % of dd's rate in the same run with blocks of 3 MB (1350 of 1590 MB/s), never to the
90 % hoped for; a quiet machine was not to be had.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from headrace.engine.loader import Loader

BATCH = 256
ROW = 3072
DEVICE = {"name": "cpu"}


def write(folder: Path, rows: int) -> None:
    """The data, unless a run before left them."""
    if (folder / "x.npy").exists() and np.load(folder / "x.npy", mmap_mode="r").shape[0] == rows:
        return
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.uint8, shape=(rows, ROW))
    rng = np.random.default_rng(0)
    for start in range(0, rows, 20_000):
        part = x[start : start + 20_000]
        part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)
    x.flush()
    np.save(folder / "y.npy", np.arange(rows) % 10)


def forget(folder: Path) -> None:
    """Push the files out of the page cache."""
    for path in folder.glob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Rows(torch.utils.data.Dataset):
    """The usual way: a memory map, one example at a time."""

    def __init__(self, folder: Path) -> None:
        self.x = np.load(folder / "x.npy", mmap_mode="r")
        self.y = np.load(folder / "y.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[k].copy()), int(self.y[k])


class Batches(Rows):
    """A memory map with batched reads."""

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows_sorted = np.sort(rows)
        return torch.from_numpy(self.x[rows_sorted]), torch.from_numpy(self.y[rows_sorted])


def same(batch: object) -> object:
    return batch


def permuted(folder: Path) -> Iterator[np.ndarray]:
    rows = np.load(folder / "x.npy", mmap_mode="r").shape[0]
    order = np.random.default_rng(1).permutation(rows)
    for start in range(0, rows, BATCH):
        yield np.sort(order[start : start + BATCH])


def headrace(folder: Path, **options: object) -> Iterator[object]:
    with Loader(folder, BATCH, device=DEVICE["name"], buffer="64MiB", **options) as loader:  # type: ignore[arg-type]
        yield from loader


def resident(folder: Path) -> Iterator[object]:
    """Files that fit in memory: gathered from their memory maps."""
    with Loader(folder, BATCH, device=DEVICE["name"], buffer="memory") as loader:
        yield from loader


def buffers(folder: Path) -> Iterator[object]:
    """Reading alone: full buffers, without gathering batches."""
    with Loader(folder, BATCH, device=DEVICE["name"], buffer="64MiB", direct=True) as loader:
        for buffer in loader.buffers():
            yield (buffer.order,)


def dataloader(folder: Path) -> Iterator[object]:
    yield from torch.utils.data.DataLoader(Rows(folder), BATCH, shuffle=True, num_workers=2)


def batched_memmap(folder: Path) -> Iterator[object]:
    yield from torch.utils.data.DataLoader(Batches(folder), BATCH, shuffle=True, collate_fn=same)


def nodes(folder: Path) -> Iterator[object]:
    from torchdata.nodes import IterableWrapper, ParallelMapper
    from torchdata.nodes import Loader as NodesLoader

    data = Batches(folder)
    source = IterableWrapper(permuted(folder))
    yield from NodesLoader(ParallelMapper(source, data.__getitems__, num_workers=4, method="thread"))


def spdl(folder: Path) -> Iterator[object]:
    from spdl.pipeline import PipelineBuilder

    data = Batches(folder)
    builder = (
        PipelineBuilder().add_source(permuted(folder)).pipe(data.__getitems__, concurrency=4).add_sink(4)
    )
    with (pipeline := builder.build(num_threads=4)).auto_stop():
        yield from pipeline.get_iterator(timeout=60)


SIDES: dict[str, Callable[[Path], Iterator[object]]] = {
    "headrace, direct": lambda f: headrace(f, direct=True),
    "headrace, page cache": lambda f: headrace(f, direct=False),
    "headrace, buffers alone": buffers,
    "headrace, in memory": resident,
    "headrace, direct, rounds=4": lambda f: headrace(f, direct=True, rounds=4),
    "batched memmap": batched_memmap,
    "torchdata.nodes, batched memmap": nodes,
    "SPDL, batched memmap": spdl,
    "DataLoader, 2 workers": dataloader,
}


def cpu() -> float:
    """CPU seconds of this process and its ended children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(
    side: Callable[[Path], Iterator[object]], folder: Path, seconds: float, warm: bool
) -> tuple[float, float]:
    """Samples per second and CPU microseconds per sample, opening and closing included."""
    if not warm:
        forget(folder)
    before, began, count = cpu(), time.perf_counter(), 0
    batches = side(folder)
    for batch in batches:
        count += len(batch[0])  # type: ignore[index]
        if time.perf_counter() - began > seconds:
            break
    passed = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return count / passed, (cpu() - before) / count * 1e6


def dd(folder: Path, warm: bool) -> float:
    """What the disk gives dd, in bytes per second."""
    if not warm:
        forget(folder)
    began = time.perf_counter()
    command = ["dd", f"if={folder / 'x.npy'}", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"]
    subprocess.run(command, check=True)
    return (folder / "x.npy").stat().st_size / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the files are written; kept when given"
    )
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--device", default="cpu", help="where Headrace's batches go; the others stay on the CPU"
    )
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    options = parser.parse_args()
    DEVICE["name"] = options.device
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, options.rows)
        best: dict[str, tuple[float, float]] = {}
        disk = 0.0
        for _ in range(options.repeats):
            disk = max(disk, dd(folder, options.warm))
            for name, side in SIDES.items():
                if options.only and not any(word in name for word in options.only):
                    continue
                try:
                    found = measure(side, folder, options.seconds, options.warm)
                except ImportError as error:
                    print(f"{name}: left out, {error}")
                    continue
                rate, micros = best.get(name, found)
                best[name] = (max(rate, found[0]), min(micros, found[1]))
        first = best[next(iter(best))][0]
        print(f"{options.rows} rows of {ROW} bytes; dd iflag=direct: {disk / 1e6:.0f} MB/s")
        print("| side | samples/s | of dd's rate | CPU µs each | first side is faster by |")
        for name, (rate, micros) in best.items():
            print(f"| {name} | {rate:,.0f} | {rate * ROW / disk:.0%} | {micros:.2f} | {first / rate:.2f} × |")
        if options.out:
            options.out.write_text(json.dumps({"disk": disk, "sides": best}), encoding="utf-8")


if __name__ == "__main__":
    main()
