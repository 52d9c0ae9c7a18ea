"""Time to a training loss of 0.10 on covtype: the usual eager GPU loop, the GPU worker alone, and CPU+GPU.

    HEADRACE_DATA=... python benchmarks/bench_hogbatch_gpu.py [--seconds 30] [--target 0.10] [--standin]

54-512-512-512-2, float32, binary covtype. Batch 64 with step 0.1 and batch 512 with step 0.4, 8 to 16 local
steps between merges; CPU workers: all cores but one, batch 64. ``--standin`` replaces the GPU by a CPU core, to try
the script; its numbers mean nothing for a GPU.

Not run on a GPU yet. What an early prototype measured on an H200 with 16 cores: alone 7.2k updates/s at batch 64
(loss 0.129 after 12 s), with CPU workers 10.5k (0.106); alone at batch 512 0.065, with CPU workers 0.063.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_auto, run_hogbatch
from headrace.engine.hogbatch.options import cores
from headrace.papers.hogbatch import Curve, covtype, look, network, run_usual

SLICE_S = 0.5


def sides(standin: bool) -> dict[str, HogbatchOptions]:
    chip: dict[str, Any] = {"standin": 1} if standin else {"cuda": 1}
    cpu = max(1, cores() - 1)

    def of(batch: int, lr: float, steps: int, n_cpu: int) -> HogbatchOptions:
        return HogbatchOptions(
            **chip,
            cpu=n_cpu,
            algorithm="hogbatch" if n_cpu else "minibatch",
            batch_size=64,
            device_batch_size=batch,
            device_local_steps=steps,
            scaling="linear",  # 0.1 at batch 64 becomes lr at the device's batch
            optimiser=OptimiserSpec(lr=lr * 64 / batch),
            epochs=1_000_000,
        )

    return {
        "device 64": of(64, 0.1, 16, 0),
        f"device 64 and {cpu} CPU": of(64, 0.1, 16, cpu),
        "device 512": of(512, 0.4, 8, 0),
        f"device 512 and {cpu} CPU": of(512, 0.4, 8, cpu),
    }


def train(options: HogbatchOptions, seconds: float, target: float) -> Curve:
    problem = covtype()
    module = network(problem, 0)
    curve, state, spent = Curve([0.0], [0.0], [look(problem, module)]), None, 0.0
    while spent < seconds and curve.losses[-1] > target:
        part = dataclasses.replace(options, seconds=SLICE_S)
        columns = {"x": problem.x, "y": problem.y}
        result = run_hogbatch(module, columns, problem.loss, part, resume=state)
        state, spent, curve.updates = result.state, spent + result.seconds, result.updates
        curve.seconds.append(spent)
        curve.losses.append(look(problem, module))
    return curve


def show(name: str, curve: Curve, target: float, usual_s: float | None) -> float:
    reached = next((s for s, loss in zip(curve.seconds, curve.losses, strict=True) if loss <= target), None)
    says = f"{reached:6.1f} s" if reached is not None else f"not in {curve.seconds[-1]:.1f} s"
    ratio = f"{usual_s / reached:5.1f} × the usual loop" if reached and usual_s else ""
    rate = curve.updates / curve.seconds[-1]
    print(
        f"{name:28s} {says:>14s}  {rate:7.0f} updates/s  last loss {curve.losses[-1]:.3f}  {ratio}",
        flush=True,
    )
    return reached if reached is not None else curve.seconds[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--target", type=float, default=0.10)
    parser.add_argument("--standin", action="store_true")
    args = parser.parse_args()
    problem = covtype()
    device = "cpu" if args.standin else "cuda"
    threads = torch.get_num_threads()
    usual = run_usual(problem, network(problem, 0), 2 * args.seconds, device, threads)
    usual_s = show("usual loop", usual, args.target, None)
    found = {name: train(options, args.seconds, args.target) for name, options in sides(args.standin).items()}
    for name, curve in found.items():
        show(name, curve, args.target, usual_s)
    if not args.standin:
        options = dataclasses.replace(sides(False)["device 512"], seconds=args.seconds)
        module = network(problem, 0)
        columns = {"x": problem.x, "y": problem.y}
        _, verdicts = run_auto(module, columns, problem.loss, options, expected_s=args.seconds)
        print("auto:", verdicts[0].reason, f"; loss {look(problem, module):.3f}")


if __name__ == "__main__":
    main()
