"""Do two workers on two cores make nearly twice the updates of one, and which way of sharing does it take?

    python benchmarks/bench_hogbatch.py [--seconds 1.0] [--batches 1 16 64] [--rounds 3] [--cpu-time]

54-512-512-512-2, float32, plain SGD through compiled steps. Rows: one worker; threads that update the shared
parameters directly, and with replicas merged every 16, 64 and 256 steps; two processes; two threads that take the
interpreter's way through each step, for comparison. Each configuration trains for the given time, in turn, round
by round; the best round counts. ``--cpu-time`` divides rows by the processor time of all threads, times the
number of workers: what idle cores would give, told on a machine that others use too (threads only: what waiting
for a lock costs does not show in it, and compiled grants hold none).

Two idle cores of a Zen 5, torch 2.13.0, numba 0.68, wall time, ``--seconds 1 --rounds 3`` (batch 1: 4 rounds):

    batch    1  one worker   24075 rows/s  1.00 ×     batch   16  60590  1.00 ×     batch   64   69751  1.00 ×
    threads, direct          29773         1.24 ×                110786  1.83 ×                 134572  1.93 ×
    threads, K=16            42806         1.78 ×                112151  1.85 ×                 133750  1.87 ×
    threads, K=64            45022         1.87 ×                110708  1.83 ×                 132150  1.85 ×
    threads, K=256           47394         1.97 ×                111497  1.84 ×                 132988  1.86 ×
    threads, not compiled     6368         0.26 ×                 41616  0.69 ×                  47222  0.68 ×
    processes, direct         5777         0.23 ×                107579  1.79 ×                 134706  1.89 ×
    processes, K=64          43203         1.75 ×                112569  1.87 ×                 131937  1.86 ×

Direct updates at batch 64 came to 1.93 × in one run, 1.81 × in another and 1.91 × in a third (K=16 and 64: 1.89 and
1.90), where batch 16 came to 1.87 to 1.95 × with replicas but 0.61 × directly, and batch 1 to 1.88 × with K=256.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from bench_chain import WIDTHS, network

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch

SIDES: dict[str, dict[str, object]] = {
    "one worker": {"cpu": 1, "compiled": True},
    "threads, direct": {"merge_every": 1, "processes": False},
    "threads, K=16": {"merge_every": 16, "processes": False},
    "threads, K=64": {"merge_every": 64, "processes": False},
    "threads, K=256": {"merge_every": 256, "processes": False},
    "processes, direct": {"merge_every": 1, "processes": True},
    "processes, K=64": {"merge_every": 64, "processes": True},
    "threads, not compiled": {"merge_every": 1, "processes": False, "compiled": False},
}


def rate(side: dict[str, object], batch: int, workers: int, seconds: float, cpu_time: bool) -> float:
    """Rows per second of training time, or of what the processors spent on it."""
    torch.manual_seed(0)
    x, y = torch.randn(65536, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (65536,))
    options = HogbatchOptions(
        **{
            "cpu": workers,
            "batch_size": batch,
            "epochs": 10_000,
            "seconds": seconds,
            "scaling": "off",
            **side,
        },  # type: ignore[arg-type]
        optimiser=OptimiserSpec(lr=1e-3),
    )
    began = time.process_time()
    result = run_hogbatch(network(), {"x": x, "y": y}, F.cross_entropy, options)
    spent = (time.process_time() - began) / options.cpu
    return result.rows / (spent if cpu_time else result.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="sides whose names contain one of these words")
    args = parser.parse_args()
    sides = {
        name: side
        for name, side in SIDES.items()
        if not (args.cpu_time and side.get("processes"))
        and (name == "one worker" or not args.only or any(word in name for word in args.only))
    }
    rate(SIDES["one worker"], 16, 1, 0.1, args.cpu_time)  # compiles
    for batch in args.batches:
        best = dict.fromkeys(sides, 0.0)
        for _ in range(args.rounds):
            for name, side in sides.items():
                found = rate(side, batch, args.workers, args.seconds, args.cpu_time)
                best[name] = max(best[name], found)
        for name, value in best.items():
            ratio = value / best["one worker"]
            print(
                f"batch {batch:4d}  {args.workers} {name:22s} {value:9.0f} rows/s  {ratio:.2f} ×", flush=True
            )


if __name__ == "__main__":
    main()
