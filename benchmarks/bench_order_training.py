"""Does a balanced order train faster? The training objective on digits at a third of the epochs, paired by seed.

    python benchmarks/bench_order_training.py [--seeds 10] [--epochs 15] [--batch 1] [--lr 0.01]

An MLP 64-64-10 on scikit-learn's digits, constant step size, one example per step by default: there the order's
noise is largest. Both runs of a seed begin with the same weights and the same first order. The test is one-sided and
paired over seeds. With --batch 64 nothing is left to gain; that is shown, not hidden.

torch 2.13.0, ten seeds, after 5 of 15 epochs (batch 1 again with projections of 32 x 8: the same numbers):

    batch 1,  lr 0.01   shuffled 0.12596   balanced 0.11417   0.906x   p = 7.0e-05
    batch 64, lr 0.1    shuffled 0.73778   balanced 0.73080   0.991x   p = 0.21
    batch 64, lr 0.5    shuffled 0.20478   balanced 0.41075   2.006x   p = 0.93 (near instability)
"""

from __future__ import annotations

import argparse

import torch
from scipy.stats import ttest_rel
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from headrace import BalancedSampler


def run(kind: str, seed: int, epochs: int, batch: int, lr: float) -> list[float]:
    """The whole objective after each epoch."""
    data, target = load_digits(return_X_y=True)
    x, y = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sampler = BalancedSampler(len(x), kind=kind, seed=seed, fallback=False)
    sampler.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    objective = []
    for _ in range(epochs):
        for rows in torch.tensor(list(sampler)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            objective.append(float(F.cross_entropy(model(x), y)))
    return objective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    third = max(1, options.epochs // 3)
    found: dict[str, list[float]] = {"shuffled": [], "pair": []}
    for seed in range(options.seeds):
        for kind, values in found.items():
            values.append(run(kind, seed, third, options.batch, options.lr)[-1])
        print(
            f"seed {seed}: " + "  ".join(f"{kind} {values[-1]:.5f}" for kind, values in found.items()),
            flush=True,
        )
    means = {kind: sum(values) / len(values) for kind, values in found.items()}
    p = ttest_rel(found["pair"], found["shuffled"], alternative="less").pvalue
    print(
        f"batch {options.batch}, lr {options.lr}, after {third} of {options.epochs} epochs: shuffled "
        f"{means['shuffled']:.5f}, balanced {means['pair']:.5f} ({means['pair'] / means['shuffled']:.3f}x), p = {p:.1e}"
    )


if __name__ == "__main__":
    main()
