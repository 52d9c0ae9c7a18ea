"""How much faster are several threads than one, and do they learn as well?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_threads.py [--data nips] [--topics 100] [--jobs 1 2]``
(wall time: run it on an idle machine), or ``--quick``: about 15 s, one thread against most of the cores.

Five online passes (batch 64, so that every thread has many steps) with each number of threads, interleaved, the
best of the rounds. Speed-up is wall time of one thread over wall time of n: n would be perfect; of whole fits, with
checking the documents, drawing the start and the final bound, and of the passes alone, by the difference between
two lengths of fit. CPU is the CPU
time against one thread's: above 1 means that threads cost each other something. Perplexities (document
completion, mean over rounds) should differ by no more than seeds do, about 2 %.

Two idle cores of a Zen 5, NIPS grown to 6,000 documents, K=100, three rounds: 9,032 documents a second with one thread,
16,459 with two: 1.82 times in whole fits, 1.89 in the passes, CPU x 1.06, perplexity 1764.7 against 1778.7.
With denormals off and first steps in waves: 9,944 and 18,704, 1.88 times in whole fits, 1.92 in the passes, CPU x 1.03,
perplexity 1778.7 against 1788.7.

Sixteen virtual Intel cores, --quick, before the first steps came in waves: 5,737 documents a second with one thread,
39,337 with 14: 6.86 times in whole fits, 8.49 in the passes, CPU x 1.55, perplexity 1767.7 against 1783.3. Fourteen
processes that shared nothing made 16 times the documents of one on the same machine, and what 14 threads lost was
mostly work that one thread does not have (docs/log.md). With the waves it has not been measured there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.topics.learner import warm_up

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, grown, read, split


def fit(train: Any, topics: int, jobs: int, passes: int, seed: int) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds, and the model."""
    model = headrace.LatentDirichletAllocation(
        topics, learning_method="online", batch_size=64, max_iter=passes, random_state=seed, n_jobs=jobs
    )
    started, spent = time.perf_counter(), time.process_time()
    model.fit(train)
    return time.perf_counter() - started, time.process_time() - spent, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="few documents, two numbers of threads; about 15 s"
    )
    parser.add_argument("--data", default="nips", choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--jobs", type=int, nargs="+", default=[])
    parser.add_argument("--documents", type=int, default=0, help="grow the collection to so many")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.quick:
        options.documents, options.rounds = options.documents or 6000, 1
    # Two cores of a large machine are left to whatever else runs there.
    jobs = options.jobs or [1, cores - 2 if cores > 4 else cores]
    train, held_out = split(read(options.data))
    train = grown(train, options.documents)
    started = time.perf_counter()
    warm_up()
    print(f"{cores} cores, kernels ready after {time.perf_counter() - started:.1f} s", flush=True)
    whole: dict[int, list[float]] = {count: [] for count in jobs}
    short: dict[int, list[float]] = {count: [] for count in jobs}
    cpu: dict[int, list[float]] = {count: [] for count in jobs}
    perplexity: dict[int, list[float]] = {count: [] for count in jobs}
    for number in range(options.rounds):
        for count in jobs:
            # Short fits are repeated: a thread that starts late weighs more in them.
            for _ in range(1 if count == 1 else 3):
                short[count].append(fit(train, options.topics, count, 1, number)[0])
                wall, spent, model = fit(train, options.topics, count, options.passes, number)
                whole[count].append(wall)
                cpu[count].append(spent)
                print(
                    f"  threads={count}: one pass in {short[count][-1]:.2f} s, {options.passes} in {wall:.2f} s",
                    flush=True,
                )
            perplexity[count].append(model.held_out_perplexity(held_out))
    first = jobs[0]
    alone = {count: min(whole[count]) - min(short[count]) for count in jobs}
    for count in jobs:
        rate = options.passes * train.shape[0] / min(whole[count])
        print(
            f"{options.data} {train.shape[0]} documents K={options.topics} threads={count}  {rate:8.0f} docs/s"
            f"  speed-up {min(whole[first]) / min(whole[count]):5.2f}, passes alone {alone[first] / alone[count]:5.2f}"
            f"  CPU x {min(cpu[count]) / min(cpu[first]):4.2f}  perplexity {np.mean(perplexity[count]):7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
