"""Does a GPU wait for 20 GB on disk, and does using a buffer several times pay when it does?

Command: ``python benchmarks/bench_buffer_gpu.py --folder /path/on/the/disk [--gigabytes 20] [--only speed busy]``
``--quick`` writes 6 GB instead of 20 (a pass is three buffers of 2 GiB), reads each side once and takes fewer passes:
about 40 s where the disk writes and reads 2 GB/s and more. ``--quick --gigabytes 20`` is the whole size with few
passes; the rate at which the disk takes it and the time left are printed.

``speed``: the loader alone, disk → pinned slots → device, against ``dd iflag=direct bs=4M``, both in turn; all
reads pass the page cache by (O_DIRECT), so the size of memory does not matter. CPU time is the whole process's.
``busy``: `headrace.fit` with ``buffer="2GiB"`` on a model whose step takes longer than its data take to load. The
device's own clock (events before and after every stretch of updates) gives the share of time in which updates ran;
the same model on rows that stay on the device gives the rate to compare with. Files are read past the page cache, as
files beyond memory are.
``rounds``: a step faster than the disk, ``rounds="auto"`` against ``rounds=1``: seconds until the loss on held-out
rows is the one that ``rounds=1`` ends with. A third model is slower than the disk: there "auto" stays at one round
and gains nothing.

One H200 with 16 cores, torch 2.11, ``--quick --gigabytes 20`` (20.0 GB on disk, written in 9.2 s; O_DIRECT, buffers of
2 GiB; 50 s in all). The loader's rate against dd's is that of an earlier run with 6 GB: one read of each side alone,
and the disk is shared, so this one's 2.00 of 2.60 GB/s (77 %) stands beside 2.33 of 2.46 (95 %).

    the loader alone     2.00 and 2.33 GB/s, 77 and 95 % of dd; 0.22 µs of CPU a row; pinned to device 55 GB/s
    memory               host 4.136 GB of 4.222 declared, device 4.059 GB of 4.067
    busy                 99.95 % of 14.8 s after the first buffer (10 buffers), largest gap 5.9 ms; 99 % of resident
                         rows' rate; nvidia-smi says 98 %
    rounds, digits       loss 1.216 after 1.90 s with R=1, after 1.11 s with "auto" (R 1 to 5): 1.71 ×
    rounds, forest       loss 0.560 after 1.96 s with R=1, after 1.32 s with "auto" (R 1 to 4): 1.48 ×
    rounds, slow model   "auto" stays at R=1: 1.00 ×
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import resource
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace as hr
from headrace.buffer.slots import Lane, Slot
from headrace.engine import wiring
from headrace.engine.graph import GraphStepper
from headrace.engine.loader import Loader

ROW = 3072
PART = 64 << 20


def say(*words: object) -> None:
    print(*words, flush=True)


# ---------------------------------------------------------------------- data


def write_rows(path: Path, size: int, within_s: float, threads: int = 16) -> int:
    """About ``size`` bytes of noise as uint8 rows, past the page cache; returns the rows.

    Where the disk would need longer than ``within_s``, fewer are written, and that is said.
    """
    block = mmap.mmap(-1, PART)
    np.frombuffer(block, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, PART, dtype=np.uint8)
    parts = size // PART
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    began, done, wave = time.perf_counter(), 0, 2 * threads
    with ThreadPoolExecutor(threads) as pool:
        while done < parts:
            upto = min(done + wave, parts)
            list(pool.map(lambda k: os.pwritev(file, [block], k * PART), range(done, upto)))
            took, first, done = time.perf_counter() - began, done == 0, upto
            rate = done * PART / took
            if first and parts * PART / rate > within_s:
                parts = max(done, int(within_s * rate / PART))
                say(
                    f"  BELOW {size / 1e9:.1f} GB: only {parts * PART / 1e9:.1f} GB are written in {within_s:.0f} s"
                )
            if first or done % (4 * wave) == 0:
                left = (parts - done) * PART / rate
                say(f"  {done * PART / 1e9:.1f} GB written at {rate / 1e9:.2f} GB/s, {left:.0f} s to go")
    os.close(file)
    rows = (parts * PART - 128) // ROW
    head = npy_head(np.dtype(np.uint8), (rows, ROW))
    with path.open("rb+") as out:
        out.write(head)
        out.truncate(len(head) + rows * ROW)
        os.fsync(out.fileno())
    return rows


def npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a ``.npy`` file."""
    words = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + words.ljust(117).encode() + b"\n"


def save_cold(folder: Path, **columns: np.ndarray) -> Path:
    """Columns as files of which no page is cached."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)
        with (folder / f"{name}.npy").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return folder


def forget(folder: Path) -> None:
    """Push the files out of the page cache."""
    for path in folder.glob("*.npy"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_by_dd(path: Path, size: int) -> float:
    """What ``dd`` gets from the disk, in bytes per second."""
    blocks = size // (4 << 20)
    began = time.perf_counter()
    command = ["dd", f"if={path}", "of=/dev/null", "bs=4M", f"count={blocks}", "iflag=direct", "status=none"]
    subprocess.run(command, check=True)
    return blocks * (4 << 20) / (time.perf_counter() - began)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def host_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


# ---------------------------------------------------------------------- speed


def loader_alone(folder: Path, device: str, seconds: float, **options: Any) -> dict[str, float]:
    """Full buffers without training: the rate between the first and the last, CPU, memory of both kinds."""
    before_host = host_bytes()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before_device = torch.cuda.memory_allocated() if device == "cuda" else 0
    began = time.perf_counter()
    with Loader(folder, 1024, **{"device": device, "buffer": "2GiB", "direct": True, **options}) as loader:
        rows, first_s, first_cpu, host = 0, 0.0, 0.0, 0
        for buffer in loader.buffers():
            if first_s == 0.0:
                first_s, first_cpu = time.perf_counter(), cpu_s()
            else:
                rows += len(buffer.order)
            last_s, last_cpu = time.perf_counter(), cpu_s()
            host = max(host, host_bytes())
            if last_s - first_s > seconds:
                break
        found = {
            "open_s": first_s - began,
            "rate": rows * (ROW + 8) / (last_s - first_s),
            "cpu_us": (last_cpu - first_cpu) / rows * 1e6,
            "host": host - before_host,
            "host_declared": loader.plan["host_bytes"],
        }
        if device == "cuda":
            found["device"] = torch.cuda.max_memory_allocated() - before_device
            found["device_declared"] = loader.plan["device_bytes"]
        return found


def speed(folder: Path, repeats: int, seconds: float, *, quick: bool = False) -> dict[str, Any]:
    sides: dict[str, dict[str, Any]] = {
        "to the device": {"device": "cuda"},
        "to the device, 16 threads": {"device": "cuda", "threads": 16},
        "to the device, blocks of 0.8 MB": {"device": "cuda", "block": 256},
        "to the device, 8 MB blocks, 16 threads": {"device": "cuda", "block": 2560, "threads": 16},
        "to the device, page cache, cold": {"device": "cuda", "direct": False},
        "to memory": {"device": "cpu"},
    }
    if quick:
        sides = {"to the device": sides["to the device"]}
    best: dict[str, dict[str, float]] = {}
    disk = []
    for _ in range(repeats):
        for name, options in sides.items():
            forget(folder)
            disk.append(read_by_dd(folder / "x.npy", (2 if quick else 3) << 30))
            found = loader_alone(folder, seconds=seconds, **options)
            shown = {k: round(v, 3) if v < 1e6 else f"{v / 1e9:.4f} GB" for k, v in found.items()}
            say(f"  {name}: dd {disk[-1] / 1e9:.2f} GB/s;", shown)
            if name not in best or found["rate"] > best[name]["rate"]:
                best[name] = found
    middle = float(np.median(disk))
    say(f"dd iflag=direct bs=4M: best {max(disk) / 1e9:.2f}, median {middle / 1e9:.2f} GB/s")
    for name, found in best.items():
        for kind in ("host", "device"):
            if kind in found:
                used, declared = found[kind], found[f"{kind}_declared"]
                say(f"{name}: {kind} memory {used / 1e9:.3f} GB of {declared / 1e9:.3f} GB declared: "
                    f"{'within' if used <= declared else 'BEYOND'}")  # fmt: skip
    say("| side | GB/s | of dd's best | of dd's median | CPU µs a row |")
    for name, found in best.items():
        rate = found["rate"]
        say(
            f"| {name} | {rate / 1e9:.2f} | {rate / max(disk):.0%} | {rate / middle:.0%} | {found['cpu_us']:.2f} |"
        )
    return {"dd": disk, "sides": best}


def link() -> None:
    """From a pinned slot to the device."""
    slot = Slot((Lane("x", torch.uint8, (ROW,)),), 349_525, pinned=True)
    values = slot.tensors(349_525, {"x": 0})["x"]
    on_device = torch.empty_like(values, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        began.record()
        on_device.copy_(values, non_blocking=True)
        ended.record()
        torch.cuda.synchronize()
    say(f"pinned slot to device: {values.nbytes / began.elapsed_time(ended) / 1e6:.1f} GB/s")
    del values
    slot.close()


# ---------------------------------------------------------------------- busy


class Utilisation:
    """What nvidia-smi says while something runs: the share of time in which any kernel ran."""

    def __enter__(self) -> Utilisation:
        command = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "250",
        ]
        self.values: list[tuple[float, int]] = []
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:  # the events tell without it
            self.process = subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        return self

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.values.append((time.perf_counter(), int(line)))

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()


class Stretches:
    """Events on the device's clock before and after every stretch of updates."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, Any, tuple[int, int, int], int]] = []
        self.host_s: list[float] = []
        self.run = GraphStepper.run

    def __enter__(self) -> Stretches:
        def run(stepper: GraphStepper, stretch: Any) -> None:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.host_s.append(time.perf_counter())
            began.record()
            self.run(stepper, stretch)
            ended.record()
            at = stretch.buffer
            place = (at.pass_index, at.index, at.round)
            self.events.append((began, ended, place, stretch.stop - stretch.start))

        GraphStepper.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        GraphStepper.run = self.run  # type: ignore[method-assign]

    def busy(self, skip: int) -> dict[str, float]:
        """Share of the time in which updates ran, after the first buffers, and the gaps between stretches."""
        torch.cuda.synchronize()
        buffers = list(dict.fromkeys(e[2] for e in self.events))
        kept = [e for e in self.events if e[2] in buffers[skip:]]
        whole = kept[0][0].elapsed_time(kept[-1][1])
        gaps = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(kept)]
        edges = [g for g, a, b in zip(gaps, kept, kept[1:], strict=False) if a[2] != b[2]]
        return {
            "busy": 1 - sum(gaps) / whole, "seconds": whole / 1000, "largest_gap_ms": max(gaps),
            "between_buffers_ms": float(np.mean(edges)) if edges else 0.0, "buffers": len(buffers) - skip,
            "rows_per_s": sum(e[3] for e in kept) / whole * 1000,
        }  # fmt: skip


def wide_model(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(ROW, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU())
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def busy(folder: Path, scratch: Path, width: int, rate: float, *, quick: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {
        "optimizer": "sgd", "lr": 1e-4, "batch_size": 1024, "capture": "graph", "progress": False,
        "seed": 0, "device": "cuda", "workers": "single",
    }  # fmt: skip
    rows, steps = (100_000, 400) if quick else (400_000, 800)
    x = torch.randint(0, 256, (rows, ROW), dtype=torch.uint8)
    with Stretches() as told:
        hr.fit(wide_model(width), (x, torch.arange(rows) % 10), steps=steps, **options)
        resident = told.busy(1)
    per_s = resident["rows_per_s"]
    say(
        f"rows that stay on the device: {per_s:,.0f} rows/s, {1024 / per_s * 1e3:.2f} ms a step, "
        f"busy {resident['busy']:.1%}"
    )
    need = per_s * ROW
    say(f"the model takes {need / 1e9:.2f} GB/s, the loader gives {rate / 1e9:.2f} GB/s")
    forget(folder)
    with Stretches() as told, Utilisation() as used:
        before = host_bytes()
        run = hr.fit(
            wide_model(width), folder, epochs=1, buffer="2GiB", out=scratch / f"run{width}", **options
        )
        found = told.busy(1)
    span = told.host_s[0], told.host_s[-1]
    inside = [v for t, v in used.values if span[0] + 1.5 < t < span[1]]
    say(f"busy {found['busy']:.1%} of {found['seconds']:.1f} s after the first buffer, largest gap "
        f"{found['largest_gap_ms']:.2f} ms, between buffers {found['between_buffers_ms']:.2f} ms")  # fmt: skip
    found["utilisation"] = float(np.mean(inside)) if inside else 0.0
    found["against_resident"] = found["rows_per_s"] / per_s
    waits = [row["wait_s"] for row in run.metrics if row["kind"] == "train"]
    say(
        {k: round(v, 4) for k, v in found.items()},
        "host waited",
        round(waits[-1], 3),
        "s, host grew",
        round((host_bytes() - before) / 1e9, 2),
    )
    say(
        "capture:",
        run.plan["capture"],
        "| residence:",
        run.plan["residence"],
        "| direct:",
        run.plan["direct_io"],
        "| buffers:",
        run.plan["buffers"],
    )
    return found


# ---------------------------------------------------------------------- rounds


def digits(scratch: Path, rows: int) -> tuple[Path, Any]:
    """MNIST, every digit many times at random places of three noisy 32×32 channels."""
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "mnist.npz") as archive:
        train = (
            torch.from_numpy(archive["x_train"]).cuda(),
            torch.from_numpy(archive["y_train"]).long().cuda(),
        )
        test = torch.from_numpy(archive["x_test"]).cuda(), torch.from_numpy(archive["y_test"]).long().cuda()
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(x: torch.Tensor, count: int) -> torch.Tensor:
        out = torch.randint(0, 128, (count, 3, 32, 32), dtype=torch.uint8, device="cuda", generator=generator)
        dx, dy = torch.randint(0, 5, (2,), device="cuda", generator=generator).tolist()
        out[:, :, dy : dy + 28, dx : dx + 28] += x[:, None] // 2
        return out.flatten(1)

    which = torch.randint(0, len(train[0]), (rows,), device="cuda", generator=generator)
    x = np.empty((rows, ROW), np.uint8)
    for first in range(0, rows, 8192):
        part = which[first : first + 8192]
        x[first : first + 8192] = drawn(train[0][part], len(part)).cpu().numpy()
    held = torch.cat([drawn(part, len(part)) for part in test[0].split(500)]).cpu(), test[1].cpu()
    return save_cold(scratch / "digits", x=x, y=train[1][which].cpu().numpy()), held


def forest(scratch: Path, rows: int) -> tuple[Path, Any]:
    """Forest cover types, standardised, repeated with a little noise on every number."""
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "covtype.npz") as archive:
        x = torch.from_numpy(archive["X"]).float().cuda()
        y = torch.from_numpy(archive["y"]).long().cuda()
    y = y - y.min()
    generator = torch.Generator("cuda").manual_seed(0)
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)
    order = torch.randperm(len(x), device="cuda", generator=generator)
    test, train = order[:50_000], order[50_000:]
    which = train[torch.randint(0, len(train), (rows,), device="cuda", generator=generator)]
    noise = torch.randn(rows, 54, device="cuda", generator=generator)
    folder = save_cold(
        scratch / "forest", x=(x[which] + 0.05 * noise).cpu().numpy(), y=y[which].cpu().numpy()
    )
    return folder, (x[test].cpu(), y[test].cpu())


def race(name: str, folder: Path, held: Any, model: Any, passes: int, **options: Any) -> dict[str, Any]:
    """How long ``rounds="auto"`` takes to the loss with which ``rounds=1`` ends."""
    shared: dict[str, Any] = {
        "optimizer": "sgd", "schedule": "constant", "capture": "graph", "progress": False, "seed": 0,
        "device": "cuda", "workers": "single", "validation": held, **options,
    }  # fmt: skip
    curves = {}
    for rounds in (1, "auto"):
        run = hr.fit(model(), folder, rounds=rounds, epochs=passes, **shared)
        curves[rounds] = [
            (row["seconds"], row["validation_loss"], row["validation_accuracy"], row["step"])
            for row in run.metrics if row["kind"] == "epoch"
        ]  # fmt: skip
        taken = [row["rounds"] for row in run.metrics if row["kind"] == "train"]
        say(
            f"  {name}, rounds={rounds}: R {min(taken)} to {max(taken)} (mean {np.mean(taken):.1f}); "
            "(s, loss, accuracy, step)",
            [tuple(round(v, 3) for v in point) for point in curves[rounds][:: max(1, passes // 6)]],
        )
    target = min(point[1] for point in curves[1])
    slow = next(s for s, loss, *_ in curves[1] if loss <= target)
    fast = next((s for s, loss, *_ in curves["auto"] if loss <= target), None)
    ratio = f"{slow / fast:.2f} ×" if fast else "never"
    say(
        f"{name}: loss {target:.4f} after {slow:.2f} s with R=1, {fast and round(fast, 2)} s with auto: {ratio}"
    )
    return {"curves": {str(k): v for k, v in curves.items()}, "target": target, "slow": slow, "fast": fast}


def mlp(*widths: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def rounds(scratch: Path, gigabytes: float, passes: int, results: dict[str, Any]) -> None:
    """The races, each on its own: what fails is told and the next begins."""

    def on_digits() -> None:
        folder, held = digits(scratch, int(gigabytes * 1e9 / ROW))
        results["digits"] = race(
            "digits, MLP 3072-256-10, batch 1024", folder, held, lambda: mlp(ROW, 256, 10), passes,
            batch_size=1024, lr=0.01, buffer="128MiB",
        )  # fmt: skip

    def on_forest() -> None:
        folder, held = forest(scratch, int(gigabytes * 1e9 / 216))
        results["forest"] = race(
            "forest, MLP 54-256-7, batch 4096", folder, held, lambda: mlp(54, 256, 7), passes,
            batch_size=4096, lr=0.05, buffer="128MiB",
        )  # fmt: skip

    def on_a_slow_model() -> None:
        folder, held = digits(scratch, int(gigabytes * 1e9 / ROW))
        results["slow model"] = race(
            "digits, a model slower than the disk", folder, held, lambda: wide_model(3072), max(2, passes // 4),
            batch_size=1024, lr=0.01, buffer="128MiB",
        )  # fmt: skip

    for attempt in (on_digits, on_forest, on_a_slow_model):
        began = time.perf_counter()
        tried(attempt)
        say(f"  ({time.perf_counter() - began:.1f} s)")


def tried(part: Callable[[], None]) -> None:
    """Run a part of the benchmark; what fails is told and leaves the others."""
    try:
        part()
    except Exception as error:
        traceback.print_exc()
        say(f"failed: {error}")


def read_past_the_page_cache() -> None:
    """Files of this benchmark stand for ones beyond memory."""
    usual = wiring.choose_direct

    def choose(source: Any, options: Any) -> tuple[bool, str]:
        return (True, "as beyond memory") if options.direct == "auto" else usual(source, options)

    wiring.choose_direct = choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--gigabytes", type=float, default=None, help="20, or 6 with --quick")
    parser.add_argument(
        "--write-s", type=float, default=60.0, help="write less than asked for if it takes longer"
    )
    parser.add_argument("--quick", action="store_true", help="about 40 s, writing included")
    parser.add_argument("--only", nargs="*", default=["speed", "busy", "rounds"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--width", type=int, nargs="*", default=[3072])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    quick = options.quick
    gigabytes = options.gigabytes or (6.0 if quick else 20.0)
    repeats, seconds = (1, 2.0) if quick else (options.repeats, options.seconds)
    read_past_the_page_cache()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        scratch, results = Path(place), {}
        big = scratch / "big"
        torch.zeros(1, device="cuda")
        say(torch.cuda.get_device_name(), "torch", torch.__version__, "cores", len(os.sched_getaffinity(0)))

        def write_big() -> None:
            big.mkdir()
            began = time.perf_counter()
            count = write_rows(big / "x.npy", int(gigabytes * 1e9), options.write_s)
            save_cold(big, y=np.arange(count) % 10)
            say(f"{count} rows, {count * ROW / 1e9:.1f} GB written in {time.perf_counter() - began:.1f} s")

        def run_speed() -> None:
            link()
            results["speed"] = speed(big, repeats, seconds, quick=quick)

        def run_busy() -> None:
            sides = results.get("speed", {}).get("sides", {})
            for width in options.width:
                rate = sides.get("to the device", {}).get("rate", 0.0)
                results[f"busy {width}"] = busy(big, scratch, width, rate, quick=quick)

        def run_rounds() -> None:
            results["rounds"] = {}
            rounds(scratch, 0.5 if quick else 1.5, 8 if quick else 14, results["rounds"])

        parts = {"speed": run_speed, "busy": run_busy, "rounds": run_rounds}
        if {"speed", "busy"} & set(options.only):
            tried(write_big)
        for name in options.only:
            began = time.perf_counter()
            tried(parts[name])
            say(f"{name}: {time.perf_counter() - began:.1f} s in all")
        if options.out:
            options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
