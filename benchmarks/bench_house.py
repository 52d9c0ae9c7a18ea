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

Measured on a virtual machine with two cores of an AMD Zen 5 with AVX-512, otherwise idle; Python 3.11.7, torch
2.13.0+cpu; usual loop / fit in wall time, so above 1 `fit` is faster; two rounds:

    batch                1      16      64     256    1024
    network           1.80    1.67    1.87    2.18    2.21
    LeNet             1.94    1.16    1.22    1.44    1.77    (again: 1.92, 1.13, 1.22, 1.43, 1.31; batch 4, 8 and 32:
                                                               1.53, 1.26 and 1.14)

By processor time on one core, under a load of 6 to 30: the network 1.77 to 2.24, LeNet at batch 8 and 32 0.96 to 1.14.
Overhead, inside recording and saving: 0.7 % for the network, 1.6 % for LeNet, with a row every 5 to 15 updates; paired
runs say -0.7 and +5.0 %, with single pairs from -2 to +14 %, so they tell nothing finer. import headrace 0.018 s,
headrace --help 0.12 s, the interpreter alone 0.008 s.

One H200 with 16 cores, torch 2.11, batch 64, ``--quick --only gpu``; the usual loop is a DataLoader with 8 workers and
pinned memory, 2.03 ms a step of LeNet and 1.55 ms of the network. Accuracies of both sides agree to 0.003.

                    LeNet                   network
    graph           0.230 ms    8.8 x       0.134 ms   11.6 x
    graph, tf32     0.201 ms   10.1 x       0.098 ms   15.7 x
    compiled        0.183 ms   11.1 x       not measured        (capture="compile": compiled, then captured)

LeNet's first two rows are from a later run than the loop that they are compared with.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
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
    """Processor time of all threads of the process, with one thread for the step, two ways.

    Paired: a run with a folder and one without take turns; of each the longer less the shorter counts, so that
    what is done once (imports, the report) drops out; the median of the pairs. On a busy machine this has a noise of
    several percent. Inside: the calls by which training hands something over, each by the clock of its own thread,
    and all of the recorder's thread, as a share of the same run; other programs hardly change that one.
    """
    found: list[Result] = []
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        for case, updates in ((mlp_case(64, 1.0), 1000), (lenet_case(64, 1.0), 400)):
            updates = max(200, int(updates * scale))
            inside, calls = time_inside(case, updates)
            shares = [paired(case, updates, swapped=pair % 2 == 1) for pair in range(rounds + 1)]
            share = statistics.median(shares)
            print(
                f"{case.name:8} inside recording and saving {inside:.2%} ({calls} calls in {2 * updates} updates); "
                f"paired {share:+.1%}, pairs {min(shares):+.1%} to {max(shares):+.1%}",
                flush=True,
            )
            found.append({"case": case.name, "paired": share, "inside": inside})
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def paired(case: Case, updates: int, *, swapped: bool) -> float:
    """How much more processor time the updates take in a run with a folder, as a share."""
    taken: dict[Callable[[Case, int], object], float] = {}
    for side in [fit_with_nothing, fit_with_folder][:: -1 if swapped else 1]:
        times = []
        for n in (updates, 3 * updates):
            begun = time.process_time()
            side(case, n)
            times.append(time.process_time() - begun)
        taken[side] = times[1] - times[0]
    return taken[fit_with_folder] / taken[fit_with_nothing] - 1


def time_inside(case: Case, updates: int) -> tuple[float, int]:
    """The share of the processor time that recording takes of a longer run less a shorter one, and its calls."""
    fit_with_folder(case, 50)  # imports and first allocations
    runs = [clocked_run(case, n) for n in (updates, 3 * updates)]
    inside, whole, calls = (b - a for a, b in zip(*runs, strict=True))
    return inside / whole, int(calls)


def clocked_run(case: Case, updates: int) -> tuple[float, float, float]:
    """Seconds inside recording and saving, seconds of the whole run, calls."""
    from headrace.engine import checkpoint
    from headrace.engine.records import Records
    from headrace.report.progress import Progress

    spent, calls, depth = [0.0], [0], [0]

    def clocked(function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            begun = time.thread_time()
            depth[0] += 1
            try:
                return function(*given, **named)
            finally:
                depth[0] -= 1
                if depth[0] == 0:
                    spent[0] += time.thread_time() - begun
                    calls[0] += 1

        return call

    places = [(Records, name) for name in ("metrics", "span", "counter", "instant", "flush")]
    places += [(Progress, "update"), (checkpoint, "save_checkpoint")]
    kept = [getattr(*place) for place in places]
    for (owner, name), function in zip(places, kept, strict=True):
        setattr(owner, name, clocked(function))
    try:
        begun, mine = time.process_time(), time.thread_time()
        fit_with_folder(case, updates)
        whole, own = time.process_time() - begun, time.thread_time() - mine
    finally:
        for (owner, name), function in zip(places, kept, strict=True):
            setattr(owner, name, function)
    return spent[0] + max(0.0, whole - own), whole, float(calls[0])


def fit_with_nothing(case: Case, updates: int, **options: object) -> object:
    every = {"lr": LR, "batch_size": case.batch_size, "steps": updates, "progress": False, "log_every": 10**6}
    return hr.fit(case.model(), (case.x, case.y), loss="cross_entropy", **{**every, **options})


def fit_with_folder(case: Case, updates: int) -> object:
    """Everything that is written by default."""
    with tempfile.TemporaryDirectory() as folder:
        return fit_with_nothing(case, updates, out=f"{folder}/run", log_every=None)


LR_ON_GPU = 0.05
QUICK_S = 22
EPOCHS_ON_GPU = 3
"""The first of them warms up, and both sides take all, for the accuracy."""


def gpu(rounds: int, scale: float) -> list[Result]:
    """Milliseconds a step and accuracy of each side, printed as soon as it is known; a side that fails is told."""
    if not torch.cuda.is_available():
        print("no CUDA device: not run")
        return []
    begun = time.perf_counter()
    cases = cases_on_gpu()
    print(f"{torch.cuda.get_device_name()}, data ready after {time.perf_counter() - begun:.1f} s", flush=True)
    found: list[Result] = []
    rates: dict[tuple[str, str], float] = {}
    # In the order in which the numbers matter: a run that is cut short has the first ones.
    sides: list[tuple[str, str, Callable[[Case], tuple[float, nn.Module, str]]]] = [
        ("lenet", "fit", headrace_on_gpu),
        ("mlp", "fit", headrace_on_gpu),
        ("lenet", "usual loop", usual_loop_on_gpu),
        ("mlp", "usual loop", usual_loop_on_gpu),
        ("lenet", "fit, tf32", lambda case: headrace_on_gpu(case, precision="tf32")),
        ("mlp", "fit, tf32", lambda case: headrace_on_gpu(case, precision="tf32")),
        ("lenet", "fit, compiled", lambda case: headrace_on_gpu(case, capture="compile")),
        ("mlp", "fit, compiled", lambda case: headrace_on_gpu(case, capture="compile")),
    ]
    for _ in range(rounds):
        for name, side, train in sides:
            case, test = cases[name]
            if scale < 1 and time.perf_counter() - begun > QUICK_S:
                print(
                    f"{name:6} {side:14} left out: --quick begins nothing new after {QUICK_S} s", flush=True
                )
                continue
            try:
                rate, model, how = train(case)
                correct = accuracy(model, *test)
            except Exception:
                print(f"{name:6} {side:14} failed:\n{traceback.format_exc()}", flush=True)
                continue
            best = rates[name, side] = max(rate, rates.get((name, side), 0.0))
            ms = 1e3 * case.batch_size / best
            print(
                f"{name:6} {side:14} {ms:.3f} ms a step{against(rates, name, side)}, accuracy {correct:.4f}, "
                f"{how} [{time.perf_counter() - begun:.0f} s]",
                flush=True,
            )
            found.append({"case": name, "side": side, "ms": ms, "accuracy": correct})
    return found


def against(rates: dict[tuple[str, str], float], name: str, side: str) -> str:
    """How many times the usual loop's examples a second, or with that loop itself what `fit` has."""
    ours, theirs = rates.get((name, "fit")), rates.get((name, "usual loop"))
    if theirs is None or (side == "usual loop" and ours is None):
        return ""
    if side == "usual loop":
        return f"; fit {ours / theirs:.1f} x as fast per epoch"
    return f"; {rates[name, side] / theirs:.1f} x the usual loop per epoch"


def cases_on_gpu() -> dict[str, tuple[Case, tuple[Tensor, Tensor]]]:
    """LeNet on MNIST (digits without HEADRACE_DATA) and the network on random rows, with what to test on."""
    x, y, test_x, test_y = mnist() if "HEADRACE_DATA" in os.environ else digits(60_000)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(70_000, 54, generator=generator)
    sign = (rows[:, 0] + rows[:, 1] * rows[:, 2] > 0).long()
    flat, held = (rows[:60_000], sign[:60_000]), (rows[60_000:], sign[60_000:])
    common = {"batch_size": 64, "updates": 938}
    return {
        "lenet": (Case(name="lenet", make=lenet, x=x, y=y, **common), (test_x, test_y)),
        "mlp": (Case(name="mlp", make=network, x=flat[0], y=flat[1], **common), held),
    }


def headrace_on_gpu(case: Case, **options: str) -> tuple[float, nn.Module, str]:
    """Examples per second over the epochs after the first, the model, and how its step was captured."""
    run = hr.fit(
        case.model(),
        (case.x, case.y),
        loss="cross_entropy",
        lr=LR_ON_GPU,
        batch_size=case.batch_size,
        epochs=EPOCHS_ON_GPU,
        device="cuda",
        progress=False,
        **options,
    )
    ends = [row for row in run.metrics if row["kind"] == "epoch"]
    rate = (ends[-1]["examples"] - ends[0]["examples"]) / (ends[-1]["seconds"] - ends[0]["seconds"])
    return rate, run.model, f"{run.plan['capture']}, first epoch {ends[0]['seconds']:.1f} s"


def usual_loop_on_gpu(case: Case) -> tuple[float, nn.Module, str]:
    model = case.model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR_ON_GPU)
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
    rate = (EPOCHS_ON_GPU - 1) * len(case.x) / (time.perf_counter() - begun)
    return rate, model, "8 workers, pinned"


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model = copy.deepcopy(model).cpu().eval()
    with torch.inference_mode():
        return float(torch.cat([model(part).argmax(1) for part in x.split(1000)]).eq(y).float().mean())


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
