"""How much faster are several threads than one, and do they learn as well?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_threads.py [--data nips] [--topics 100] [--jobs 1 2]``
(wall time: run it on an idle machine).

Five online passes (batch 64, so that every thread has many steps) with each number of threads, interleaved, the
best of the rounds. Speed-up is wall time of one thread over wall time of n: n would be perfect. CPU is the CPU
time against one thread's: above 1 means that threads cost each other something. Perplexities (document
completion, mean over rounds) should differ by no more than seeds do, about 2 %.

Two shared cores, never idle while this was measured, so wall times favour more threads and the CPU column is the
one to trust (KOS, K=50, four rounds): 2 threads: speed-up 1.86, CPU x 0.97, perplexity 1886.7 against 1889.4.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import headrace
from headrace.topics.learner import warm_up

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, grown, read, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="nips", choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--documents", type=int, default=0, help="grow the collection to so many")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    train, held_out = split(read(options.data))
    train = grown(train, options.documents)
    warm_up()
    wall: dict[int, list[float]] = {jobs: [] for jobs in options.jobs}
    cpu: dict[int, list[float]] = {jobs: [] for jobs in options.jobs}
    perplexity: dict[int, list[float]] = {jobs: [] for jobs in options.jobs}
    for number in range(options.rounds):
        for jobs in options.jobs:
            model = headrace.LatentDirichletAllocation(
                options.topics, learning_method="online", batch_size=64, max_iter=options.passes,
                random_state=number, n_jobs=jobs,
            )  # fmt: skip
            started, spent = time.perf_counter(), time.process_time()
            model.fit(train)
            wall[jobs].append(time.perf_counter() - started)
            cpu[jobs].append(time.process_time() - spent)
            perplexity[jobs].append(model.held_out_perplexity(held_out))
    first = options.jobs[0]
    for jobs in options.jobs:
        rate = options.passes * train.shape[0] / min(wall[jobs])
        print(
            f"{options.data} {train.shape[0]} documents K={options.topics} threads={jobs}  {rate:8.0f} docs/s"
            f"  speed-up {min(wall[first]) / min(wall[jobs]):5.2f}  CPU x {min(cpu[jobs]) / min(cpu[first]):4.2f}"
            f"  perplexity {np.mean(perplexity[jobs]):7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
