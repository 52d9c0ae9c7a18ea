"""Do two workers on two cores make nearly twice the updates of one, and which way of sharing does it take?

    python benchmarks/bench_hogbatch.py [--seconds 1.0] [--batches 1 16 64] [--rounds 3]

54-512-512-512-2, float32, plain SGD through the chain. Rows: one worker; two threads and two processes that
update the shared parameters directly; two of each with replicas merged every 16 and 64 steps. Each
configuration trains for the given time, in turn, round by round; the best round counts.

2 cores of a virtual Sapphire Rapids server that others used too, torch 2.13.0, threads, two rounds of 1.2 s:

    batch    1  one worker                1866 rows/s  1.00 ×     batch   16  one worker      16413  1.00 ×
    batch    1  2 threads, direct         1515 rows/s  0.81 ×     batch   16  2, direct       20517  1.25 ×
    batch    1  2 threads, K=16           1368 rows/s  0.73 ×     batch   16  2, K=16         19755  1.20 ×
    batch    1  2 threads, K=64           1562 rows/s  0.84 ×     batch   16  2, K=64         20536  1.25 ×
    batch    4  one worker                6027 rows/s  1.00 ×     batch   64  one worker      30366  1.00 ×
    batch    4  2 threads, direct         5301 rows/s  0.88 ×     batch   64  2, direct       51425  1.69 ×
    batch    4  2 threads, K=16           5294 rows/s  0.88 ×     batch   64  2, K=16         45396  1.49 ×
    batch    4  2 threads, K=64           5623 rows/s  0.93 ×     batch   64  2, K=64         43013  1.42 ×

Compiled loops at one row with two workers, and processes, came later and were not measured on a quiet machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from bench_chain import WIDTHS, network

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch

SIDES: dict[str, dict[str, object]] = {
    "one worker": {"cpu": 1},
    "2 threads, direct": {"cpu": 2, "merge_every": 1, "processes": False},
    "2 threads, K=16": {"cpu": 2, "merge_every": 16, "processes": False},
    "2 threads, K=64": {"cpu": 2, "merge_every": 64, "processes": False},
    "2 processes, direct": {"cpu": 2, "merge_every": 1, "processes": True},
    "2 processes, K=16": {"cpu": 2, "merge_every": 16, "processes": True},
}


def rate(side: dict[str, object], batch: int, seconds: float) -> float:
    """Rows per second of training time."""
    x, y = torch.randn(65536, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (65536,))
    options = HogbatchOptions(
        **{"batch_size": batch, "epochs": 10_000, "seconds": seconds, "scaling": "off", **side},  # type: ignore[arg-type]
        optimiser=OptimiserSpec(lr=1e-3),
    )
    result = run_hogbatch(network(), {"x": x, "y": y}, F.cross_entropy, options)
    return result.rows / result.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads-only", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sides = {name: side for name, side in SIDES.items() if not (args.threads_only and side.get("processes"))}
    for batch in args.batches:
        best = dict.fromkeys(sides, 0.0)
        for _ in range(args.rounds):
            for name, side in sides.items():
                best[name] = max(best[name], rate(side, batch, args.seconds))
        for name, value in best.items():
            print(f"batch {batch:4d}  {name:20s} {value:8.0f} rows/s  {value / best['one worker']:.2f} ×")


if __name__ == "__main__":
    main()
