"""DPSGD on a simulated cluster: the loss against steps and time, how stale pushes are, and the speed-up.

Training is real: an MLP (non-convex) on synthetic classes, each worker with its shard and the engine's own steps. The
clock is not: step, message and merge times are made up (`STEP_S` and so on, of the size measured on one machine with
a fast link), so that 64 workers fit into one process. What the paper calls linear speed-up is a loss that depends on
the steps of all workers together alone, at n times the steps per second.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.cluster.compress import Compressor
from headrace.cluster.curve import Costs, speed_up
from headrace.cluster.holder import Holder
from headrace.cluster.layout import Layout
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.planning import plan_local_steps, warnings_for
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.training import Job, TrainingSteps
from headrace.cluster.transport import Conversation, Service, converse
from headrace.engine.options import FitOptions
from headrace.papers import PaperOptions
from headrace.report.page import Page, Series

STEP_S, MESSAGE_S, MERGE_S = 0.001, 0.002, 0.0002
LOCAL_STEPS, LR = 2, 0.03
BOLD_LOCAL_STEPS, BOLD_LR = 8, 0.1
SIZES = (1, 2, 4, 8, 16)
CURVE = (1, 2, 4, 8, 16, 32, 64)
ROWS = 4096


def run(options: PaperOptions) -> Path:
    """All experiments; the page's path."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other at products this small
    try:
        return _run(options)
    finally:
        torch.set_num_threads(threads)


def _run(options: PaperOptions) -> Path:
    steps = max(400, min(12_000, int(options.seconds * 100)))
    runs = {n: train(n, steps) for n in SIZES}
    bold = train(max(SIZES), min(steps, 2000), lr=BOLD_LR, local_steps=BOLD_LOCAL_STEPS)
    planned = plan_local_steps(STEP_S, 2 * MESSAGE_S + MERGE_S)
    costs = Costs(step_s=STEP_S, message_s=MESSAGE_S, merge_s=MERGE_S)
    curve = [speed_up(costs, n, local_steps=planned.value) for n in CURVE]
    numbers = {
        "steps": steps,
        "runs": {str(n): found for n, found in runs.items()},
        "speed_up": {str(point.workers): point.speed_up for point in curve},
    }
    (options.out / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")
    page = Page("DPSGD on a simulated cluster", subtitle=f"an MLP, {steps:,} steps of all workers together")
    page.text(
        f"A step takes {STEP_S * 1e3:g} ms, a message {MESSAGE_S * 1e3:g} ms, a merge {MERGE_S * 1e3:g} ms of "
        f"simulated time; {LOCAL_STEPS} local steps between two pushes. Differences are summed as they come."
    )
    for n in SIZES:
        for sentence in warnings_for(steps, workers=n):
            page.text(sentence)
    for title, key, label in (("Loss against steps", "steps", "steps of all workers"),
                              ("Loss against time", "seconds", "simulated seconds")):  # fmt: skip
        lines = [Series(f"{n} workers", found[key], found["loss"]) for n, found in runs.items()]
        page.lines(title, lines, x_label=label, y_label="training loss", log_y=True)
    page.table(
        ["workers", "last loss", "mean age of a push", "oldest"],
        [[n, round(r["loss"][-1], 4), round(r["mean_age"], 2), r["oldest"]] for n, r in runs.items()],
        caption="Age: versions that a merged push had missed; about the number of other workers. Low loss is good.",
    )
    oldest = max(found["oldest"] for found in runs.values())
    ages = [Series(f"{n} workers", None, [found["ages"].get(age, 0.0) for age in range(oldest + 1)])
            for n, found in runs.items()]  # fmt: skip
    page.bars(
        "How stale pushes were",
        [str(age) for age in range(oldest + 1)],
        ages,
        y_label="share of pushes",
        x_label="versions missed",
        caption="With equal workers nearly every push has missed one of each of the others.",
    )
    page.text(
        f"Equal steps, equal loss holds for a step size that fits the staleness. With {BOLD_LR:g} instead of "
        f"{LR:g} and {BOLD_LOCAL_STEPS} local steps, which one worker bears, {max(SIZES)} workers whose differences "
        f"are summed end at a loss of {bold['loss'][-1]:.3g}: take a smaller step size, fewer local steps or "
        "merge='mean'."
    )
    page.text(f"For the speed-up B is {planned.value}: {planned.reason}.")
    lines = [
        Series("simulated", [p.workers for p in curve], [p.speed_up for p in curve]),
        Series("linear", list(CURVE), list(CURVE)),
    ]
    page.lines("Speed-up", lines, x_label="workers", y_label="times one worker that never communicates")
    target = options.out / "index.html"
    page.save(target)
    return target


def problem() -> tuple[tuple[torch.Tensor, torch.Tensor], nn.Module]:
    """Two classes that no line separates, and a small network."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 10, generator=generator)
    y = ((x[:, 0] * x[:, 1] > 0) ^ (x[:, 2] > 0.5)).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    return (x, y), module


def train(workers: int, steps: int, *, lr: float = LR, local_steps: int = LOCAL_STEPS) -> dict[str, Any]:
    """One simulated run: smoothed loss against steps and time, and the ages of its pushes."""
    data, module = problem()
    job = Job(
        module=module,
        data=data,
        options=FitOptions(steps=steps, batch_size=16, lr=lr),
        world_size=workers,
        passes=None,
        total_steps=steps,
    )
    layout = Layout.of(module)
    master = Master(MasterOptions(local_steps=local_steps, steps=steps, checkpoint_every=10**9))
    service = Service(master, Holder(layout.gather()))

    def start(name: str, life: int) -> Conversation:
        own = Job(**{**vars(job), "module": copy.deepcopy(module)})
        return converse(name, life, TrainingSteps(own, int(name)), Compressor())

    conditions = Conditions(
        step_s=STEP_S, spread=0.2, delay_s=(MESSAGE_S, MESSAGE_S), merge_s=MERGE_S, retry_s=1e6
    )
    taken_s = Simulation(service, start, [str(i) for i in range(workers)], conditions).run()
    size = max(1, len(service.losses) // 40)
    groups = [service.losses[i : i + size] for i in range(0, len(service.losses), size)]
    at = [group[-1][0] for group in groups]
    ages = master.staleness
    return {
        "steps": at,
        "seconds": [taken_s * step / steps for step in at],
        "loss": [sum(loss for _, loss, _ in group) / len(group) for group in groups],
        "ages": {age: count / ages.total() for age, count in sorted(ages.items())},
        "mean_age": sum(age * count for age, count in ages.items()) / ages.total(),
        "oldest": max(ages),
    }
