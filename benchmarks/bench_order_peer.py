"""Overhead of a learned order: ours against grab-sampler 0.1.3, over the same training loop with shuffling.

    pip install --no-deps grab-sampler overrides torchopt optree graphviz     # into an environment of its own
    python benchmarks/bench_order_peer.py [--models mlp cnn] [--seconds 20]

grab-sampler asks for torch-sparse, which has no wheel for recent versions of torch and is not used here; an empty
module stands in for its import. It also passes an argument that `Sampler` no longer takes, which is dropped. Its loop
is the one of its README: functorch gradients of every example, torchopt, `sampler.step(gradients)`. All loops see the
same tensors, batch 64, and alternate in blocks; the figure is the median of a block's CPU time. Overhead is a ratio
minus one.

Two cores of a Zen 5, shared with other programs (load 7), one thread, torch 2.13.0, Python 3.11; grab-sampler 0.1.3,
torchopt 0.7.3 (which wants graphviz too):

    model                        shuffled       headrace   grab-sampler   overhead, theirs / ours
    MLP 784-256-128-10           1.36 ms/step   1.28x      46.95x        162
    LeNet 3 x 32 x 32            7.09 ms/step   1.23x       2.84x          8
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from headrace import BalancedSampler

BATCH, ROWS = 64, 512


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "cnn": (cnn, (3, 32, 32)),
}


def ordinary(make: Callable[[], nn.Module], x: Tensor, y: Tensor, sampler: Any) -> Iterator[None]:
    model = make()
    if isinstance(sampler, BalancedSampler):
        sampler.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    while True:
        for rows in BatchSampler(sampler, BATCH, drop_last=True):
            index = torch.tensor(rows)
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            yield


def peer(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Iterator[None]:
    stand_in = types.ModuleType("torch_sparse")
    stand_in.SparseTensor = None  # type: ignore[attr-defined]
    sys.modules.setdefault("torch_sparse", stand_in)
    Sampler.__init__ = lambda self, *ignored: None  # type: ignore[method-assign]
    import torchopt
    from grabsampler import GraBSampler

    model = make()
    parameters = dict(model.named_parameters())
    optimizer = torchopt.sgd(1e-3, momentum=0.9)
    state = optimizer.init(parameters)
    sampler = GraBSampler(range(len(x)), parameters, balance_type="pair", device="cpu")

    def loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (a[None],)), b[None])

    gradients = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0))
    while True:
        for rows in BatchSampler(sampler, BATCH, drop_last=True):
            index = torch.tensor(rows)
            found, _ = gradients(parameters, x[index], y[index])
            sampler.step(found)
            updates, state = optimizer.update(
                {k: g.mean(0) for k, g in found.items()}, state, params=parameters
            )
            parameters = torchopt.apply_updates(parameters, updates)
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="per model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        make, shape = MODELS[name]
        x, y = torch.randn(ROWS, *shape), torch.randint(0, 10, (ROWS,))
        run = functools.partial(ordinary, make, x, y)
        loops = {
            "shuffled": run(RandomSampler(range(ROWS))),
            "headrace, pair": run(BalancedSampler(ROWS, fallback=False)),
            "grab-sampler, pair": peer(make, x, y),
        }
        times: dict[str, list[float]] = {label: [] for label in loops}
        for loop in loops.values():
            next(loop)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end or len(times["shuffled"]) < 3:
            for label, loop in loops.items():
                start = time.process_time()
                for _ in range(ROWS // BATCH):
                    next(loop)
                times[label].append((time.process_time() - start) / (ROWS // BATCH))
        base, ours, theirs = (statistics.median(times[label]) for label in loops)
        print(
            f"{name}: shuffled {1e3 * base:.2f} ms/step, headrace {ours / base:.2f}x, "
            f"grab-sampler {theirs / base:.2f}x; overhead ratio {(theirs - base) / max(ours - base, 1e-9):.0f}"
        )


if __name__ == "__main__":
    main()
