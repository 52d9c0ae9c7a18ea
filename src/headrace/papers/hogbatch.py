"""Hogbatch on CPU and GPU (Ma and Rusu, 2020): loss against time for its four algorithms and the usual loop.

Fully connected networks on covtype, w8a, delicious and, as CSR rows, the words of SST-2. Every method gets the same
time, the same start and the same step size at batch 64; a worker with another batch scales it by the root of the
ratio. The usual loop is a `DataLoader` with autograd and `torch.optim.SGD` on the same device: the TensorFlow of
the paper's figures.

Without a GPU the device worker is a *stand-in*: a CPU core that takes the device's path with large batches. It
shows how the algorithms share work; it says nothing about the speed of a GPU. Widths follow the paper (512 units);
three hidden ReLU layers replace its four to eight sigmoid ones, which hardly move in minutes on two cores.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch
from headrace.engine.hogbatch.rows import Rows, to_parts
from headrace.errors import unknown
from headrace.papers import PaperOptions, find_data
from headrace.report.page import Page, Series

SLICES = 12
"""Looks at the loss in one run, off the clock."""

SHORTEST_S = 3.0
"""A run shorter than this says little; fewer seeds are run instead."""

SAMPLE, WIDEST = 8192, 1 << 24
"""Rows looked at, and numbers: a look at rows of 15,000 words would take longer than the training between two."""

PUBLISHED = [
    ["covtype", "3 s", "15 s", "15 s", "0.86 to 0.99", "0.52 to 0.81"],
    ["w8a", "2 s", "20 s: 0.90", "", "0.86 to 0.99", "0.52 to 0.81"],
    ["delicious", "1 to 1.5 s", "20 s: 0.40", "", "0.86 to 0.99", "0.52 to 0.81"],
]
"""Read off the paper's figures (V100 server; w8a and delicious also K80), about ± 5 %."""


@dataclass(frozen=True)
class Problem:
    """One data set and what is trained on it."""

    x: Tensor
    y: Tensor
    loss: Callable[..., Tensor]
    outputs: int
    lr: float
    """The step size at batch 64: the best of a few, about a factor of 3 apart, for one worker and short runs."""


def covtype() -> Problem:
    with np.load(find_data("covtype.npz"), allow_pickle=False) as file:
        keys = list(file.keys())
        x = torch.from_numpy(file[keys[0]].astype(np.float32, order="C"))
        y = torch.from_numpy((file[keys[1]] == 2).astype(np.int64))
    return Problem((x - x.mean(0)) / x.std(0).clamp_min(1e-6), y, F.cross_entropy, 2, 0.3)


def w8a() -> Problem:
    with np.load(find_data("w8a.npz"), allow_pickle=False) as file:
        x, y = _dense(file, "x"), torch.from_numpy((_labels(file) > 0).astype(np.int64))
    return Problem(x, y, F.cross_entropy, 2, 1.0)


def delicious() -> Problem:
    with np.load(find_data("multilabel_delicious.npz"), allow_pickle=False) as file:
        x, y = _dense(file, "x"), _dense(file, "y")
    return Problem(x, y, F.binary_cross_entropy_with_logits, y.shape[1], 10.0)


def sst2() -> Problem:
    """Bags of words as CSR rows, in the place of real-sim, which is text too and cannot be had everywhere."""
    import gzip

    from sklearn.feature_extraction.text import TfidfVectorizer

    with gzip.open(find_data("SST-2") / "train.tsv.gz", "rt", encoding="utf-8") as file:
        next(file)
        lines = [line.rstrip("\n").rsplit("\t", 1) for line in file]
    matrix = TfidfVectorizer(dtype=np.float32, token_pattern=r"\S+").fit_transform(
        [text for text, _ in lines]
    )
    y = torch.tensor([int(label) for _, label in lines])
    return Problem(csr(matrix), y, F.cross_entropy, 2, 1.0)


def csr(matrix: Any) -> Tensor:
    """A SciPy matrix as a torch tensor."""
    parts = (torch.from_numpy(matrix.indptr).long(), torch.from_numpy(matrix.indices).long())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR support a beta
        return torch.sparse_csr_tensor(*parts, torch.from_numpy(matrix.data), matrix.shape)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "covtype": covtype,
    "w8a": w8a,
    "delicious": delicious,
    "sst2": sst2,
}


def network(problem: Problem, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    d = problem.x.shape[1]
    return nn.Sequential(
        *(nn.Linear(d, 512), nn.ReLU()),
        *(nn.Linear(512, 512), nn.ReLU()),
        *(nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, problem.outputs),
    )


def methods(device: str, lr: float) -> dict[str, HogbatchOptions]:
    """The paper's four algorithms on this machine's workers."""
    gpu = device == "cuda"
    cores = max(2, torch.get_num_threads())
    usual: dict[str, Any] = {"batch_size": 64, "optimiser": OptimiserSpec(lr=lr), "epochs": 1_000_000}
    # The stand-in takes smaller batches than a GPU would: a core needs a second for 8192 rows of this network.
    usual |= {"device_batch_size": 4096 if gpu else 1024, "device_limits": (64, 8192 if gpu else 1024)}
    usual |= {"cpu_limits": (16, 1024), "merge_every": 1}
    chip: dict[str, Any] = {"cuda": 1} if gpu else {"standin": 1}
    both = {"cpu": cores - 1, **chip}
    return {
        "hogwild": HogbatchOptions(algorithm="hogwild", cpu=cores, **usual),
        "minibatch": HogbatchOptions(algorithm="minibatch", cpu=0, **chip, **usual),
        "hogbatch": HogbatchOptions(algorithm="hogbatch", **both, **usual),
        "adaptive": HogbatchOptions(algorithm="adaptive", **both, **{**usual, "batch_size": 64}),
    }


@dataclass
class Curve:
    """One run: loss at times and at epochs, and what its workers did."""

    seconds: list[float]
    epochs: list[float]
    losses: list[float]
    updates: int = 0
    cpu_share: float = 1.0
    utilisation: dict[str, float] = dataclasses.field(default_factory=dict)
    batches: dict[str, int] = dataclasses.field(default_factory=dict)


def run_workers(problem: Problem, module: nn.Module, options: HogbatchOptions, seconds: float) -> Curve:
    """Train in slices of time, looking at the loss of a fixed sample between them."""
    rows = len(problem.y)
    curve = Curve([0.0], [0.0], [look(problem, module)])
    state, spent, busy = None, 0.0, dict[str, float]()
    by_worker: dict[str, int] = {}
    for _ in range(SLICES):
        part = dataclasses.replace(options, seconds=seconds / SLICES)
        result = run_hogbatch(module, {"x": problem.x, "y": problem.y}, problem.loss, part, resume=state)
        state, spent = result.state, spent + result.seconds
        for worker in result.workers:
            by_worker[worker.name] = worker.updates
            busy[worker.name] = busy.get(worker.name, 0.0) + worker.utilisation * result.seconds
            curve.batches[worker.name] = worker.batch
        curve.seconds.append(spent)
        curve.epochs.append(result.rows / rows)
        curve.losses.append(look(problem, module))
    curve.updates = sum(by_worker.values())
    cpu = sum(n for name, n in by_worker.items() if name.startswith("cpu"))
    curve.cpu_share = cpu / max(1, curve.updates)
    curve.utilisation = {name: value / spent for name, value in busy.items()}
    return curve


def run_usual(problem: Problem, module: nn.Module, seconds: float, device: str, threads: int) -> Curve:
    """The loop that most people write: a DataLoader, autograd and `torch.optim.SGD`, batch 64."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _usual(problem, module, seconds, device)
    finally:
        torch.set_num_threads(before)


def _usual(problem: Problem, module: nn.Module, seconds: float, device: str) -> Curve:
    module = module.to(device)
    optimiser = torch.optim.SGD(module.parameters(), lr=problem.lr)
    loader = DataLoader(_dataset(problem), batch_size=64, shuffle=True, collate_fn=_collate(problem))
    curve = Curve([0.0], [0.0], [look(problem, module)])
    spent, used, began = 0.0, 0, time.perf_counter()
    while spent < seconds:
        for x, y in loader:
            optimiser.zero_grad()
            problem.loss(module(x.to(device)), y.to(device)).backward()
            optimiser.step()
            used += len(x)
            curve.updates += 1
            now = spent + time.perf_counter() - began
            if now >= min(len(curve.losses) * seconds / SLICES, seconds):
                curve.losses.append(look(problem, module))
                curve.seconds.append(now)
                curve.epochs.append(used / len(problem.y))
                spent, began = now, time.perf_counter()
                if spent >= seconds:
                    break
    return curve


def _dataset(problem: Problem) -> Any:
    return TensorDataset(problem.x, problem.y) if problem.x.layout == torch.strided else range(len(problem.y))


def _collate(problem: Problem) -> Callable[[list[int]], tuple[Tensor, Tensor]] | None:
    """CSR rows become dense batches; the usual function where rows are dense."""
    if problem.x.layout == torch.strided:
        return None
    rows = Rows(to_parts({"x": problem.x}), "x")

    def collate(picked: list[int]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(picked)
        return next(rows.batches(numbers, len(picked))), problem.y[numbers]

    return collate


def look(problem: Problem, module: nn.Module) -> float:
    """The mean loss over a fixed sample."""
    size = min(SAMPLE, WIDEST // problem.x.shape[1])
    picked = torch.randperm(len(problem.y), generator=torch.Generator().manual_seed(1))[:size]
    device = next(module.parameters()).device
    total = 0.0
    rows = Rows(to_parts({"x": problem.x}), "x")
    with torch.no_grad():
        for part in picked.split(2048):  # wide rows in pieces
            x = next(rows.batches(part, len(part)))
            total += float(problem.loss(module(x.to(device)), problem.y[part].to(device))) * len(part)
    return total / len(picked)


def run(options: PaperOptions) -> Path:
    for name in options.only:
        if name not in PROBLEMS:
            raise unknown("experiment", name, PROBLEMS)
    names = options.only or tuple(PROBLEMS)
    device = _device(options.device)
    count = len(names) * (6 if device == "cpu" else 5)
    seeds = max(1, min(options.seeds, int(options.seconds / (count * SHORTEST_S))))
    seconds = options.seconds / (count * seeds * 1.3)  # looks at the loss take time too
    numbers: dict[str, Any] = {"device": device, "seeds": seeds, "seconds": seconds, "curves": {}}
    for name in names:
        problem = PROBLEMS[name]()
        numbers["curves"][name] = _experiment(problem, device, seeds, seconds)
    (options.out / "hogbatch.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return page(numbers, options.out / "hogbatch.html")


def _experiment(problem: Problem, device: str, seeds: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        start = network(problem, seed)
        cores = torch.get_num_threads()
        curves = {"usual loop": run_usual(problem, copy.deepcopy(start), seconds, device, cores)}
        if device == "cpu":  # on a busy machine several threads wait for one another at every product
            curves["usual loop, one thread"] = run_usual(problem, copy.deepcopy(start), seconds, device, 1)
        for name, chosen in methods(device, problem.lr).items():
            chosen = dataclasses.replace(chosen, seed=seed)
            curves[name] = run_workers(problem, copy.deepcopy(start), chosen, seconds)
        for name, curve in curves.items():
            found.setdefault(name, []).append(dataclasses.asdict(curve))
    return found


def page(numbers: dict[str, Any], path: Path) -> Path:
    """The page from saved numbers."""
    device = "a CUDA device" if numbers["device"] == "cuda" else "a stand-in on a CPU core, not a GPU"
    shown = Page("Hogbatch: CPU cores and device together", subtitle=f"The device worker is {device}")
    shown.text(
        f"{numbers['seconds']:.1f} s of training per run, {numbers['seeds']} seeds. Bands reach from the lowest "
        "to the highest seed. A loss curve further down and to the left is better."
    )
    for name, methods_found in numbers["curves"].items():
        shown.heading(name)
        for axis, label, log in (("seconds", "seconds", False), ("epochs", "epochs", True)):
            series = [_series(method, curves, axis) for method, curves in methods_found.items()]
            shown.lines(f"Loss on {name} over {label}", series, x_label=label, y_label="loss", log_x=log)
        shown.table(
            [
                "method",
                "seconds to 95 % of the best reduction",
                "updates/s",
                "CPU share",
                "utilisation",
                "batches",
            ],
            _rows(methods_found),
            caption="The CPU share of updates is near 1 when small CPU batches drown the device's; utilisation "
            "is the share of time at work, low when workers wait for one another.",
        )
    shown.heading("Published")
    shown.table(
        ["data", "CPU+GPU to 0.95", "TensorFlow", "GPU only", "CPU share, CPU+GPU", "CPU share, adaptive"],
        PUBLISHED,
        caption="Time to 95 % of the loss reduction, or the fraction reached, read off the paper's figures.",
    )
    shown.save(path)
    return path


def _series(method: str, curves: list[dict[str, Any]], axis: str) -> Series:
    length = min(len(curve["losses"]) for curve in curves)
    columns = [[curve["losses"][i] for curve in curves] for i in range(length)]
    x = [statistics.mean(curve[axis][i] for curve in curves) for i in range(length)]
    y = [statistics.mean(column) for column in columns]
    if axis == "epochs":  # a logarithmic axis has no zero
        x, y, columns = x[1:], y[1:], columns[1:]
    return Series(method, x, y, low=[min(c) for c in columns], high=[max(c) for c in columns])


def _rows(found: dict[str, list[dict[str, Any]]]) -> list[list[Any]]:
    best = min(min(curve["losses"]) for curves in found.values() for curve in curves)
    rows = []
    for method, curves in found.items():
        times = [_time_to(curve, best) for curve in curves]
        reached = [t for t in times if t is not None]
        says = f"{statistics.mean(reached):.2f}" if len(reached) == len(times) else "not reached"
        first = curves[0]
        rate = statistics.mean(curve["updates"] / curve["seconds"][-1] for curve in curves)
        use = ", ".join(f"{name} {value:.2f}" for name, value in first["utilisation"].items())
        sizes = ", ".join(f"{name} {value}" for name, value in first["batches"].items())
        rows.append([method, says, round(rate), round(first["cpu_share"], 2), use, sizes])
    return rows


def _time_to(curve: dict[str, Any], best: float) -> float | None:
    """Seconds until 95 % of the best reduction of all methods, between looks by a straight line."""
    losses, seconds = curve["losses"], curve["seconds"]
    target = losses[0] - 0.95 * (losses[0] - best)
    for i in range(1, len(losses)):
        if losses[i] <= target:
            part = (losses[i - 1] - target) / max(losses[i - 1] - losses[i], 1e-12)
            return float(seconds[i - 1] + part * (seconds[i] - seconds[i - 1]))
    return None


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def _dense(file: Any, key: str) -> Tensor:
    """A CSR matrix of the file as a dense tensor: these sets are small."""
    from scipy.sparse import csr_matrix

    name = next(
        k.removesuffix("_indptr") for k in file if k.endswith("_indptr") and k.lower().startswith(key)
    )
    parts = (file[f"{name}_data"], file[f"{name}_indices"], file[f"{name}_indptr"])
    matrix = csr_matrix(parts, shape=tuple(file[f"{name}_shape"]))
    return torch.from_numpy(matrix.toarray().astype(np.float32))


def _labels(file: Any) -> Any:
    return file[next(key for key in file if key.lower().startswith("y"))]
