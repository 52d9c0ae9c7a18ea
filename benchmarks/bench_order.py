"""What does learning an order cost? Ratios to the same training loop with shuffling.

    python benchmarks/bench_order.py            # all models, sketch and exact
    python benchmarks/bench_order.py --models mlp-235k lenet --signals sketch --seconds 10
    python benchmarks/bench_order.py --fit      # inside headrace.fit, both orders, on one core

Every model is trained on random data, batch 64, SGD with momentum, by loops that differ in the sampler alone: a
`BatchSampler` over the sampler picks rows of tensors in memory. Blocks of steps alternate between the contestants; a
contestant's figure is the median of its blocks' CPU time, so that other programs on the machine disturb
little. A ratio of 1.00 would be free.

Two idle cores of a Zen 5, one thread, torch 2.13.0, Python 3.11, kind pair. The second loop with shuffling shows how
far the figures can be trusted; those of exact signals come from a run beside other programs, whose own shuffled loop
took 1.36, 9.74, 29.8, 7.29 and 70.9 ms:

    model          shuffled         shuffled again   sketch    exact
    mlp-235k        0.93 ms/step    0.99x            1.29x     2.95x
    mlp-1.9M        8.19 ms/step    1.01x            1.07x     2.20x
    mlp-5.8M       27.53 ms/step    0.98x            1.01x     1.91x
    lenet           5.03 ms/step    1.00x            1.18x     3.71x
    transformer    60.48 ms/step    1.01x            1.12x     3.45x

Where other programs use the cores too, sketches are a little dearer: 1.32 to 1.36x for mlp-235k, 1.13 to 1.26x for the
transformer.

``--fit`` compares `headrace.fit` with both orders on one core; dense layers are stepped by hand under either. Before
they were under a learned order, it took 1.87x on mlp-235k and 1.72x on mlp-1.9M. Beside other programs (load 9):

    mlp-235k        1.20 ms/step, 1.23x      mlp-1.9M    5.53 ms/step, 1.11x
    lenet           5.35 to 6.68 ms/step, 1.16 to 1.37x

On idle cores: mlp-235k 1.29x (0.65 ms/step), mlp-1.9M 1.07x, mlp-5.8M 1.05x, lenet 1.28x, transformer 1.09x.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import headrace
from headrace import BalancedSampler
from headrace.order import BalancedOrder

BATCH = 64
ROWS = 1024


class SmallTransformer(nn.Module):
    """Two encoder layers over 32 tokens: 0.9 M parameters."""

    def __init__(self, width: int = 128, length: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, width)
        self.place = nn.Parameter(torch.zeros(length, width), requires_grad=False)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(ids) + self.place).mean(1))


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def vectors(width: int) -> Tensor:
    return torch.randn(ROWS, width)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mlp-235k": (lambda: mlp(784, 256, 128, 10), lambda: vectors(784), 10),
    "mlp-1.9M": (lambda: mlp(784, 1024, 1024, 10), lambda: vectors(784), 10),
    "mlp-5.8M": (lambda: mlp(784, 2048, 2048, 10), lambda: vectors(784), 10),
    "lenet": (lenet, lambda: torch.randn(ROWS, 3, 32, 32), 10),
    "transformer": (SmallTransformer, lambda: torch.randint(0, 2000, (ROWS, 32)), 2),
}


class Contestant:
    """A training loop that runs on and on; `block` times some of its steps."""

    def __init__(self, make: Callable[[], nn.Module], x: Tensor, classes: int, sampler: Sampler[int]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.x, self.y = x, torch.randint(0, classes, (len(x),))
        self.sampler = sampler
        if isinstance(sampler, BalancedSampler):
            sampler.watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.steps = self.run()
        self.times: list[float] = []

    def run(self) -> Iterator[None]:
        batches = BatchSampler(self.sampler, BATCH, drop_last=True)
        while True:
            for rows in batches:
                index = torch.tensor(rows)
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[index]), self.y[index]).backward()
                self.optimizer.step()
                yield

    def block(self, steps: int, record: bool = True) -> None:
        start = time.process_time()
        for _ in range(steps):
            next(self.steps)
        if record:
            self.times.append((time.process_time() - start) / steps)


def compare(name: str, signals: list[str], kinds: list[str], seconds: float, k: int) -> None:
    make, inputs, classes = MODELS[name]
    x = inputs()
    contestants: dict[str, Contestant] = {
        "shuffled": Contestant(make, x, classes, RandomSampler(range(ROWS)))
    }
    contestants["shuffled again"] = Contestant(make, x, classes, RandomSampler(range(ROWS)))
    for signal in signals:
        for kind in kinds:
            sampler = BalancedSampler(ROWS, kind=kind, signal=signal, k=k, fallback=False)
            contestants[f"{kind}, {signal}"] = Contestant(make, x, classes, sampler)
    for contestant in contestants.values():
        contestant.block(20, record=False)
    per_block = ROWS // BATCH
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for contestant in contestants.values():
            contestant.block(per_block)
    base = statistics.median(contestants["shuffled"].times)
    for label, contestant in contestants.items():
        own = statistics.median(contestant.times)
        print(
            f"{name:12} {label:18} {1e3 * own:8.3f} ms/step   {own / base:5.2f}x   ({len(contestant.times)} blocks)"
        )


def fitted(name: str, order: str, epochs: int) -> tuple[float, str]:
    """CPU seconds of so many epochs of `headrace.fit`, and how its steps were taken."""
    make, inputs, classes = MODELS[name]
    torch.manual_seed(0)
    x = inputs()
    learned = BalancedOrder(ROWS, fallback=False) if order == "balanced" else order
    began = time.process_time()
    run = headrace.fit(
        make(), (x, torch.randint(0, classes, (ROWS,))), loss=F.cross_entropy, lr=1e-3, epochs=epochs, batch_size=BATCH,
        optimizer="sgd", optimizer_options={"momentum": 0.9}, order=learned, device="cpu", workers="single", seed=0,
        progress=False, log_every=ROWS // BATCH,
    )  # fmt: skip
    taken = time.process_time() - began
    return taken, [str(d.value) for d in run.plan.decisions if d.name == "capture"][-1]


def compare_fits(name: str, rounds: int) -> None:
    """The epochs after the first two, in turn; the smallest of the rounds."""
    many = 26 if name != "transformer" else 5
    fitted(name, "balanced", 1)  # what is looked up and loaded once
    least: dict[tuple[str, int], float] = {}
    ways: dict[str, str] = {}
    for _ in range(rounds):
        for order, epochs in itertools.product(("shuffled", "balanced"), (2, many)):
            took, ways[order] = fitted(name, order, epochs)
            least[order, epochs] = min(took, least.get((order, epochs), took))
    steps = (many - 2) * (ROWS // BATCH)
    base, own = ((least[order, many] - least[order, 2]) / steps for order in ("shuffled", "balanced"))
    print(
        f"{name:12} fit, shuffled {1e3 * base:8.3f} ms/step ({ways['shuffled']})   balanced {1e3 * own:8.3f} "
        f"({ways['balanced']})   {own / base:5.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--signals", nargs="+", default=["sketch", "exact"])
    parser.add_argument("--kinds", nargs="+", default=["pair"])
    parser.add_argument("--seconds", type=float, default=6.0, help="per model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument(
        "--fit", action="store_true", help="headrace.fit with both orders instead, on one core"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --fit")
    options = parser.parse_args()
    if options.fit:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for name in options.models:
            compare_fits(name, options.rounds)
        return
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), batch {BATCH}, k={options.k}")
    for name in options.models:
        compare(name, options.signals, options.kinds, options.seconds, options.k)


if __name__ == "__main__":
    main()
