"""What does learning an order cost inside CUDA graphs? Ratios to the same captured steps with shuffling.

    python benchmarks/bench_order_gpu.py --quick      # about 20 seconds
    python benchmarks/bench_order_gpu.py              # three rounds, interleaved

`headrace.fit` on data in device memory, batch 64, SGD with momentum, ``capture="graph"`` on both sides; the orders
differ. A run's figure is the time between its first and its last row of metrics that fall into the second half of its
epochs, over the updates between them; the ratio is that of the smallest figures. With --device cpu the same code
runs on cores, where nothing is captured.

One H200, torch 2.11, --quick:

    mlp-1.9M      shuffled 0.160 ms, balanced 0.178 ms    1.11 x
    lenet         shuffled 0.286 ms, balanced 0.322 ms    1.13 x
    transformer   shuffled 0.792 ms, balanced 0.888 ms    1.12 x

The same with five epochs and other ways of signing (each of these once, shuffled before and after):

                                                      mlp-1.9M   lenet   transformer
    Gram matrix and walk, nothing signed early          1.15      1.17      1.15
    one kernel for a chunk of pairs                      1.11      1.12 to 1.14   1.13
    the same, and the last update signed by itself       1.12      1.11      1.12
    chunks of 256 rows instead of 512, ditto             1.17      1.11      1.15
    chunks of 768 rows, ditto                            1.16      1.11      1.13

Of what is left, profiled for 16 updates of LeNet: 140 us behind the last update, in which nothing else runs (some 36
kernels of 2 to 5 us), and 70 to 90 us for each of two chunks, which slow the updates beside them down.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable

import torch
from bench_order import SmallTransformer, lenet, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from headrace.order import BalancedOrder

BATCH = 64
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, int]] = {
    "mlp-1.9M": (lambda: mlp(784, 1024, 1024, 10), lambda n: torch.randn(n, 784), 10, 256),
    "lenet": (lenet, lambda n: torch.randn(n, 3, 32, 32), 10, 128),
    "transformer": (SmallTransformer, lambda n: torch.randint(0, 2000, (n, 32)), 2, 128),
}
"""Model, inputs, classes, updates per epoch."""


def one_run(name: str, order: str, device: str, epochs: int) -> tuple[float, str, list[float]]:
    """(seconds per update, how steps were captured, drift ratios)."""
    make, inputs, classes, updates = MODELS[name]
    torch.manual_seed(0)
    n = BATCH * updates
    x, y = inputs(n), torch.randint(0, classes, (n,))
    learned = BalancedOrder(n, device=device, fallback=False) if order == "balanced" else None
    run = headrace.fit(
        make(), (x, y), loss=F.cross_entropy, lr=1e-3, epochs=epochs, batch_size=BATCH,
        optimizer="sgd", optimizer_options={"momentum": 0.9}, order=learned or order, device=device,
        capture="graph" if device.startswith("cuda") else "eager", workers="single", log_every=updates // 2,
        seed=0, progress=False,
    )  # fmt: skip
    rows = [row for row in run.metrics if row.get("seconds") is not None and row["epoch"] >= epochs / 2]
    took = (rows[-1]["seconds"] - rows[0]["seconds"]) / max(rows[-1]["step"] - rows[0]["step"], 1)
    chosen = [f"{d.value}: {d.reason}" for d in run.plan.decisions if d.name == "capture"]
    if learned is not None:
        learned.end_epoch()
    return took, chosen[-1] if chosen else "?", learned.drift_ratio if learned is not None else []


def compare(name: str, device: str, epochs: int, rounds: int) -> None:
    times: dict[str, list[float]] = {"shuffled": [], "balanced": []}
    captured, drift = "", []
    for _ in range(rounds):
        for order, found in times.items():
            took, captured, ratios = one_run(name, order, device, epochs)
            found.append(took)
            drift = ratios or drift
    base, own = min(times["shuffled"]), min(times["balanced"])
    print(
        f"{name:12} shuffled {1e3 * base:7.3f} ms/step   balanced {1e3 * own:7.3f} ms/step   {own / base:5.2f}x   "
        f"[{captured}]   drift ratio {drift[0]:.2f} -> {drift[-1]:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs, one round")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=0)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, batch {BATCH}", flush=True)
    epochs = options.epochs or (8 if options.quick else 16)
    for name in options.models:
        start = time.monotonic()
        try:
            compare(name, options.device, epochs, 1 if options.quick else 3)
        except Exception:
            traceback.print_exc()
        print(f"  ({time.monotonic() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
