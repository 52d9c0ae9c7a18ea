"""How much faster is a chain's step than autograd, and how near does it come to the core's matrix rate?

    python benchmarks/bench_chain.py [--quick]

Each side takes the same batches of a 54-512-512-512-2 network (float32, ReLU, plain SGD). `autograd` slices
the batch and calls backward and `torch.optim.SGD`; `loader` is the usual loop over a `DataLoader` of a
`TensorDataset`, whose workers would only add to its time at this size. Sides are timed in turn, round by
round, and the best round of each counts: a shared machine only ever makes a round slower.

Two idle cores of a Zen 5, torch 2.13.0, numba 0.68, ``--quick``; torch's own products make 106 GFLOP/s on one of them,
since MKL keeps to half-wide vectors on this processor:

    threads  batch  autograd/s   loader/s    chain/s  ×autograd  ×loader  of GEMM rate
          1      1        3214       3045      17225       5.36     5.66       0.50
          1      4        6427       6158      17743       2.76     2.88       0.53
          1     16       19341      17937      58067       3.00     3.24       1.70
          1     64       27726      25760      72020       2.60     2.80       2.10
          1    256       29066      27308      68579       2.36     2.51       2.00
          1   1024       29069      27627      51628       1.78     1.87       1.52
          2     64       34484      31851      72934       2.12     2.29       1.14
          2   1024       56723      48562      53688       0.95     1.11       0.81

Compiled steps use one thread, whatever ``threads`` says. Without numba the steps are products of torch: on a virtual
Sapphire Rapids (155 GFLOP/s a core) those made 4.3, 2.6, 1.9, 1.4 and 1.2 times autograd's rows at these batches,
and 0.45 of the matrix rate at 16 rows, where MKL's product with a transposed right side runs at half the rate.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headrace.engine.chain import Chain

WIDTHS = (54, 512, 512, 512, 2)
CLOCK: list[Callable[[], float]] = [time.perf_counter]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def flops(b: int) -> float:
    """Matrix products of one step: forward, weights' gradient, inputs' gradient but for the first layer."""
    sizes = [a * c for a, c in itertools.pairwise(WIDTHS)]
    return 2.0 * b * (3 * sum(sizes) - sizes[0])


def gemm_rate(n: int = 1024) -> float:
    a, b, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    best = min(timed(lambda: torch.mm(a, b, out=out), 5) for _ in range(8))
    return 2.0 * n**3 / best


def timed(act: Callable[[], object], times: int) -> float:
    start = CLOCK[0]()
    for _ in range(times):
        act()
    return (CLOCK[0]() - start) / times


def sides(b: int, rows: int) -> dict[str, Callable[[], int]]:
    """Name → a function that takes some steps and returns how many rows it used."""
    x, y = torch.randn(rows, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (rows,))
    network_a, network_l = network(), network()
    optimiser_a = torch.optim.SGD(network_a.parameters(), lr=1e-3)
    optimiser_l = torch.optim.SGD(network_l.parameters(), lr=1e-3)
    chain, reason = Chain.of(copy.deepcopy(network_a), F.cross_entropy)
    assert chain is not None, reason
    chain.fuse()
    starts = range(0, rows - b + 1, b)

    def train(module: nn.Module, optimiser: torch.optim.Optimizer, xb: Tensor, yb: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(module(xb), yb).backward()
        optimiser.step()

    def autograd() -> int:
        for i in starts:
            train(network_a, optimiser_a, x[i : i + b], y[i : i + b])
        return b * len(starts)

    loader = DataLoader(TensorDataset(x, y), batch_size=b, shuffle=True, drop_last=True)

    def usual() -> int:
        for xb, yb in loader:
            train(network_l, optimiser_l, xb, yb)
        return b * len(starts)

    def mine() -> int:
        for i in starts:
            chain.step(x[i : i + b], y[i : i + b], lr=1e-3)
        return b * len(starts)

    return {"autograd": autograd, "loader": usual, "chain": mine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread's processor time: for a machine that others use too",
    )
    args = parser.parse_args()
    if args.cpu_time:
        CLOCK[0] = time.thread_time
    rounds = 3 if args.quick else 6
    print("threads  batch  autograd/s   loader/s    chain/s  ×autograd  ×loader  of GEMM rate")
    for threads in (1,) if args.cpu_time else (1, 2):
        torch.set_num_threads(threads)
        for b in args.batches:
            rate = gemm_rate()
            acts = sides(b, min(max(200, 40 * b), 8192))
            best = dict.fromkeys(acts, float("inf"))
            for act in acts.values():
                act()
            for _ in range(rounds):
                for name, act in acts.items():
                    start = CLOCK[0]()
                    used = act()
                    best[name] = min(best[name], (CLOCK[0]() - start) / used)
            share = flops(b) / b / best["chain"] / rate
            print(
                f"{threads:7d} {b:6d} "
                + " ".join(f"{1 / best[name]:10.0f}" for name in ("autograd", "loader", "chain"))
                + f" {best['autograd'] / best['chain']:10.2f} {best['loader'] / best['chain']:8.2f}"
                + f" {share:10.2f}"
            )


if __name__ == "__main__":
    main()
