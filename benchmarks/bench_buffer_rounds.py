"""Does using a buffer several times pay when the disk is slower than the model, without any accelerator?

Command: ``HEADRACE_DATA=data python benchmarks/bench_buffer_rounds.py [--passes 8] [--slowness 6]``

The disk is **simulated**: files in memory behind fsspec, whose ranges come at a set rate (one shared queue, as a disk
has one head; readers sleep until their turn). The rate is set from the model's own: with ``--slowness 6`` a load takes
as long as six rounds on it. ``rounds=1`` trains for ``--passes``; ``rounds="auto"`` is measured until its loss on
held-out rows is the lowest that ``rounds=1`` has reached. A third side has a disk ten times faster than the model:
there "auto" stays near one round and nothing is to be gained.

MNIST (20,000 images; 784-128-10, batch 64) and forest cover types (20,000 rows; 54-128-7, batch 64), eight buffers a
pass, a constant step size.

Two shared cores beside seven other programs, torch 2.13, --slowness 6 (seconds hold the simulated disk's waits):

| data | disk | R taken | passes and steps, R=1 | the same, auto | R=1 / auto, seconds to the loss |
| MNIST | a load of 6 rounds | 1 to 10, mean 9.6 | 8, 2504 | 2, 5735 | 48.5 / 25.0: 1.9 × |
| forest | a load of 6 rounds | 1 to 10, mean 9.9 | 8, 2504 | 2, 5945 | 14.2 / 3.6: 4.0 × |
| MNIST | ten times the model's rate | 1 | 8, 2504 | 8, 2504 | the same steps |
| forest | ten times the model's rate | 1 to 5, mean 3.1 | 8, 2504 | 4, 3266 | 1.3 / 1.5: 0.85 × |

More than six rounds were taken where the neighbours made loads longer.
"""

from __future__ import annotations

import argparse
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import fsspec.implementations.memory
import numpy as np
import torch

import headrace as hr
from headrace.buffer import cook

ROWS, HELD = 20_000, 5_000


class Throttled(fsspec.implementations.memory.MemoryFileSystem):
    """Files in memory, read at ``rate`` bytes per second by all readers together."""

    protocol = "throttled"
    rate = float("inf")
    lock = threading.Lock()
    free_s = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("throttled://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        found: bytes = super().cat_file(path, start=start, end=end, **options)
        with Throttled.lock:
            until = max(time.perf_counter(), Throttled.free_s) + len(found) / Throttled.rate
            Throttled.free_s = until
        time.sleep(max(0.0, until - time.perf_counter()))
        return found


def data(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows to train on and rows held out."""
    folder = Path(os.environ["HEADRACE_DATA"])
    if name == "MNIST":
        with np.load(folder / "mnist.npz") as archive:
            x, y = archive["x_train"].reshape(-1, 784), archive["y_train"].astype(np.int64)
            x = x.astype(np.float32) / 255
    else:
        with np.load(folder / "covtype.npz") as archive:
            x, y = archive["X"].astype(np.float32), archive["y"].astype(np.int64)
        x, y = (x - x.mean(0)) / np.maximum(x.std(0), 1e-6), y - y.min()
    order = np.random.default_rng(0).permutation(len(x))[: ROWS + HELD]
    return x[order[:ROWS]], y[order[:ROWS]], x[order[ROWS:]], y[order[ROWS:]]


def publish(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """The columns as .npy files in memory; the URL."""
    files = fsspec.filesystem("throttled")
    for column, values in (("x", x), ("y", y)):
        written = io.BytesIO()
        np.save(written, values)
        files.pipe(f"/{name}/{column}.npy", written.getvalue())
    return f"throttled:///{name}"


def model(width: int, classes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 128), torch.nn.ReLU(), torch.nn.Linear(128, classes))


def race(name: str, passes: int, slowness: float) -> None:
    x, y, held_x, held_y = data(name)
    url, row = publish(name, x, y), x[0].nbytes + 8
    shared: dict[str, Any] = {
        "optimizer": "sgd", "lr": 0.05, "batch_size": 64, "progress": False, "workers": "single", "device": "cpu",
        "validation": (held_x, held_y), "deterministic": True, "tensorboard": False,
    }  # fmt: skip
    classes = int(y.max()) + 1
    Throttled.rate = float("inf")
    probe = hr.fit(model(x.shape[1], classes), (x, y), epochs=2, **shared)
    rates = [row_["examples_per_s"] for row_ in probe.metrics if row_["kind"] == "train"]
    Throttled.rate = float(np.median(rates)) * row / slowness
    print(f"{name}: the model takes {np.median(rates) * row / 1e6:.0f} MB/s, the disk gives {Throttled.rate / 1e6:.0f}",
          flush=True)  # fmt: skip
    curves = {}
    for rounds in (1, "auto"):
        target = min(point[1] for point in curves[1]) if 1 in curves else None
        run = hr.fit(
            model(x.shape[1], classes), url, rounds=rounds, buffer=ROWS // 8 * row, epochs=passes,
            target_loss=target, **shared,
        )  # fmt: skip
        curves[rounds] = [
            (r["seconds"], r["validation_loss"], r["validation_accuracy"], r["step"])
            for r in run.metrics if r["kind"] in ("epoch", "end")
        ]  # fmt: skip
        taken = [r["rounds"] for r in run.metrics if r["kind"] == "train"]
        waited = next(str(d.value) for d in run.plan.decisions if d.name == "waited")
        print(
            f"  rounds={rounds}: R {min(taken)} to {max(taken)} (mean {np.mean(taken):.1f}), waited {waited} of the "
            f"time; {len(curves[rounds])} passes, {curves[rounds][-1][3]} steps, {curves[rounds][-1][0]:.1f} s, "
            f"loss {curves[rounds][-1][1]:.4f}, accuracy {curves[rounds][-1][2]:.4f}",
            flush=True,
        )
    target = min(loss for _, loss, *_ in curves[1])
    slow = next(s for s, loss, *_ in curves[1] if loss <= target)
    fast = next((s for s, loss, *_ in curves["auto"] if loss <= target), None)
    told = (
        f"{fast:.1f} s with auto: {slow / fast:.2f} × as fast" if fast else "never with auto: it does not pay"
    )
    print(
        f"{name}, a load of {slowness:g} rounds: loss {target:.4f} after {slow:.1f} s with R=1, {told}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--slowness", type=float, default=6.0)
    parser.add_argument("--only", nargs="*", default=["MNIST", "forest"])
    options = parser.parse_args()
    cook.KEPT_BYTES = 0  # columns stand for ones beyond memory: none is small enough to be kept whole
    fsspec.register_implementation("throttled", Throttled, clobber=True)
    for name in options.only:
        race(name, options.passes, options.slowness)
    race(options.only[0], options.passes, 0.1)


if __name__ == "__main__":
    main()
