"""How good are the orders? The drift H on frozen gradients after ten rounds, lower is better.

    python benchmarks/bench_order_quality.py [--rows 1797] [--rounds 10] [--seeds 2]

The model is an MLP 64-64-10 (d = 4810) on scikit-learn's digits, trained for one epoch so that its gradients differ;
then it is frozen. Every method sees the examples in its own order for ten rounds and reorders after each. H is always
measured on the *whole* gradients, whatever the method saw.

torch 2.13.0, one seed, sketches of 32 x 8:

    random                          99.5      recursive, sketch               27.3
    pair, exact                     23.5      kh, sketch                      44.9
    mean, exact                     20.4      probabilistic c=1, sketch       41.3
    pair, sketch 256                27.8      probabilistic c=30, sketch      89.6
    mean, sketch 256                25.7      microbatch of 8 / 32            40.5 / 66.2
    pair, sketch 128 / 64 / 16      32.0 / 35.4 / 71.8    greedy, herding     46.9 / 23.7
    8 workers, independent shuffles 92.6      8 workers, CD-GraB              30.0
"""

from __future__ import annotations

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.order.balance import drift
from headrace.order.balanced import BalancedOrder
from headrace.order.coordinated import shard


def digits(rows: int) -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:rows] / 16, dtype=torch.float32), torch.tensor(y[:rows])


def trained_model(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randperm(len(x)).split(16):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def example_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (a[None],)), b[None])

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return torch.cat([g.flatten(1) for g in found.values()], 1)


def rounds_of(
    order: BalancedOrder, model: nn.Module, x: Tensor, y: Tensor, rounds: int, batch: int = 64
) -> Tensor:
    """The order after so many rounds of watching the frozen model."""
    order.watch(model)
    for _ in range(rounds):
        for rows in next(order.epoch()).split(order.group if order.group > 1 else batch):
            order.begin_batch(rows)
            model.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
    order.end_epoch()
    order.unwatch()
    return next(order.epoch())


def worker_drift(gradients: Tensor, dealt: Tensor) -> float:
    """H over steps that take one row from each worker; ``dealt`` is length × workers."""
    return drift(gradients[dealt].sum(1))


METHODS: dict[str, dict[str, object]] = {
    "random": {"kind": "shuffled"},
    "pair, exact": {"kind": "pair", "signal": "exact"},
    "mean, exact": {"kind": "mean", "signal": "exact"},
    "pair, sketch 256": {"kind": "pair", "k": 256},
    "mean, sketch 256": {"kind": "mean", "k": 256},
    "pair, sketch 128": {"kind": "pair", "k": 128},
    "pair, sketch 64": {"kind": "pair", "k": 64},
    "mean, sketch 64": {"kind": "mean", "k": 64},
    "pair, sketch 16": {"kind": "pair", "k": 16},
    "recursive, sketch 256": {"kind": "recursive"},
    "kh, sketch 256": {"kind": "kh"},
    "probabilistic c=1, sketch 256": {"kind": "probabilistic"},
    "probabilistic c=30, sketch 256": {"kind": "probabilistic", "scale": 30.0},
    "microbatch of 8": {"kind": "pair", "signal": "microbatch", "group": 8},
    "microbatch of 32": {"kind": "pair", "signal": "microbatch", "group": 32},
    "greedy, sketch 256": {"kind": "greedy"},
    "herding, sketch 256": {"kind": "herding"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1796)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = digits(options.rows)
    results: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        model = trained_model(x, y, seed)
        gradients = example_gradients(model, x, y).double()
        for name, settings in METHODS.items():
            if options.only and not any(word in name for word in options.only):
                continue
            order = BalancedOrder(len(x), seed=seed, fallback=False, **settings)  # type: ignore[arg-type]
            final = rounds_of(order, model, x, y, options.rounds)
            results.setdefault(name, []).append(drift(gradients, final))
        for name, workers in (("8 workers, independent shuffles", 0), ("8 workers, CD-GraB", 8)):
            if options.only and not any(word in name for word in options.only):
                continue
            if workers:
                order = BalancedOrder(len(x) // 8 * 8, seed=seed, workers=8, fallback=False)
                final = rounds_of(order, model, x, y, options.rounds)
            else:
                final = shard(torch.randperm(len(x)), 8, drop_last=True).reshape(-1)
            results.setdefault(name, []).append(worker_drift(gradients, final.view(-1, 8)))
    base = statistics.mean(results["random"]) if "random" in results else float("nan")
    for name, heights in results.items():
        mean = statistics.mean(heights)
        print(f"{name:34} H {mean:8.2f}   {mean / base:5.2f} of random   {[round(h, 1) for h in heights]}")


if __name__ == "__main__":
    main()
