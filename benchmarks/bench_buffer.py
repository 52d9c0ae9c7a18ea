"""How fast do shuffled batches come from .npy files that are not in the page cache, and at what CPU?

Command: ``python benchmarks/bench_buffer.py --folder /path/on/the/disk [--rows 600000] [--seconds 4]``

Rows are 3072 bytes of uint8 (a 32×32 colour image) with an int64 label; batches have 256 rows. Before every
measurement the files are pushed out of the page cache (posix_fadvise DONTNEED after fsync), so sizes below
memory stand for sizes beyond it during the first pass. Each side runs for ``--seconds`` or one pass, in
turn, twice; the better of the two counts. CPU time is of the process and its children. ``dd iflag=direct
bs=4M`` bounds them all.

TABLE
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
    with Loader(folder, BATCH, device="cpu", buffer="128MiB", **options) as loader:  # type: ignore[arg-type]
        yield from loader


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


def measure(side: Callable[[Path], Iterator[object]], folder: Path, seconds: float) -> tuple[float, float]:
    """Samples per second and CPU microseconds per sample, in steady state after the first batch."""
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


def dd(folder: Path) -> float:
    """What the disk gives dd, in bytes per second."""
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
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, options.rows)
        best: dict[str, tuple[float, float]] = {}
        disk = 0.0
        for _ in range(2):
            disk = max(disk, dd(folder))
            for name, side in SIDES.items():
                if options.only and not any(word in name for word in options.only):
                    continue
                try:
                    found = measure(side, folder, options.seconds)
                except ImportError as error:
                    print(f"{name}: left out, {error}")
                    continue
                best[name] = max(best.get(name, (0.0, 0.0)), found)
        first = best[next(iter(best))][0]
        print(f"{options.rows} rows of {ROW} bytes; dd iflag=direct: {disk / 1e6:.0f} MB/s")
        print("| side | samples/s | of dd's rate | CPU µs each | first side is faster by |")
        for name, (rate, micros) in best.items():
            print(f"| {name} | {rate:,.0f} | {rate * ROW / disk:.0%} | {micros:.2f} | {first / rate:.2f} × |")
        if options.out:
            options.out.write_text(json.dumps({"disk": disk, "sides": best}), encoding="utf-8")


if __name__ == "__main__":
    main()
