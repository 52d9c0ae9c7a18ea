"""Is `headrace.fit` ever slower than the loop that everybody writes, and what does the house cost?

    python benchmarks/bench_house.py [--quick] [--only steps one-core start overhead gpu] [--rounds N]

- steps: `fit` against the usual loop, a shuffling `DataLoader` over a `TensorDataset` with autograd and
  `torch.optim.SGD`, without workers and with as many as there are cores; the faster of the two counts. The
  54-512-512-512-2 network on random rows and a LeNet on images of MNIST's shape, batch by batch.
- one-core: the same two sides by processor time on one core, for machines that are never quiet.
- start: `import headrace` and `headrace --help`, beside the interpreter's own start.
- overhead: `fit` with a run folder (metrics, timeline, TensorBoard, checkpoints) against `fit` without, in
  processor time per update.
- gpu: on a CUDA device, milliseconds a step of LeNet and of the network at batch 64 against a `DataLoader`
  with 8 workers, and the accuracy that both reach.

Sides take turns, and the best sixtieth of each counts: other programs only ever make one slower. Both begin
with the same weights, batch size, step size and number of updates; the losses that they end with are printed,
since a faster loop that learns less would win nothing. Times begin after the first third of the updates.

Measured on a virtual machine with two cores of an AVX-512 processor, shared with other work; Python 3.11.7,
torch 2.13.0+cpu; usual loop / fit, so above 1 `fit` is faster. Two cores: `--only steps`, the machine nearly
quiet, 2 rounds; LeNet before its layout was planned. One core: `--only one-core`, load 15 to 25, 3 rounds.

    batch                1      16      64     256    1024
    network, 2 cores  3.34    1.60    1.39    1.34    1.39
    network, 1 core   3.00    1.75    1.66    1.45    1.24
    LeNet, 2 cores    0.87    1.11    1.08    1.09    1.37
    LeNet, 1 core     1.15    1.00  not measured

The overhead has not been told from noise yet: -6 % on the network, +15 % on LeNet, under the load above.
import headrace 0.035 s, headrace --help 0.19 s, the interpreter alone 0.02 s. The GPU part has not been run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr

CORES = len(os.sched_getaffinity(0))
LR = 0.01
WINDOWS = 60
"""Parts of a run that are timed one by one."""
Result = dict[str, float | str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one set of rows."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch_size: int
    updates: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


def network() -> nn.Module:
    widths = (54, 512, 512, 512, 2)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def digits(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits at MNIST's size, repeated with noise to so many rows; every tenth image is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).div_(16)[:, None]
    images = nn.functional.interpolate(images, size=(28, 28), mode="bilinear")
    labels = torch.tensor(found.target)
    held = torch.arange(len(images)) % 10 == 0
    train_x, train_y = images[~held], labels[~held]
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(0, len(train_x), (rows,), generator=generator)
    noise = torch.randn(rows, 1, 28, 28, generator=generator) * 0.05
    return train_x[pick] + noise, train_y[pick], images[held], labels[held]


def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MNIST as floats in [0, 1], from ``HEADRACE_DATA``: training rows and labels, test rows and labels."""
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "mnist.npz", allow_pickle=False) as held:
        parts = [torch.from_numpy(held[key]) for key in ("x_train", "y_train", "x_test", "y_test")]
    images = [(part[:, None].float() / 255) for part in (parts[0], parts[2])]
    return images[0], parts[1].long(), images[1], parts[3].long()


def mlp_case(batch_size: int, scale: float) -> Case:
    generator = torch.Generator().manual_seed(0)
    updates = max(60, int(scale * {1: 1500, 16: 1200, 64: 900, 256: 240, 1024: 90}[batch_size]))
    rows = max(4096, min(65536, updates * batch_size // 3))
    x = torch.randn(rows, 54, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Case(name="mlp", make=network, x=x, y=y, batch_size=batch_size, updates=updates)


def lenet_case(batch_size: int, scale: float) -> Case:
    updates = max(30, int(scale * {1: 1000, 16: 480, 64: 240, 256: 90, 1024: 30}[batch_size]))
    rows = max(2048, min(16384, updates * batch_size // 3))
    x, y, _, _ = digits(rows)
    return Case(name="lenet", make=lenet, x=x, y=y, batch_size=batch_size, updates=updates)


# ---- the two sides


def by_headrace(case: Case, **options: object) -> tuple[float, float, str]:
    """(examples per second of the best window, last losses' mean, how the step was captured)."""
    model = case.model()
    run = hr.fit(
        model,
        (case.x, case.y),
        loss="cross_entropy",
        lr=LR,
        batch_size=case.batch_size,
        steps=case.updates,
        progress=False,
        log_every=max(1, case.updates // WINDOWS),
        **options,
    )
    rows = [row for row in run.metrics if row["kind"] == "train"]
    ends = [(row["seconds"], row["examples"]) for row in rows if row["step"] >= case.updates / 3]
    last = rows[-len(rows) // 5 :]
    return best_window(ends), sum(row["loss"] for row in last) / len(last), str(run.plan["capture"])


def by_usual_loop(case: Case, workers: int) -> tuple[float, float]:
    """(examples per second of the best window, last losses' mean)."""
    torch.set_num_threads(CORES)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(
        TensorDataset(case.x, case.y),
        batch_size=case.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    losses: list[float] = []
    ends: list[tuple[float, int]] = []
    examples, window = 0, max(1, case.updates // WINDOWS)
    for update, (x, y) in enumerate(endless(loader), 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        examples += len(y)
        if update > case.updates * 4 // 5:
            losses.append(loss.item())
        if update % window == 0 and update >= case.updates / 3:
            ends.append((time.perf_counter(), examples))
        if update == case.updates:
            break
    return best_window(ends), sum(losses) / len(losses)


def best_window(ends: list[tuple[float, int]]) -> float:
    """The highest rate between two neighbours of (seconds, examples so far)."""
    return max((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(ends) if b[1] > a[1])


def endless(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    while True:
        yield from loader


# ---- the questions


def steps(rounds: int, scale: float, only: str = "") -> list[Result]:
    print(f"{'case':8}{'batch':>6}{'usual/s':>11}{'workers':>11}{'fit/s':>11}{'ratio':>8}   losses, capture")
    found: list[Result] = []
    for make in (mlp_case, lenet_case):
        if only and not make.__name__.startswith(only):
            continue
        for batch_size in (1, 16, 64, 256, 1024):
            case = make(batch_size, scale)
            plain = working = ours = 0.0
            for _ in range(rounds):
                rate, our_loss, capture = by_headrace(case)
                ours = max(ours, rate)
                rate, their_loss = by_usual_loop(case, 0)
                plain = max(plain, rate)
            if batch_size >= 64:  # at smaller batches the workers' queue costs far more than it hides
                working = by_usual_loop(case, CORES)[0]
            ratio = ours / max(plain, working)
            print(
                f"{case.name:8}{batch_size:6}{plain:11.0f}{working:11.0f}{ours:11.0f}{ratio:8.2f}"
                f"   {our_loss:.4f} {their_loss:.4f} {capture}",
                flush=True,
            )
            found.append({"case": case.name, "batch": batch_size, "usual": max(plain, working), "fit": ours})
    return found


def one_core(rounds: int, scale: float) -> list[Result]:
    """Processor time of the training thread, which other programs hardly disturb, with one thread on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    torch.set_num_threads(1)
    print(f"{'case':8}{'batch':>6}{'usual, µs':>11}{'fit, µs':>11}{'ratio':>8}")
    found: list[Result] = []
    try:
        for make in (mlp_case, lenet_case):
            for batch_size in (1, 16, 64, 256, 1024):
                case = make(batch_size, scale)
                short = max(4, case.updates // 10)
                ours = seconds_per_update(fit_quietly, case, short, rounds)
                theirs = seconds_per_update(usual_quietly, case, short, rounds)
                name = f"{case.name:8}{batch_size:6}"
                print(f"{name}{theirs * 1e6:11.0f}{ours * 1e6:11.0f}{theirs / ours:8.2f}", flush=True)
                found.append({"case": case.name, "batch": batch_size, "usual_s": theirs, "fit_s": ours})
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def seconds_per_update(
    train: Callable[[Case, int], object],
    case: Case,
    updates: int,
    rounds: int,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """The difference between a long and a short training, so that what is done once drops out."""
    train(case, 2)  # imports and first allocations
    best = {updates: float("inf"), 5 * updates: float("inf")}
    for _ in range(rounds):
        for n in best:
            begun = clock()
            train(case, n)
            best[n] = min(best[n], clock() - begun)
    return (best[5 * updates] - best[updates]) / (4 * updates)


def fit_quietly(case: Case, updates: int) -> object:
    options = {"lr": LR, "batch_size": case.batch_size, "steps": updates, "progress": False}
    return hr.fit(case.model(), (case.x, case.y), loss="cross_entropy", log_every=updates, **options)


def usual_quietly(case: Case, updates: int) -> object:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=case.batch_size, shuffle=True)
    for x, y in itertools.islice(endless(loader), updates):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def start(rounds: int, scale: float) -> list[Result]:
    found: list[Result] = []
    for name, arguments in {
        "python -c pass": ["-c", "pass"],
        "import headrace": ["-c", "import headrace"],
        "headrace --help": ["-m", "headrace", "--help"],
        "import torch": ["-c", "import torch"],
    }.items():
        wall, processor = (
            min(times) for times in zip(*(run_seconds(arguments) for _ in range(2 * rounds)), strict=True)
        )
        print(f"{name:20}{wall:8.3f} s, {processor:.3f} s of processor time", flush=True)
        found.append({"case": name, "seconds": wall, "processor_s": processor})
    return found


def run_seconds(arguments: list[str]) -> tuple[float, float]:
    """Time on the wall and of the processor."""
    begun, used = time.perf_counter(), children_s()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun, children_s() - used


def children_s() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def overhead(rounds: int, scale: float) -> list[Result]:
    """Processor time of all threads of the process, with one thread for the step."""
    found: list[Result] = []
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        for case, updates in ((mlp_case(64, 1.0), 400), (lenet_case(64, 1.0), 80)):
            times = [
                seconds_per_update(side, case, max(4, int(updates * scale)), rounds, time.process_time)
                for side in (fit_with_nothing, fit_with_folder)
            ]
            share = times[1] / times[0] - 1
            print(
                f"{case.name:8}{times[0] * 1e6:9.0f} µs, with a folder {times[1] * 1e6:9.0f} µs: {share:+.1%}"
            )
            found.append({"case": case.name, "bare_s": times[0], "full_s": times[1]})
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def fit_with_nothing(case: Case, updates: int, **options: object) -> object:
    every = {"lr": LR, "batch_size": case.batch_size, "steps": updates, "progress": False, "log_every": 10**6}
    return hr.fit(case.model(), (case.x, case.y), loss="cross_entropy", **{**every, **options})


def fit_with_folder(case: Case, updates: int) -> object:
    """Everything that is written by default, and a checkpoint as often as the engine lets itself."""
    with tempfile.TemporaryDirectory() as folder:
        return fit_with_nothing(case, updates, out=f"{folder}/run", checkpoint_s=0.0, log_every=None)


def gpu(rounds: int, scale: float) -> list[Result]:
    if not torch.cuda.is_available():
        print("no CUDA device: not run")
        return []
    x, y, test_x, test_y = mnist() if "HEADRACE_DATA" in os.environ else digits(60_000)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(60_000, 54, generator=generator)
    sign = (flat[:, 0] * flat[:, 1] > 0).long()
    cases = [
        (Case(name="lenet", make=lenet, x=x, y=y, batch_size=64, updates=938), (test_x, test_y)),
        (
            Case(name="mlp", make=network, x=flat, y=sign, batch_size=64, updates=938),
            (flat[:2000], sign[:2000]),
        ),
    ]
    found: list[Result] = []
    for case, test in cases:
        best: dict[str, float] = {}
        correct: dict[str, float] = {}
        for _ in range(rounds):
            for name, side in SIDES_ON_GPU.items():
                rate, model = side(case)
                best[name] = max(best.get(name, 0.0), rate)
                correct[name] = accuracy(model, *test)
        for name, rate in best.items():
            ms, ratio = 1e3 * case.batch_size / rate, rate / best["usual loop"]
            print(
                f"{case.name:6} {name:16} {ms:.3f} ms a step, {ratio:5.1f} x the usual loop, "
                f"accuracy {correct[name]:.4f}",
                flush=True,
            )
            found.append({"case": case.name, "side": name, "ms": ms, "accuracy": correct[name]})
    return found


EPOCHS_ON_GPU = 5


def headrace_on_gpu(case: Case, **options: str) -> tuple[float, nn.Module]:
    """Examples per second over the epochs after the first, and the model."""
    run = hr.fit(
        case.model(),
        (case.x, case.y),
        loss="cross_entropy",
        lr=LR,
        batch_size=case.batch_size,
        epochs=EPOCHS_ON_GPU,
        device="cuda",
        progress=False,
        **options,
    )
    ends = [row for row in run.metrics if row["kind"] == "epoch"]
    rate = (ends[-1]["examples"] - ends[0]["examples"]) / (ends[-1]["seconds"] - ends[0]["seconds"])
    return rate, run.model


def usual_loop_on_gpu(case: Case) -> tuple[float, nn.Module]:
    model = case.model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(
        TensorDataset(case.x, case.y),
        batch_size=case.batch_size,
        shuffle=True,
        num_workers=8,
        pin_memory=True,
        persistent_workers=True,
    )
    begun = 0.0
    for epoch in range(EPOCHS_ON_GPU):
        if epoch == 1:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
    torch.cuda.synchronize()
    return (EPOCHS_ON_GPU - 1) * len(case.x) / (time.perf_counter() - begun), model


SIDES_ON_GPU: dict[str, Callable[[Case], tuple[float, nn.Module]]] = {
    "usual loop": usual_loop_on_gpu,
    "fit": headrace_on_gpu,
    "fit, tf32": lambda case: headrace_on_gpu(case, precision="tf32"),
    "fit, compiled": lambda case: headrace_on_gpu(case, capture="compile"),
}


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model = copy.deepcopy(model).cpu().eval()
    with torch.inference_mode():
        return float((model(x).argmax(1) == y).float().mean())


QUESTIONS = {
    "steps": steps,
    "steps-mlp": lambda *sizes: steps(*sizes, only="mlp"),
    "steps-lenet": lambda *sizes: steps(*sizes, only="lenet"),
    "one-core": one_core,
    "start": start,
    "overhead": overhead,
    "gpu": gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="One round of fewer updates.")
    parser.add_argument(
        "--only", nargs="+", choices=QUESTIONS, default=["steps", "one-core", "start", "overhead", "gpu"]
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="Write the numbers to this file.")
    options = parser.parse_args()
    rounds, scale = (1, 0.3) if options.quick else (options.rounds, 1.0)
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {CORES} cores")
    found = {}
    for name in options.only:
        print(f"\n{name}")
        found[name] = QUESTIONS[name](rounds, scale)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
