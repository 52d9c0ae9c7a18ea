"""What does communication cost, and how many workers pay?

    python benchmarks/bench_cluster.py [--workers 3] [--epochs 6]

First: so many workers on this machine train an MLP 54-512-512-2 (float32, batch 64, 1.2 MB of parameters) through
Ray; then the same processes run the same steps without pulling or pushing. Both sides in one run; compared is CPU
time per step, since the workers may outnumber the cores. Lost throughput is 1 − (alone / together). Second: the
simulated speed-up to 64 workers on slow links, with the step, message and merge times measured here and delays
added on top, B planned for 10 % communication.

Two cores of a shared machine under a load of 15 to 26, Python 3.11, torch 2.13, Ray 2.60; B is planned by a probe
before the first step and anew while the run goes on:

| | ``--epochs 6`` (2,826 steps) | ``--epochs 24`` (11,304 steps) |
|---|---|---|
| B at the end, pushes | 78, 70 | 156, 105 |
| CPU per step, alone | 1.27 ms | 1.10 ms |
| the same processes with pulling and pushing | 1.43 ms: 11 % lost | 1.09 ms: nothing lost beyond noise |
| and everything that the master's process did | – | 1.24 ms: 11.4 % lost |
| share of wall time in exchanges | 9.8 % | 8.0 % |

The master's process took 16 ms for each push there, most of it presumably for being asked how far it is, five times
a second on a machine where the run took long; it is asked once a second now, and that is not in the table. An earlier
version, which began with B = 16 and planned only while training, lost 20 % in six epochs.

Speed-up per worker in the run of 24 epochs, simulated, with those 16 ms as the master's time for a push. B is planned
so that communication takes a tenth of the time and the master is busy for at most 0.7 of it. All of it is within the
paper's bound: 64 workers need T of 4,096 steps, and the shortest simulated run of 64 has 3.3 million.

| link, one way | B for 1 and 64 workers | 1 | 4 | 16 | 32 | 64 workers |
|---|---|---|---|---|---|---|
| 5 ms | 216, 1329 | 0.91 | 0.90 | 0.90 | 0.93 | 0.95 |
| 20 ms | 462, 1302 | 0.91 | 0.90 | 0.88 | 0.90 | 0.93 |
| 100 ms | 1776, 1776 | 0.91 | 0.90 | 0.89 | 0.89 | 0.89 |

With B planned for communication alone the master would be busy all the time at 64 workers on the 5 ms link (0.58 in an
earlier run).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from headrace.cluster.actors import WorkerActor
from headrace.cluster.connect import connected
from headrace.cluster.curve import Costs, speed_up
from headrace.cluster.driver import ClusterResult, Observer, run_cluster
from headrace.cluster.options import ClusterOptions
from headrace.cluster.planning import plan_local_steps
from headrace.cluster.sending import sendable
from headrace.cluster.training import Job
from headrace.engine.options import FitOptions
from headrace.engine.setup import open_data

SIZES = (1, 2, 4, 8, 16, 32, 64)


def job_for(workers: int, epochs: int) -> Job:
    torch.manual_seed(0)
    x, y = torch.randn(30_000, 54), torch.randint(0, 2, (30_000,))
    options = FitOptions(epochs=epochs, batch_size=64, lr=0.01)
    module = nn.Sequential(nn.Linear(54, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
    source, _, _ = open_data((x, y), options)
    return Job(
        module=module,
        data=sendable((x, y), source),
        options=options,
        world_size=workers,
        passes=epochs,
        total_steps=epochs * 469,
    )


def together(job: Job) -> ClusterResult:
    with tempfile.TemporaryDirectory() as folder:
        return run_cluster(job, ClusterOptions(workers=job.world_size), Observer(), folder=Path(folder))


def alone(ray: object, job: Job) -> float:
    """CPU seconds per step of the same processes without a master."""
    actor = ray.remote(num_cpus=1)(WorkerActor)  # type: ignore[attr-defined]
    workers = [actor.remote(f"alone-{rank}", rank) for rank in range(job.world_size)]
    found = ray.get([worker.alone.remote(job) for worker in workers])  # type: ignore[attr-defined]
    return sum(cpu_s for cpu_s, _ in found) / sum(steps for _, steps in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    job = job_for(arguments.workers, arguments.epochs)
    with connected(ClusterOptions(workers=arguments.workers)) as ray:
        result = together(replace(job))
        own_s = alone(ray, job)
    pushes = sum(member[2] for member in result.workers.values())
    together_s = result.cpu_s / result.steps
    master_s = result.master_cpu_s / pushes
    print(
        f"{arguments.workers} workers, {result.steps} steps, {pushes} pushes, B = {result.local_steps} at the end"
    )
    print(f"CPU per step: {own_s * 1e3:.2f} ms alone, {together_s * 1e3:.2f} ms with pulling and pushing")
    whole_s = together_s + result.master_cpu_s / result.steps
    print(f"with the master's process, {master_s * 1e3:.2f} ms for a push: {whole_s * 1e3:.2f} ms")
    print(f"throughput lost: {1 - own_s / whole_s:.1%}; without the master {1 - own_s / together_s:.1%}")
    print(f"share of wall time in exchanges: {result.communication:.1%}; staleness {result.staleness}")
    print("\nlink, one way   B          " + "".join(f"{n:>8}" for n in SIZES) + "  workers")
    for message_s in (0.005, 0.02, 0.1):
        costs = Costs(step_s=own_s, message_s=message_s, merge_s=master_s)
        exchange_s = 2 * message_s + master_s
        planned = [plan_local_steps(own_s, exchange_s, workers=n, merge_s=master_s).value for n in SIZES]
        points = [speed_up(costs, n, local_steps=b) for n, b in zip(SIZES, planned, strict=True)]
        row = "".join(f"{point.speed_up / point.workers:8.2f}" for point in points)
        print(f"{message_s * 1e3:9.0f} ms {planned[0]:4}–{planned[-1]:<5} {row}  × workers")


if __name__ == "__main__":
    main()
