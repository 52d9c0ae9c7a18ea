"""How many documents per second does a GPU learn from, against one core of the compiled kernels?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_device.py [--device cuda] [--data nips] [--topics 100]
[--documents 50000]``

Wall time of whole fits (checking and copying the documents, `--passes` online passes with mini-batches of 1024, the
final bound), the best of the rounds, after one fit to warm up; and, behind it, of the passes alone, by the
difference between two lengths of fit. Held-out perplexity by document completion, mean over the rounds.
``--documents`` grows the collection: a new document is half of the words of each of two real ones. With ``--device
torch`` it runs on the CPU, where it is slower than the kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import headrace

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, grown, read, split


def fit_s(device: str, train: Any, topics: int, batch: int, passes: int, seed: int) -> tuple[float, Any]:
    model = headrace.LatentDirichletAllocation(
        topics, learning_method="online", batch_size=batch, max_iter=passes, random_state=seed, device=device
    )
    start = time.perf_counter()
    model.fit(train)
    return time.perf_counter() - start, model


def rates(
    device: str, train: Any, held_out: Any, options: argparse.Namespace, batch: int
) -> tuple[float, float, float]:
    """Documents per second of a fit, of its passes alone, and the held-out perplexity."""
    whole: list[float] = []
    short: list[float] = []
    perplexity = 0.0
    fit_s(device, train, options.topics, batch, 1, 0)
    for number in range(options.rounds):
        short.append(fit_s(device, train, options.topics, batch, 1, number)[0])
        spent, model = fit_s(device, train, options.topics, batch, options.passes, number)
        whole.append(spent)
        perplexity += model.held_out_perplexity(held_out) / options.rounds
    count = train.shape[0]
    alone = (options.passes - 1) * count / (min(whole) - min(short))
    return options.passes * count / min(whole), alone, perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default="nips", choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024, help="of the device; the core's is 1024")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and options.device == "torch":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    train, held_out = split(read(options.data))
    train = grown(train, options.documents)
    core = rates("cpu", train, held_out, options, 1024)
    device = rates(options.device, train, held_out, options, options.batch)
    print(f"{options.data}, {train.shape[0]} documents, K={options.topics}, {options.passes} passes")
    for name, (whole, alone, perplexity) in (("one core", core), (options.device, device)):
        print(f"{name:9} {whole:9.0f} docs/s  passes alone {alone:9.0f}  perplexity {perplexity:7.1f}")
    print(
        f"{device[0] / core[0]:.1f} x one core, passes alone {device[1] / core[1]:.1f} x, "
        f"perplexity {device[2] / core[2] - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
