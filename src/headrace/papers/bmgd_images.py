"""Buffered descent on images: what loading a buffer seldom and using it often saves, and what it costs.

Every schedule makes the same number of steps (20 rounds over the data) and differs in how often it loads. The
authors' schedule starts with many rounds on a load and ends with one; theirs for cats and dogs was 4 × 10, 4 × 5,
5 × 2 and 10 × 1, 23 loads for 80 rounds, of which ours is a quarter.

Times: a step takes what it takes on one core here (the median of a trial, in processor time); what a load takes is
measured where images are decoded, and set to four rounds of training where arrays lie in the page cache. From both,
`Clock` computes when each buffer is there and when it is used up, with two buffers and with none.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.engine.loader import Loader
from headrace.errors import DataError, HeadraceError
from headrace.papers import PaperOptions, find_data
from headrace.papers.image_sets import read_images
from headrace.report.page import Page, Series
from headrace.source import open_source
from headrace.source.images import ImageSource, Listing

Numbers = dict[str, Any]

BUFFERS = 8
ROUNDS = 20
LOAD_OVER_ROUND = 4
TRAIN, TEST = 6_000, 2_000
JPEGS = 2_400


@dataclass(frozen=True)
class Schedule:
    """Stages of (loads of all data, rounds on each buffer)."""

    name: str
    stages: tuple[tuple[int, int], ...]
    buffered: bool = True
    """False is plain descent: a batch is loaded, then used, and nothing overlaps."""

    @property
    def loads(self) -> int:
        return sum(loads for loads, _ in self.stages)


SCHEDULES = (
    Schedule("plain mini-batches", ((20, 1),), buffered=False),
    Schedule("20 × 1", ((20, 1),)),
    Schedule("10 × 2", ((10, 2),)),
    Schedule("4 × 5", ((4, 5),)),
    Schedule("2 × 10", ((2, 10),)),
    Schedule("the authors': 1×10, 1×5, 1×2, 3×1", ((1, 10), (1, 5), (1, 2), (3, 1))),
)


@dataclass
class Clock:
    """When what happens, from the time of a load and of training, with two buffers that overlap or with none."""

    load_s: float
    """Of one buffer."""
    overlap: bool
    ready_s: float = 0.0
    end_s: float = 0.0
    """When the buffer before was used up."""
    before_s: float = 0.0
    """When the one before that was: its memory takes the next load."""
    start_s: float = field(default=0.0, init=False)

    def take(self) -> None:
        """The next buffer is asked for; training on it begins at `start_s`."""
        if self.overlap:
            self.ready_s = max(self.ready_s, self.before_s) + self.load_s
        else:
            self.ready_s = self.end_s + self.load_s
        self.start_s = max(self.ready_s, self.end_s)

    def used(self, busy_s: float) -> None:
        """The buffer was trained on for so long."""
        self.before_s, self.end_s = self.end_s, self.start_s + busy_s


@dataclass(frozen=True)
class Images:
    """One data set: a source to train from, test images in memory, and a model."""

    name: str
    source: Any
    test: tuple[Tensor, Tensor]
    model: Callable[[], nn.Module]
    load_s: float | None = None
    """What a buffer's load took here; None where it is set from the time of a round."""


# ---------------------------------------------------------------------- data


def data_sets(scratch: Path) -> Iterator[tuple[str, Callable[[], Images]]]:
    """Every data set that can be had here, and how."""
    yield "MNIST", lambda: arrays(scratch, "MNIST", "mnist")
    yield "Fashion-MNIST", lambda: arrays(scratch, "Fashion-MNIST", "fashion-mnist")
    yield "CIFAR-10", lambda: arrays(scratch, "CIFAR-10", "cifar10")
    yield "JPEGs", lambda: jpegs(scratch)


def arrays(scratch: Path, name: str, stored: str) -> Images:
    """A set of `image_sets`; MNIST is replaced by scikit-learn's digits if need be."""
    try:
        found = read_images(stored)
        x, y = found.x[:TRAIN], found.y[:TRAIN]
        held = found.x_test[:TEST], found.y_test[:TEST]
    except DataError:
        if name != "MNIST":
            raise
        name, (x, y), held = "scikit-learn's 8×8 digits", *digits()
    folder = scratch / stored
    folder.mkdir()
    np.save(folder / "x.npy", channels_first(x))
    np.save(folder / "y.npy", y.astype(np.int64).ravel())
    test = torch.from_numpy(channels_first(held[0])), torch.from_numpy(held[1].astype(np.int64).ravel())
    shape = tuple(test[0].shape[1:])
    make = (lambda: dense(shape)) if shape[0] == 1 else (lambda: convolutions(shape))
    told = f"{name}, {len(x):,} images to train and {len(held[1]):,} to test"
    return Images(told, open_source(folder), test, make)


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The digits that scikit-learn brings, to train and to test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = (found.images * 15.9).astype(np.uint8)
    return (x[:-500], found.target[:-500]), (x[-500:], found.target[-500:])


def channels_first(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Images as n × channels × height × width."""
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.shape[-1] == 3 else x


def jpegs(scratch: Path) -> Images:
    """A folder of JPEGs, decoded anew at every load: ``jpegs`` in HEADRACE_DATA, else digits over photographs."""
    try:
        folder, told = find_data("jpegs"), "the JPEGs of HEADRACE_DATA"
    except DataError:
        folder, told = digits_over_photographs(scratch / "jpegs"), "JPEGs of digits over two photographs"
    source = open_source(folder, size=32, cache=False)
    assert isinstance(source, ImageSource)
    found = source.listing
    order = np.random.default_rng(0).permutation(len(found.paths))
    held = min(TEST, len(order) // 5)
    test = part_of(source, order[:held])
    train = part_of(source, order[held : held + JPEGS])
    values = test.read(range(len(test)))
    began = time.perf_counter()
    train.read(range(0, len(train) // BUFFERS))
    load_s = time.perf_counter() - began
    name = f"{told} at 32×32, {len(train):,} to train and {held:,} to test, decoded at every load"
    shape = tuple(values["x"].shape[1:])
    return Images(name, train, (values["x"], values["y"]), lambda: convolutions(shape), load_s)


def part_of(source: ImageSource, rows: np.ndarray[Any, Any]) -> ImageSource:
    """Some of a folder's images."""
    found = source.listing
    listing = Listing(
        found.folder, [found.paths[k] for k in rows], [found.labels[k] for k in rows], found.classes
    )
    part = ImageSource.__new__(ImageSource)
    part.__dict__.update(source.__dict__)
    part.listing, part._labels, part._all = listing, torch.tensor(listing.labels), None
    return part


def digits_over_photographs(folder: Path) -> Path:
    """Small colour JPEGs: scikit-learn's digits drawn over random crops of its two photographs."""
    from PIL import Image
    from sklearn.datasets import load_digits, load_sample_images

    random, found, photographs = np.random.default_rng(0), load_digits(), load_sample_images().images
    for k in range(3000):
        which = int(random.integers(len(found.images)))
        photograph = photographs[k % 2]
        top, left = (int(random.integers(size - 32)) for size in photograph.shape[:2])
        crop = photograph[top : top + 32, left : left + 32].astype(np.float32)
        drawn = np.kron(found.images[which], np.ones((4, 4))) / 16
        pixels = (crop * (1 - drawn[..., None]) + (255 - crop) * drawn[..., None]).astype(np.uint8)
        place = folder / str(found.target[which])
        place.mkdir(parents=True, exist_ok=True)
        written = io.BytesIO()
        Image.fromarray(pixels).save(written, "JPEG", quality=90)
        (place / f"{k:04d}.jpg").write_bytes(written.getvalue())
    return folder


# ---------------------------------------------------------------------- models and training


def dense(shape: tuple[int, ...]) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Two small convolutions and a linear layer."""
    flat = 32 * (-(-shape[1] // 4)) * (-(-shape[2] // 4))
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(flat, 10),
    )  # fmt: skip


def as_input(x: Tensor) -> Tensor:
    return x.float() / 255 - 0.5


class Training:
    """One run of a schedule: a model, its optimizer, the clock and the points."""

    def __init__(
        self, images: Images, schedule: Schedule, seed: int, *, load_s: float = 0.0, step_s: float = 0.0
    ) -> None:
        torch.manual_seed(seed)
        self.images, self.schedule, self.seed = images, schedule, seed
        self.model = images.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        per_round = -(-len(images.source) // 64)
        self.falling = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, ROUNDS * per_round)
        self.every = per_round
        # Plain descent shuffles all rows: one buffer holds them, and the clock says that nothing overlaps.
        self.rows = -(-len(images.source) // BUFFERS // 64) * 64
        parts = -(-len(images.source) // self.rows)
        self.clock = Clock(load_s * (1 if schedule.buffered else parts), overlap=schedule.buffered)
        self.step_s, self.used_s = step_s, 0.0
        self.steps, self.loads = 0, 0
        self.measured_s: list[float] = []
        """What each step took."""
        self.points: list[Numbers] = []

    def run(self, stop_after: int | None = None) -> list[Numbers]:
        """All stages; ``stop_after`` so many loads of a buffer, to measure what a round takes."""
        taken = 0
        for loads, rounds in self.schedule.stages:
            with self._loader(rounds) as loader:
                loader.set_epoch(self.loads)
                for _ in range(loads):
                    for buffer in loader.buffers():
                        taken += buffer.round == 0
                        self._buffer(loader, buffer)
                        if stop_after is not None and taken >= stop_after:
                            return self.points
                    self.loads += 1
        return self.points

    def _loader(self, rounds: int) -> Loader:
        source = self.images.source
        row = sum(c.dtype.itemsize * int(np.prod(c.shape)) for c in source.columns)
        rows = self.rows if self.schedule.buffered else -(-len(source) // 64) * 64
        return Loader(source, 64, buffer=rows * row, block=16, rounds=rounds, seed=self.seed, device="cpu")

    def _buffer(self, loader: Loader, buffer: Any) -> None:
        """Train on one round of a buffer."""
        if buffer.round == 0:
            self.clock.take()
            self.used_s = 0.0
        for start, stop in loader.bounds(buffer):
            x, y = loader.batch(buffer, start, stop).values()
            began = time.thread_time()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(as_input(x)), y).backward()
            self.optimizer.step()
            self.falling.step()
            self.measured_s.append(time.thread_time() - began)
            self.used_s += self.step_s
            loader.consumed(stop - start)
            self.steps += 1
            if self.steps % self.every == 0:
                self._note()
        if buffer.round == buffer.rounds - 1:
            self.clock.used(self.used_s)

    def _note(self) -> None:
        """Loss and accuracy on the test images, and when."""
        x, y = self.images.test
        with torch.no_grad():
            logits = torch.cat([self.model(as_input(part)) for part in x.split(1000)])
        self.points.append(
            {
                "step": self.steps, "loads": self.loads + 1, "seconds": self.clock.start_s + self.used_s,
                "loss": float(nn.functional.cross_entropy(logits, y)),
                "accuracy": float((logits.argmax(1) == y).double().mean()),
            }
        )  # fmt: skip


# ---------------------------------------------------------------------- the experiment


def run_images(options: PaperOptions, seconds: float) -> Numbers:
    """All schedules on every data set that is here; further seeds as long as time allows."""
    threads, deadline = torch.get_num_threads(), time.perf_counter() + seconds
    found: list[Numbers] = []
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            sets = list(data_sets(Path(scratch)))
            for left, (name, make) in zip(range(len(sets), 0, -1), sets, strict=True):
                now = time.perf_counter()
                until = now + (deadline - now) / left  # no set takes the others' time for its further seeds
                try:
                    images = make()
                except (HeadraceError, ImportError) as error:
                    found.append({"data": name, "left_out": str(error)})
                    continue
                found.append(one_data_set(images, options.seeds, until))
    finally:
        torch.set_num_threads(threads)
    return {"sets": found, "load_over_round": LOAD_OVER_ROUND, "rounds": ROUNDS}


def one_data_set(images: Images, seeds: int, deadline: float) -> Numbers:
    """Every schedule, the first seed always."""
    probe = Training(images, Schedule("probe", ((1, 1),)), 0)
    probe.run(stop_after=2)
    step_s = float(np.median(probe.measured_s))
    round_s = step_s * len(probe.measured_s) / 2
    load_s = images.load_s if images.load_s is not None else LOAD_OVER_ROUND * round_s
    runs = []
    for seed in range(seeds):
        if seed and time.perf_counter() > deadline:
            break
        for schedule in SCHEDULES:
            points = Training(images, schedule, seed, load_s=load_s, step_s=step_s).run()
            runs.append({"schedule": schedule.name, "loads": schedule.loads, "seed": seed, "points": points})
    return {
        "data": images.name, "measured_load": images.load_s is not None, "load_s": load_s, "round_s": round_s,
        "runs": runs,
    }  # fmt: skip


def at_time(points: list[Numbers], seconds: float, what: str) -> float | None:
    """What a run had reached by then; None before its first point."""
    reached = [p[what] for p in points if p["seconds"] <= seconds]
    return reached[-1] if reached else None


def at_loads(points: list[Numbers], loads: int, what: str) -> float | None:
    """What a run had reached when it had loaded all data so many times."""
    reached = [p[what] for p in points if p["loads"] <= loads]
    return reached[-1] if reached else None


# ---------------------------------------------------------------------- the page


def write_images(page: Page, numbers: Numbers) -> None:
    page.heading("Images: equal steps, fewer loads")
    page.text(
        f"Momentum 0.9, cosine step size from 0.05, {BUFFERS} buffers; every schedule makes the steps of "
        f"{numbers['rounds']} rounds over the data and loads the data as often as its name says (loads × rounds). "
        "Plain mini-batches shuffle all rows and wait for every load. Times are computed from measured parts: "
        "training is processor time of one core; a load is what decoding took here, or, for arrays, which lie in the "
        f"page cache, set to {numbers['load_over_round']} rounds of training, as on a disk that is slower than the "
        "model."
    )
    for found in numbers["sets"]:
        if "left_out" in found:
            page.text(f"{found['data']} is left out: {found['left_out']}.")
            continue
        write_one_set(page, found)


def write_one_set(page: Page, found: Numbers) -> None:
    """One data set's plots and table."""
    names = list(dict.fromkeys(run["schedule"] for run in found["runs"]))
    runs = {name: [run for run in found["runs"] if run["schedule"] == name] for name in names}
    kind = "measured" if found["measured_load"] else "set"
    page.text(
        f"{found['data']}. A buffer's load takes {found['load_s'] * 1e3:.3g} ms ({kind}), a round on it "
        f"{found['round_s'] * 1e3:.3g} ms."
    )
    label = found["data"].partition(",")[0]
    for what, title, log in (("loss", "test loss", True), ("accuracy", "test accuracy", False)):
        page.lines(
            f"{label}: {title} over time",
            [Series(name, mean(runs[name], "seconds"), mean(runs[name], what)) for name in names],
            x_label="seconds", y_label=title, log_y=log,
        )  # fmt: skip
    page.table(
        ["schedule", "loads", "seeds", "time, s", "test loss", "test accuracy", "accuracy at equal time",
         "accuracy after 2 loads"],
        [table_row(name, runs, names) for name in names],
        caption="High accuracy and low time are good. Equal time is the end of the authors' schedule. More loads see "
        "fresher samples, fewer wait less; accuracies before a schedule's end are at a step size that has not "
        "fallen yet.",
    )  # fmt: skip


def mean(runs: list[Numbers], what: str) -> list[float]:
    """The mean of the seeds, point by point."""
    found = np.mean([[p[what] for p in run["points"]] for run in runs], axis=0)
    return [float(v) for v in found]


def table_row(name: str, runs: dict[str, list[Numbers]], names: list[str]) -> list[Any]:
    """A schedule's numbers, means of its seeds."""
    mine = runs[name]
    last = [run["points"][-1] for run in mine]
    ends = [run["points"][-1]["seconds"] for run in runs[names[-1]]]
    then = [at_time(run["points"], end, "accuracy") for run, end in zip(mine, ends, strict=False)]
    loaded = [at_loads(run["points"], 2, "accuracy") for run in mine]

    def shown(values: list[float | None]) -> str:
        there = [v for v in values if v is not None]
        return f"{np.mean(there):.4f}" if there else "–"

    spread = f" ± {np.std([p['accuracy'] for p in last]):.4f}" if len(last) > 1 else ""
    return [
        name, mine[0]["loads"], len(mine), f"{np.mean([p['seconds'] for p in last]):.2f}",
        f"{np.mean([p['loss'] for p in last]):.4f}",
        f"{np.mean([p['accuracy'] for p in last]):.4f}{spread}", shown(then), shown(loaded),
    ]  # fmt: skip
