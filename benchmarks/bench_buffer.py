"""How fast do shuffled batches come from .npy files that are not in the page cache, and at what CPU?

Command: ``python benchmarks/bench_buffer.py --folder /path/on/the/disk --rows 4000000 [--seconds 4] [--disk | --warm]``

Rows are 3072 bytes of uint8 (a 32×32 colour image) with an int64 label; batches have 256 rows, buffers 256 MiB. Every
side runs in a process of its own, for ``--seconds`` after a second that does not count, in turn. Before each, the files
are pushed out of the page cache (fsync, posix_fadvise DONTNEED; mincore says whether it worked). Four million rows are
12.3 GB, more than any side reads in that time, so none meets a page twice. CPU time is of the process and its children.

``--disk``: the loader alone (and with shuffled batches) against ``dd iflag=direct bs=4M``, dd, loader, dd in turn; both
pass the page cache by. Two idle cores of a Zen 5, a virtual disk, Python 3.11, torch 2.13 CPU, medians of three:

| side | of dd's rate (1.38 GB/s) | CPU µs a row |
| buffers alone | 266 % (254 to 269) | 0.23 |
| shuffled batches | 290 % (286 to 294) | 0.50 |

dd has one read under way, the loader eight. Cold, 4,000,000 rows, ``--seconds 3``, medians of two, torchdata 0.11,
SPDL 0.8:

| side | samples/s | of dd's rate | CPU µs each | first side is faster by |
| headrace, direct | 1,155,414 | 247% | 0.58 | 1.00 × |
| headrace, page cache | 743,483 | 159% | 1.51 | 1.55 × |
| headrace, buffers alone | 1,169,958 | 250% | 0.25 | 0.99 × |
| batched memmap | 443 | 0% | 756.69 | 2610 × |
| torchdata.nodes, batched memmap | 25,447 | 5% | 26.88 | 45 × |
| SPDL, batched memmap | 3,398 | 1% | 159.79 | 340 × |
| DataLoader, 2 workers | 1,725 | 0% | 403.32 | 670 × |

The others' maps are read ahead by 128 kB for each row of 3 kB, and every row is a seek; on a busy machine that
costs them more than on a quiet one. FFCV, built against OpenCV, on 2,000,000 rows in its own format,
``--seconds 1``: 219,097 samples/s at 8.1 µs of CPU against 906,201 at 1.0, that is 4.14 × (quasi-random order,
medians of two).

``--warm`` (everything in the page cache), 3,000,000 rows, ``--seconds 1``, idle cores, medians of three:

| headrace, in memory | 2,398,001 | | 0.42 | 1.00 × |
| batched memmap | 1,512,985 | | 0.63 | 1.58 × |
| torchdata.nodes, batched memmap | 1,445,468 | | 0.86 | 1.66 × |
| SPDL, batched memmap | 769,561 | | 1.64 | 3.12 × |
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from headrace.engine.loader import Loader

BATCH = 256
PART = 64 << 20
ROW = 3072
BUFFER = "256MiB"
WARM_S = 1.0
DEVICE = {"name": "cpu"}


def write(folder: Path, rows: int) -> None:
    """The data, unless a run before left them: a part of noise again and again, written past the page cache."""
    if (folder / "x.npy").exists() and np.load(folder / "x.npy", mmap_mode="r").shape[0] == rows:
        return
    part = mmap.mmap(-1, PART)
    np.frombuffer(part, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, PART, dtype=np.uint8)
    file = os.open(folder / "x.npy", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    for k in range(-(-(128 + rows * ROW) // PART)):
        os.pwritev(file, [part], k * PART)
    os.close(file)
    words = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, {ROW}), }}"
    with (folder / "x.npy").open("rb+") as out:
        out.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + words.ljust(117).encode() + b"\n")
        out.truncate(128 + rows * ROW)
    np.save(folder / "y.npy", np.arange(rows) % 10)


def forget(folder: Path) -> None:
    """Push the files out of the page cache."""
    for path in (*folder.glob("*.npy"), *folder.glob("*.beton")):
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
    with Loader(folder, BATCH, device=DEVICE["name"], buffer=BUFFER, **options) as loader:  # type: ignore[arg-type]
        yield from loader


def resident(folder: Path) -> Iterator[object]:
    """Files that fit in memory: gathered from their memory maps."""
    with Loader(folder, BATCH, device=DEVICE["name"], buffer="memory") as loader:
        yield from loader


def buffers(folder: Path) -> Iterator[object]:
    """Reading alone: full buffers, without gathering batches."""
    with Loader(folder, BATCH, device=DEVICE["name"], buffer=BUFFER, direct=True) as loader:
        for buffer in loader.buffers():
            yield (buffer.order,)


def steady(folder: Path, *, batches: bool, megabytes: int) -> tuple[float, float]:
    """Bytes per second and CPU microseconds a row over so many megabytes, after both slots were filled once."""
    rows, wanted, began, first = 0, megabytes * 10**6 // ROW, None, 0
    with Loader(folder, BATCH, device=DEVICE["name"], buffer=BUFFER, direct=True) as loader:
        for _ in range(1000):
            for item in loader if batches else loader.buffers():
                loaded = loader.statistics.buffers
                if loaded < 3:
                    continue
                if began is None:
                    began, first = (time.perf_counter(), cpu()), rows
                    continue
                rows += len(item[0]) if batches else len(item.order)  # type: ignore[index, union-attr]
                if rows >= wanted:
                    passed, used = time.perf_counter() - began[0], cpu() - began[1]
                    return (rows - first) * ROW / passed, used / (rows - first) * 1e6
    raise AssertionError


def disk_alone(folder: Path, repeats: int) -> None:
    """How much of dd's rate the loader reaches: dd, loader, dd, in turn, and the ratio of each such group."""
    for name, batches in (("buffers alone", False), ("shuffled batches", True)):
        found = []
        for _ in range(repeats):
            before = dd(folder, warm=False)
            rate, micros = steady(folder, batches=batches, megabytes=1500)
            after = dd(folder, warm=False)
            found.append((rate / ((before + after) / 2), rate, (before + after) / 2, micros))
            print(
                f"  {name}: dd {before / 1e6:.0f} and {after / 1e6:.0f} MB/s, loader {rate / 1e6:.0f} MB/s, "
                f"{found[-1][0]:.0%} of dd, {micros:.2f} µs of CPU a row",
                flush=True,
            )
        share, rate, disk, micros = np.median(found, axis=0)
        print(
            f"{name}: {share:.0%} of dd iflag=direct bs=4M (medians: {rate / 1e6:.0f} of {disk / 1e6:.0f} MB/s), "
            f"{micros:.2f} µs of CPU a row of {ROW} bytes",
            flush=True,
        )


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


def write_ffcv(folder: Path) -> Path:
    """The same rows in FFCV's format."""
    from ffcv.fields import IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    path = folder / "rows.beton"
    if not path.exists():
        fields = {"x": NDArrayField(np.dtype("uint8"), (ROW,)), "y": IntField()}
        DatasetWriter(str(path), fields, num_workers=2).from_indexed_dataset(Arrays(folder))
    return path


class Arrays(Rows):
    """Examples as NumPy arrays, for FFCV's writer."""

    def __getitem__(self, k: int) -> tuple[np.ndarray, int]:  # type: ignore[override]
        return self.x[k].copy(), int(self.y[k])


def ffcv(folder: Path) -> Iterator[object]:
    """FFCV's order for data beyond memory, with threads of its own and without the page cache's help."""
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.loader import Loader as FFCVLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import ToTensor

    yield from FFCVLoader(
        str(folder / "rows.beton"), batch_size=BATCH, num_workers=2, order=OrderOption.QUASI_RANDOM,
        os_cache=False, drop_last=False,
        pipelines={"x": [NDArrayDecoder(), ToTensor()], "y": [IntDecoder(), ToTensor()]},
    )  # fmt: skip


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
    "FFCV, quasi-random": ffcv,
}


NEEDS = {
    "torchdata.nodes, batched memmap": ("torchdata.nodes",),
    "SPDL, batched memmap": ("spdl.pipeline",),
    "FFCV, quasi-random": ("ffcv",),
}


def cpu(who: int = resource.RUSAGE_SELF) -> float:
    """CPU seconds of this process, or of its ended children."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measure(side: Callable[[Path], Iterator[object]], folder: Path, seconds: float) -> tuple[float, float]:
    """Samples per second and CPU microseconds per sample once a second has passed: opening, drawing the order and
    filling the first buffers belong to no side's steady rate. What workers used, who are processes, is known only
    when they have ended, so they are counted from their start, with all their samples."""
    batches, children = side(folder), cpu(resource.RUSAGE_CHILDREN)
    opened, count, early, began, before = time.perf_counter(), 0, 0, 0.0, 0.0
    for batch in batches:
        if not began:
            early += len(batch[0])  # type: ignore[index]
            if time.perf_counter() - opened > WARM_S:
                began, before = time.perf_counter(), cpu()
            continue
        count += len(batch[0])  # type: ignore[index]
        if time.perf_counter() - began > seconds:
            break
    if not count:
        raise ValueError(f"a pass over the data ended within its first {WARM_S:g} s: give it more --rows")
    passed, used = time.perf_counter() - began, cpu() - before
    batches.close()  # type: ignore[attr-defined]
    apart = cpu(resource.RUSAGE_CHILDREN) - children
    return count / passed, (used / max(count, 1) + apart / max(count + early, 1)) * 1e6


def measure_apart(name: str, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """The same in a process of its own: threads and maps that a side leaves behind would keep pages in the cache
    and take CPU time from the next."""
    if not options.warm:
        forget(folder)
        assert (left := cached_share(folder / "x.npy")) < 0.02, (
            f"{left:.0%} of the file is still in the page cache"
        )
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--folder",
        str(folder),
        "--seconds",
        str(options.seconds),
    ]
    done = subprocess.run([*command, "--device", options.device], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImportError(done.stderr.strip().splitlines()[-1])
    samples, micros = json.loads(done.stdout.splitlines()[-1])
    return samples, micros


def cached_share(path: Path) -> float:
    """The share of a file's pages that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        address = np.frombuffer(pages, np.uint8).ctypes.data
        states = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), states.ctypes.data_as(ctypes.c_void_p)
        )
        assert failed == 0
    return float((states & 1).mean())


def dd(folder: Path, warm: bool) -> float:
    """What the disk gives dd, in bytes per second, over at most 2 GB from a random place."""
    if not warm:
        forget(folder)
    blocks = (folder / "x.npy").stat().st_size >> 22
    count = min(blocks, 512)
    skip = int(np.random.default_rng().integers(blocks - count + 1))
    began = time.perf_counter()
    command = ["dd", f"if={folder / 'x.npy'}", "of=/dev/null", "bs=4M", f"count={count}", f"skip={skip}"]
    subprocess.run([*command, "iflag=direct", "status=none"], check=True)
    return count * (4 << 20) / (time.perf_counter() - began)


def chosen(options: argparse.Namespace, folder: Path) -> list[str]:
    """The sides that were asked for and whose packages are here."""
    found = []
    for name, side in SIDES.items():
        if (options.only and not any(word in name for word in options.only)) or (
            options.without and any(word in name for word in options.without)
        ):
            continue
        try:
            for package in NEEDS.get(name, ()):
                importlib.import_module(package)
            if side is ffcv:
                write_ffcv(folder)
        except ImportError as error:
            print(f"{name}: left out, {error}")
            continue
        found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the files are written; kept when given"
    )
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--device", default="cpu", help="where Headrace's batches go; the others stay on the CPU"
    )
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--one", default=None, help="measure one side in this process and print its numbers")
    parser.add_argument("--disk", action="store_true", help="only the loader against dd, in turn")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--without", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    options = parser.parse_args()
    DEVICE["name"] = options.device
    if options.one:
        with tempfile.TemporaryDirectory() as scratch:  # imports and compiling come before the clock
            write(Path(scratch), 10 * BATCH)
            if options.one.startswith("FFCV"):
                write_ffcv(Path(scratch))
            for _ in SIDES[options.one](Path(scratch)):
                pass
        print(json.dumps(measure(SIDES[options.one], options.folder, options.seconds)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, options.rows)
        if options.disk:
            forget(folder)
            disk_alone(folder, options.repeats)
            return
        sides = chosen(options, folder)
        if options.warm:
            np.load(folder / "x.npy", mmap_mode="r").sum(dtype=np.int64)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        disk: list[float] = []
        for _ in range(options.repeats):
            for name in sides:
                disk += [] if options.warm else [dd(folder, options.warm)]
                runs[name].append(measure_apart(name, folder, options))
                samples, micros = runs[name][-1]
                print(f"  {name}: {samples:,.0f} samples/s, {micros:.2f} µs of CPU each", flush=True)
        show(runs, disk, options)


def show(runs: dict[str, list[tuple[float, float]]], disk: list[float], options: argparse.Namespace) -> None:
    """The table: medians over the repeats."""
    median = {name: tuple(float(v) for v in np.median(found, axis=0)) for name, found in runs.items()}
    rate = float(np.median(disk)) if disk else 0.0
    first = next(iter(median.values()))[0]
    print(f"{options.rows} rows of {ROW} bytes; medians of {options.repeats}")
    if disk:
        print(f"dd iflag=direct: {rate / 1e6:.0f} MB/s, {min(disk) / 1e6:.0f} to {max(disk) / 1e6:.0f}")
    print("| side | samples/s | of dd's rate | CPU µs each | first side is faster by |")
    for name, (samples, micros) in median.items():
        share = f"{samples * ROW / rate:.0%}" if rate else ""
        print(f"| {name} | {samples:,.0f} | {share} | {micros:.2f} | {first / samples:.2f} × |")
    if options.out:
        options.out.write_text(json.dumps({"disk": disk, "sides": runs}), encoding="utf-8")


if __name__ == "__main__":
    main()
