"""What does communication cost, and how many workers pay?

    python benchmarks/bench_cluster.py [--workers 3] [--epochs 6]

First: so many workers on this machine train an MLP 54-512-512-2 (float32, batch 64, 1.2 MB of parameters) through
Ray; then the same processes run the same steps without pulling or pushing. Both sides in one run; compared is CPU
time per step, since the workers may outnumber the cores. Lost throughput is 1 − (alone / together). Second: the
simulated speed-up to 64 workers on slow links, with the step, message and merge times measured here and delays
added on top, B planned for 10 % communication.

Two idle cores, Python 3.11, torch 2.13, Ray 2.60, ``--epochs 24`` (11,304 steps, 112 pushes); B is planned by a probe
before the first step and anew while the run goes on (134 at the end):

| | CPU per step |
|---|---|
| alone | 0.79 ms |
| the same processes with pulling and pushing | 0.86 ms: 8.0 % lost |
| and everything that the master's process did, 5.2 ms a push | 0.91 ms: 13.2 % lost |

Of the master's 13.2 - 8.0 points two fifths were its start (0.2 s before the first worker joins) and another part
Ray's books and Python's collector. Neither is in the number since: the master's time counts from the first worker on,
as the workers' does, and the books are off in clusters started here. At load 10, not quiet, 24 epochs (131 pushes) then
lost 6.7 % with the master's process, 4.7 ms a push, and 1.6 % without. On idle cores (88 pushes, B = 156 at the end):
0.76 ms alone, 0.83 with pulling and pushing (7.7 % lost), 0.86 with the master's 4.6 ms a push (11.5 %).

Exchanges took 9.4 % of the wall time. On a busy machine six epochs (2,826 steps, 70 pushes) lost 11 % without the
master.

Speed-up per worker in the same run, simulated. B is planned so that communication takes a tenth of the time and the
master is busy for at most 0.7 of it. All of it is within the paper's bound: 64 workers need T of 4,096 steps, and
the shortest simulated run of 64 has millions.

| link, one way | B | 1 | 2 | 4 | 8 | 16 | 32 | 64 workers |
|---|---|---|---|---|---|---|---|---|
| 5 ms | 173 to 580 | 0.91 | 0.91 | 0.90 | 0.89 | 0.88 | 0.90 | 0.94 |
| 20 ms | 513 to 542 | 0.91 | 0.91 | 0.90 | 0.90 | 0.90 | 0.89 | 0.87 |
| 100 ms | 2330 | 0.91 | 0.91 | 0.90 | 0.90 | 0.90 | 0.88 | 0.89 |

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
