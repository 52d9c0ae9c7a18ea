"""How much faster is a chain's step than autograd, and how near does it come to the core's matrix rate?

    python benchmarks/bench_chain.py [--quick]

Each side takes the same batches of a 54-512-512-512-2 network (float32, ReLU, plain SGD). `autograd` slices
the batch and calls backward and `torch.optim.SGD`; `loader` is the usual loop over a `DataLoader` of a
`TensorDataset`, whose workers would only add to its time at this size. Sides are timed in turn, round by
round, and the best round of each counts: a shared machine only ever makes a round slower.

2 cores of a virtual Sapphire Rapids server (AVX-512, 155 GFLOP/s a core), torch 2.13.0, numba 0.68:

    threads  batch  autograd/s   loader/s    chain/s  ×autograd  ×loader  of GEMM rate
          1      1       1090       1029       4698       4.31     4.56       0.10
          1      4       3776       3553       9981       2.64     2.81       0.21
          1     16      10981      10438      20818       1.90     1.99       0.45
          1     64      24214      22429      33367       1.38     1.49       0.72
          1    256      32772      28553      39078       1.19     1.37       0.84
          1   1024      34041      30909      39064       1.15     1.26       0.84
          2      1       1495       1360       4543       3.04     3.34       0.05
          2      4       4745       4433       9886       2.08     2.23       0.11
          2     16      14026      13004      24900       1.78     1.91       0.27
          2     64      34489      30247      49844       1.45     1.65       0.53
          2    256      56302      45643      67626       1.20     1.48       0.72
          2   1024      61597      50171      71883       1.17     1.43       0.96

What is missing to the matrix rate at small batches is MKL's product with a transposed right side (``x Wᵀ``):
at 16 rows it runs at 85 GFLOP/s where ``delta W`` reaches 160. Writing its output column by column makes it
run at 122, and costs as much again in the activation that follows (+5 % at 16 rows, -5 % at 64).
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
    start = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - start) / times


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
    args = parser.parse_args()
    rounds = 3 if args.quick else 6
    print("threads  batch  autograd/s   loader/s    chain/s  ×autograd  ×loader  of GEMM rate")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for b in args.batches:
            rate = gemm_rate()
            acts = sides(b, min(max(200, 40 * b), 8192))
            best = dict.fromkeys(acts, float("inf"))
            for act in acts.values():
                act()
            for _ in range(rounds):
                for name, act in acts.items():
                    start = time.perf_counter()
                    used = act()
                    best[name] = min(best[name], (time.perf_counter() - start) / used)
            share = flops(b) / b / best["chain"] / rate
            print(
                f"{threads:7d} {b:6d} "
                + " ".join(f"{1 / best[name]:10.0f}" for name in ("autograd", "loader", "chain"))
                + f" {best['autograd'] / best['chain']:10.2f} {best['loader'] / best['chain']:8.2f}"
                + f" {share:10.2f}"
            )


if __name__ == "__main__":
    main()
