"""How many documents per second does the batched torch E-step learn from, against one core of the kernels?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_device.py [--device cuda] [--data nips] [--topics 100]``

Wall time of five online passes, batch 1024, the best of three, after one pass to warm up. Not run on a GPU yet:
the table below it is to be filled there. With ``--device torch`` it runs on the CPU, where it is slower than the
kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import headrace

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, read, split

PASSES = 5


def rate(device: str, train: object, held_out: object, topics: int, rounds: int) -> tuple[float, float]:
    best, perplexity = float("inf"), 0.0
    for number in range(rounds):
        model = headrace.LatentDirichletAllocation(
            topics, learning_method="online", batch_size=1024, random_state=number, device=device,
            total_samples=train.shape[0],  # type: ignore[attr-defined]
        )  # fmt: skip
        model.partial_fit(train)
        start = time.perf_counter()
        for _ in range(PASSES):
            model.partial_fit(train)
        best = min(best, (time.perf_counter() - start) / PASSES)
        perplexity += model.held_out_perplexity(held_out) / rounds
    return train.shape[0] / best, perplexity  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default="nips", choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    train, held_out = split(read(options.data))
    core, core_perplexity = rate("cpu", train, held_out, options.topics, options.rounds)
    device, perplexity = rate(options.device, train, held_out, options.topics, options.rounds)
    print(f"one core {core:8.0f} docs/s  perplexity {core_perplexity:7.1f}")
    print(
        f"{options.device:8} {device:8.0f} docs/s  perplexity {perplexity:7.1f}  {device / core:.2f} x one core"
    )


if __name__ == "__main__":
    main()
