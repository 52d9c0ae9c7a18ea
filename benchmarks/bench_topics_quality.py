"""How long does collapsed learning take to the perplexity of 200 sweeps of collapsed Gibbs sampling?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_quality.py [--data ap kos] [--topics 50]``
(needs tomotopy).

tomotopy samples 50, 100 and 200 sweeps in one thread (priors 0.1 and 0.01, its own learning of the document
prior). Then collapsed learning makes passes with the same priors until its held-out perplexity is no higher.
Document completion on 10 % of the documents; each side's topics are judged under its own document prior by the
same code; a word that the documents to learn from do not hold has the count 0.01 on both sides. CPU time. A ratio
above one means that tomotopy needs longer.

Two shared cores with AVX-512, tomotopy 0.14.0, K=50: AP 7.09 CPU-s for perplexity 2487.3, headrace 0.15 CPU-s (2
passes) for 2451.1; KOS 7.21 CPU-s for 1589.2, headrace 0.44 CPU-s (6 passes) for 1587.1. tomotopy's topics are
those of its last sweep; averaging several would improve them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from headrace.papers.dpsvi_learners import headrace_collapsed, likelihood, tomotopy
from headrace.topics.learner import warm_up

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, read, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", default=["ap", "kos"], choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--passes", type=int, default=200)
    options = parser.parse_args()
    warm_up()
    for name in options.data:
        train, held_out = split(read(name))
        spent, sampled = 0.0, tomotopy(train, options.topics, 0, sweeps=50)
        for sweeps in (50, 100, 150, 200):
            start = time.process_time()
            topics = next(sampled)
            spent += time.process_time() - start
            goal = math.exp(-likelihood(topics, held_out))
            print(
                f"{name} tomotopy {sweeps:4} sweeps  {spent:6.2f} CPU-s  perplexity {goal:7.1f}", flush=True
            )
        own, reached = 0.0, math.inf
        for passes, _ in enumerate(range(options.passes), start=1):
            if passes == 1:
                learner = headrace_collapsed(train, options.topics, 0)
            start = time.process_time()
            topics = next(learner)
            own += time.process_time() - start
            reached = math.exp(-likelihood(topics, held_out))
            if reached <= goal:
                break
        print(
            f"{name} headrace {passes:4} passes  {own:6.2f} CPU-s  perplexity {reached:7.1f}"
            f"  tomotopy needs {spent / own:.1f} x as long" + ("" if reached <= goal else " - NOT REACHED"),
            flush=True,
        )


if __name__ == "__main__":
    main()
