"""How many documents per second does a GPU learn from, against one core of the compiled kernels?

Command: ``HEADRACE_DATA=... python benchmarks/bench_topics_device.py [--device cuda] [--data nips] [--topics 100]
[--documents 50000]``, or ``--quick``: about 20 s. Each number comes as soon as it is known; a part that fails is
shown and left behind.

Wall time of whole fits (checking and copying the documents, `--passes` online passes with mini-batches of 1024, the
final bound), the best of the rounds, after one fit to warm up; and, behind it, of the passes alone, by the
difference between two lengths of fit. Held-out perplexity by document completion, mean over the rounds.
``--documents`` grows the collection: a new document is half of the words of each of two real ones. With ``--device
torch`` it runs on the CPU, where it is slower than the kernels.

One H200 against one core of its server, torch 2.11, --quick (NIPS, 6,000 documents, K=100, five passes):

    cuda   244,105 documents a second in passes (4.1 ms a mini-batch), 157,152 in whole fits, perplexity 1911
    cpu     10,496                             (95 ms a mini-batch),    7,660                , perplexity 1924
    23.3 x one core in passes, 20.5 x in whole fits; ready after 10.8 s, compiling included

Before the core's kernels took denormals for zero it was 8,090 and 6,155 documents a second there: 30.6 and 25.6 times.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.topics.learner import warm_up

sys.path.insert(0, str(Path(__file__).parent))
from bench_topics import FILES, completion, grown, read, split


def say(line: str) -> None:
    print(line, flush=True)


def attempt(name: str, work: Callable[[], None]) -> None:
    """One part of the benchmark; the next one runs whatever becomes of it."""
    try:
        work()
    except Exception:
        say(f"{name} FAILED:\n{traceback.format_exc()}")


class Race:
    """One core against a device, on the same documents."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        train, self.held_out = split(read(options.data))
        self.train = grown(train, options.documents)
        self.found: dict[str, tuple[float, float, float]] = {}
        mean = self.train.nnz / self.train.shape[0]
        say(
            f"{options.data}, {self.train.shape[0]} documents of {mean:.0f} distinct words, K={options.topics}, "
            f"{options.passes} passes, batch {options.batch}, numpy {np.__version__}"
        )

    def fit_s(self, device: str, passes: int, seed: int) -> tuple[float, Any]:
        model = headrace.LatentDirichletAllocation(
            self.options.topics, learning_method="online", batch_size=self.options.batch, max_iter=passes,
            random_state=seed, device=device,
        )  # fmt: skip
        start = time.perf_counter()
        model.fit(self.train)
        return time.perf_counter() - start, model

    def warm(self, device: str) -> None:
        start = time.perf_counter()
        if device == "cpu":
            warm_up()
        else:
            self.fit_s(device, 1, 0)
        say(f"{device}: ready after {time.perf_counter() - start:.1f} s (compiling included)")

    def measure(self, device: str, rounds: int) -> None:
        """Documents per second of a fit and of its passes alone, and the held-out perplexity."""
        passes, count = self.options.passes, self.train.shape[0]
        # Many passes where one is short: a difference of two lengths needs a length.
        many = passes if device in ("cpu", "torch") else 10 * passes
        whole, short, long, perplexities = [], [], [], []
        for number in range(rounds):
            short.append(self.fit_s(device, 1, number)[0])
            spent, model = self.fit_s(device, passes, number)
            whole.append(spent)
            long.append(self.fit_s(device, many, number)[0] if many > passes else spent)
            perplexities.append(completion(model.components_, self.held_out))
        alone = (many - 1) * count / (min(long) - min(short))
        self.found[device] = (passes * count / min(whole), alone, float(np.mean(perplexities)))
        batches = -(-count // self.options.batch)
        say(
            f"{device:6} {self.found[device][0]:9.0f} docs/s  passes alone {alone:9.0f} docs/s "
            f"({1000 * count / alone / batches:.2f} ms a mini-batch)  perplexity {self.found[device][2]:7.1f}"
        )

    def compare(self) -> None:
        core, device = self.found["cpu"], self.found[self.options.device]
        say(
            f"{self.options.device} is {device[1] / core[1]:.1f} x one core in passes, {device[0] / core[0]:.1f} x in "
            f"whole fits, perplexity {device[2] / core[2] - 1:+.2%}"
        )

    def learn_priors(self) -> None:
        """The priors learned by both, on half of the documents."""
        for device in ("cpu", self.options.device):
            model = headrace.LatentDirichletAllocation(
                self.options.topics, learning_method="online", batch_size=self.options.batch, max_iter=2,
                random_state=0, device=device, learn_priors=True,
            ).fit(self.train[::2])  # fmt: skip
            alpha, bound = model.doc_topic_prior_, model.bound_
            say(f"{device:6} learned priors from {alpha.min():.5f} to {alpha.max():.5f}, bound {bound:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few documents and passes; about 20 s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default="nips", choices=sorted(FILES))
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    if options.quick:
        options.documents, options.passes = options.documents or 6000, min(options.passes, 5)
    if hasattr(os, "sched_setaffinity") and options.device == "torch":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    race, rounds = Race(options), options.rounds
    attempt("the device's kernels", lambda: race.warm(options.device))
    attempt("the core's kernels", lambda: race.warm("cpu"))
    attempt("the device", lambda: race.measure(options.device, rounds))
    attempt("one core", lambda: race.measure("cpu", 1 if options.quick else rounds))
    attempt("the comparison", race.compare)
    attempt("learning priors", race.learn_priors)


if __name__ == "__main__":
    main()
