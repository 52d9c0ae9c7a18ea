"""covtype on CPU cores and a GPU together: how fast to a training loss of 0.10, and what each part contributes.

    HEADRACE_DATA=... python benchmarks/bench_hogbatch_gpu.py [--quick] [--standin] [--only eager hogbatch ...]

54-512-512-512-2, float32, binary covtype. Batch 64 with step 0.1 and batch 512 with step 0.4, 16 and 8 local steps
between merges; CPU workers: all cores but two, batch 64. Times are training time; the loss is that of 8192 fixed
rows, looked at between epochs off the clock, and interpolated. Each number is printed when it is known, and a part
that fails prints its traceback and leaves the others alone.

Parts: `eager`, the usual loop (a DataLoader, autograd, `torch.optim.SGD`, batch 64), whose time to 0.10 is the
updates that the GPU worker alone needed (or, where it did not get there, had made by the compared loss) divided by
the loop's updates per second; `hogbatch`, the GPU worker alone and with the cores at batch 64; `large`, the same at
batch 512; `cores`, all CPU workers against one; `merging`, the GPU worker with merges and without; `auto`, the trial;
`big`, parameters of 210 MB.

``--quick`` takes about half a minute: the GPU worker alone gets 4 s at batch 64, and the cores and the GPU are timed to
the loss that it reached. ``--standin`` replaces the GPU by a CPU core, to try the script; its numbers mean nothing.

What an early prototype measured on an H200 with 16 cores: alone 7.2k updates/s at batch 64 (loss 0.129 after 12 s),
with CPU workers 10.5k (0.106); alone at batch 512 0.065, with CPU workers 0.063.

One H200 with 16 cores, torch 2.11, --quick:

    the usual eager loop                  573 updates/s
    GPU alone, batch 64                   8,415 updates/s, loss 0.202 after 4.3 s
    GPU and 14 CPU workers, batch 64      8,083 and 6,315 updates/s, loss 0.202 after 2.85 s: 1.52 × as fast as alone,
                                          22 × the eager loop (extrapolated)
    GPU alone, batch 512, step 0.4        5,761 updates/s, loss 0.10 after 3.5 s: 62 × the eager loop (extrapolated)
    auto                                  chose the GPU alone at 512, in 3.8 s
    14 CPU workers against one            9.8, 9.6 and 9.1 × merging every 1, 16 and 64 steps (11 wanted); 14 processes
                                          that only count make 9.5 × what one makes there, 4 make 3.1 ×
    merging every 16 or 8 steps           costs -1.5 and 0.7 % of the GPU worker's time
    210 MB of parameters, every 8 steps   1,098 instead of 1,182 updates/s (7.1 %) in runs of 1.8 s, which end with a
                                          wait for the last exchange; 13.6 merges a second

The processes that share nothing, in `cores`, and runs of 4.8 s in `big` came after this measurement.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headrace.engine.chain import Chain
from headrace.engine.hogbatch import HogbatchOptions, Observer, OptimiserSpec, run_hogbatch
from headrace.engine.hogbatch.options import cores
from headrace.engine.hogbatch.trial import candidates, run_trial
from headrace.papers.hogbatch import Problem, covtype, look, network, run_usual


@dataclass
class Found:
    """Losses at training times, at the ends of epochs."""

    seconds: list[float] = field(default_factory=lambda: [0.0])
    losses: list[float] = field(default_factory=lambda: [0.69])
    updates: list[int] = field(default_factory=lambda: [0])
    rates: dict[str, float] = field(default_factory=dict)

    def to(self, target: float, what: list[float] | list[int] | None = None) -> float | None:
        """Seconds (or another count) until the loss was reached, on the line between two looks."""
        values = self.seconds if what is None else what
        for i in range(1, len(self.losses)):
            if self.losses[i] <= target:
                part = (self.losses[i - 1] - target) / max(self.losses[i - 1] - self.losses[i], 1e-12)
                return values[i - 1] + min(1.0, max(0.0, part)) * (values[i] - values[i - 1])
        return None


class Looks(Observer):
    """Looks at the loss between epochs and ends the run at a loss or a time."""

    def __init__(
        self, problem: Problem, module: nn.Module, target: float, seconds: float, device: str
    ) -> None:
        self.found, self._problem, self._module = Found(), problem, module
        self._target, self._seconds, self._device = target, seconds, device

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "epoch":
            self._row = row

    def epoch_ended(self, epoch: int) -> bool:
        loss = look(self._problem, copy.deepcopy(self._module).to(self._device))
        self.found.seconds.append(self._row["seconds"])
        self.found.updates.append(self._row["updates"])
        self.found.losses.append(loss)
        return loss <= self._target or self._row["seconds"] >= self._seconds


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cpu" if args.standin else "cuda"
        self.chip: dict[str, Any] = {"standin": 1} if args.standin else {"cuda": 1}
        self.cpu = max(1, cores() - 2)
        self.problem = covtype()
        self.columns = {"x": self.problem.x, "y": self.problem.y}
        self.alone: Found | None = None
        self.eager_rate: float | None = None

    def options(self, batch: int, lr: float, steps: int, n_cpu: int, **more: Any) -> HogbatchOptions:
        given: dict[str, Any] = {
            **self.chip,
            "cpu": n_cpu,
            "algorithm": "hogbatch" if n_cpu else "minibatch",
            "device_batch_size": batch,
            "device_local_steps": steps,
            "scaling": "linear",  # 0.1 at batch 64 becomes lr at the device's batch
            "optimiser": OptimiserSpec(lr=lr * 64 / batch),
            "epochs": 1_000_000,
        }
        return HogbatchOptions(**{**given, **more})

    def train(self, name: str, options: HogbatchOptions, seconds: float, target: float) -> Found:
        module = network(self.problem, 0)
        looks = Looks(self.problem, module, target, seconds, self.device)
        result = run_hogbatch(module, self.columns, self.problem.loss, options, looks)
        found = looks.found
        rates = ", ".join(
            f"{w.name} {w.updates / result.seconds:.0f}/s at work {w.utilisation:.0%}"
            for w in result.workers
            if not w.name.startswith("cpu")
        )
        cpu = sum(w.updates for w in result.workers if w.name.startswith("cpu")) / result.seconds
        reached = found.to(target)
        says = f"{reached:6.2f} s to {target:g}" if reached is not None else f"{target:g} not reached"
        say(
            f"{name:34s} {says}; {found.losses[-1]:.4f} after {found.seconds[-1]:.2f} s; {rates}; cpu {cpu:.0f}/s"
        )
        return found

    # The parts.

    def eager(self) -> None:
        """The usual loop's updates per second."""
        curve = run_usual(self.problem, network(self.problem, 0), self.args.eager_s, self.device, 1)
        self.eager_rate = curve.updates / curve.seconds[-1]
        say(
            f"usual eager loop, batch 64: {self.eager_rate:.0f} updates/s; "
            f"loss {curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s"
        )

    def hogbatch(self) -> None:
        """Equal batch 64: the GPU alone, then with the cores, to the same loss."""
        target, seconds = self.args.target, self.args.seconds
        alone = self.alone = self.train("GPU alone, batch 64", self.options(64, 0.1, 16, 0), seconds, target)
        level = max(target, alone.losses[-1])
        both = self.train(
            f"GPU and {self.cpu} CPU, batch 64", self.options(64, 0.1, 16, self.cpu), 1.5 * seconds, level
        )
        self.against(both, alone, level, "GPU alone at equal batch", 1.2)
        self.against_eager(both, level, f"GPU and {self.cpu} CPU, batch 64")

    def large(self) -> None:
        """Batch 512 with step 0.4: a tuned GPU, with and without the cores."""
        target, seconds = self.args.target, self.args.seconds * (1.5 if self.args.quick else 1)
        alone = self.train("GPU alone, batch 512, step .4", self.options(512, 0.4, 8, 0), seconds, target)
        self.against_eager(alone, target, "GPU alone, batch 512")
        if not self.args.quick:
            both = self.train(
                f"GPU and {self.cpu} CPU, 512 and 64", self.options(512, 0.4, 8, self.cpu), seconds, target
            )
            self.against(both, alone, target, "GPU alone at 512", 1.3)

    def against(self, found: Found, other: Found, level: float, name: str, goal: float) -> None:
        mine, theirs = found.to(level), other.to(level)
        if mine and theirs:
            say(f"  -> {theirs / mine:.2f} × faster to {level:.4f} than the {name} (target ≥ {goal})")
        else:
            say(f"  -> the loss {level:.4f} was not reached by both; no ratio to the {name}")

    def against_eager(self, found: Found, level: float, name: str) -> None:
        mine = found.to(level)
        if self.eager_rate is None or self.alone is None or mine is None:
            say(f"  -> no ratio of {name} to the eager loop")
            return
        needed = self.alone.to(level, self.alone.updates)
        if needed is None:
            made, at = self.alone.updates[-1], self.alone.losses[-1]
            mine_at = found.to(at)
            if mine_at:
                ratio = made / self.eager_rate / mine_at
                say(
                    f"  -> {name}: {ratio:.1f} × the eager loop to {at:.4f} ({made} updates at its rate; target ≥ 8)"
                )
            return
        eager_s = needed / self.eager_rate
        say(f"  -> {name}: {eager_s / mine:.1f} × the eager loop to {level:.4f}, extrapolated to {eager_s:.0f} s "
            f"({needed:.0f} updates at its rate; target ≥ 8, moonshot ≥ 12)")  # fmt: skip

    def rate(self, options: HogbatchOptions) -> tuple[float, float]:
        """Rows and device updates per second."""
        result = run_hogbatch(network(self.problem, 0), self.columns, self.problem.loss, options)
        device = sum(w.updates for w in result.workers if not w.name.startswith("cpu"))
        return result.rows / result.seconds, device / result.seconds

    def cores(self) -> None:
        """All CPU workers against one, at batch 64, and what as many processes that share nothing do."""
        usual: dict[str, Any] = {"algorithm": "hogwild", "epochs": 1_000_000, "seconds": self.args.cores_s}
        usual |= {"optimiser": OptimiserSpec(lr=0.05), "compiled": True, "scaling": "off"}
        one, _ = self.rate(HogbatchOptions(cpu=1, **usual))
        say(f"one CPU worker, batch 64: {one:.0f} rows/s")
        for every in (1, 16, 64):
            many, _ = self.rate(HogbatchOptions(cpu=self.cpu, merge_every=every, processes=False, **usual))
            say(
                f"{self.cpu} CPU workers, merging every {every}: {many:.0f} rows/s, {many / one:.2f} × (target ≥ 11)"
            )
        alone, together = (sum(apart(n, self.args.cores_s)) for n in (1, self.cpu))
        say(f"{self.cpu} processes that share nothing, the same steps: {together / alone:.2f} × one of them")

    def merging(self) -> None:
        """What merging costs the GPU worker, alone and beside CPU workers."""
        rates = {}
        for steps in (1_000_000, 16, 8):
            _, rates[steps] = self.rate(self.options(64, 0.1, steps, 0, seconds=self.args.cores_s))
            cost = 1 - rates[steps] / rates[1_000_000]
            say(
                f"GPU alone, batch 64, merging every {steps}: {rates[steps]:.0f} updates/s, cost {cost:.1%} (≤ 5 %)"
            )

    def big(self) -> None:
        """210 MB of parameters: exchanges take a tenth of a second each, and the steps must not wait for them."""
        size = 7200 if not self.args.standin else 720
        rates = {}
        for steps in (1_000_000, 8):
            first = nn.Linear(self.problem.x.shape[1], size)
            module = nn.Sequential(first, nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
            options = self.options(
                64, 0.01, steps, 0, seconds=8 * self.args.cores_s
            )  # the last merge is waited for
            result = run_hogbatch(module, self.columns, F.cross_entropy, options)
            rates[steps] = result.updates / result.seconds
            merges = sum(w.merges for w in result.workers) / result.seconds
            cost = 1 - rates[steps] / rates[1_000_000]
            say(f"210 MB of parameters, merging every {steps}: {rates[steps]:.0f} updates/s, {merges:.1f} merges/s, "
                f"cost {cost:.1%}")  # fmt: skip

    def auto(self) -> None:
        """What the trial chooses."""
        choices = candidates(self.options(512, 0.4, 8, 0, algorithm="hogbatch"), cores(), 1)
        if self.args.standin:
            choices = {"GPU": self.options(512, 0.4, 8, 0), "both": self.options(512, 0.4, 8, self.cpu)}
        began = time.perf_counter()
        verdict = run_trial(
            network(self.problem, 0), self.columns, self.problem.loss, choices, self.args.trial_s
        )
        say(f"auto, after {time.perf_counter() - began:.1f} s: {verdict.reason}")
        if not self.args.quick:
            self.train("auto's choice", verdict.options, self.args.seconds, self.args.target)


def apart(processes: int, seconds: float) -> list[float]:
    """Rows a second of each of so many processes that train a network of their own at the same time."""
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(processes), context.Queue()
    made = [context.Process(target=one_apart, args=(start, found, seconds)) for _ in range(processes)]
    for process in made:
        process.start()
    rates = [found.get() for _ in made]
    for process in made:
        process.join()
    return rates


def one_apart(start: Any, found: Any, seconds: float) -> None:
    """The compiled steps of a CPU worker on a network and rows of its own."""
    torch.set_num_threads(1)
    widths = ((54, 512), (512, 512), (512, 512))
    layers: list[nn.Module] = [part for pair in widths for part in (nn.Linear(*pair), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(512, 2))
    chain = Chain.of(net, F.cross_entropy)[0]
    assert chain is not None
    bound = chain.bind({name: p.detach() for name, p in net.named_parameters()})
    bound.fuse()
    x, y = torch.randn(64 * 64, 54).split(64), torch.randint(0, 2, (64 * 64,)).split(64)
    bound.step(x[0], y[0], 0.05, 0.0)
    start.wait()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        bound.step(x[steps % 64], y[steps % 64], 0.05, 0.0)
        steps += 1
    found.put(64 * steps / (time.perf_counter() - began))


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--target", type=float, default=0.10)
    parser.add_argument("--standin", action="store_true")
    parts = ("eager", "cores", "hogbatch", "merging", "auto", "large", "big")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    args.seconds = args.seconds or (4.0 if args.quick else 40.0)
    args.eager_s, args.cores_s, args.trial_s = (1.5, 0.6, 2.5) if args.quick else (8.0, 3.0, 5.0)
    began = time.perf_counter()
    bench = Bench(args)
    say(f"data after {time.perf_counter() - began:.1f} s; {cores()} cores, {bench.cpu} CPU workers")
    for name in args.only:
        began = time.perf_counter()
        part: Callable[[], None] = getattr(bench, name)
        try:
            part()
        except Exception:
            traceback.print_exc()
        say(f"[{name}: {time.perf_counter() - began:.1f} s]")


if __name__ == "__main__":
    main()
