"""How fast are kernel fits on a GPU, against the floor of their matrix products and against scikit-learn on
its CPU?

    HEADRACE_DATA=data python benchmarks/bench_kernel_gpu.py [tiles] [mnist] [floor] [imagenet]

``tiles`` sweeps the tiles of the fused Triton kernel beside torch's unfused products; ``mnist`` times whole
fits of all 60,000 rows (five epochs, Laplacian, bandwidth 10), first and warm, with and without the cached
matrix; ``floor`` compares an epoch without cache with 2n²(d+c) operations at the measured TF32 rate, n =
2·10⁵, d = 512; ``imagenet`` runs the first batches of an epoch over synthetic features of ImageNet's size
(1.3 M × 1536 → 1000) and extrapolates, and says so.

Not run yet: no GPU was at hand when this was written. The aims are a whole fit of MNIST in 0.25 s warm, 60 %
of the floor, and an ImageNet-size epoch in 60 s on one H200.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import KernelClassifier
from headrace.kernel.functions import find_kernel
from headrace.kernel.operands import Operands
from headrace.kernel.products import KernelProduct

CUDA = torch.device("cuda")


def seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    """The shortest of some timed calls, after one that is not timed."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def tf32_rate(side: int = 8192) -> float:
    torch.set_float32_matmul_precision("high")
    a = torch.randn(side, side, device=CUDA)
    return 2 * side**3 / seconds(lambda: a @ a)


def product_of(n: int, d: int, fused: bool) -> KernelProduct:
    operands = Operands(
        kernel=find_kernel("laplacian"),
        bandwidth=d**0.5,
        mean_d=torch.zeros(d, device=CUDA),
        dtype=torch.float32,
        device=CUDA,
        exact_norms=True,
    )
    rows = torch.randn(n, d)
    return KernelProduct(operands, operands.right(rows), fused=fused)


def bench_tiles() -> None:
    from headrace.kernel import fused

    m, n, d, c, rate = 4096, 65_536, 784, 10, tf32_rate()
    operations = 2 * m * n * (d + c)
    for is_fused in (False, True):
        product = product_of(n, d, is_fused)
        left, weights = product.operands.left(product.right_pk[:m]), torch.randn(n, c, device=CUDA)
        sizes = [(64, 64, 32), (128, 64, 32), (128, 128, 32), (64, 128, 64)] if is_fused else [(0, 0, 0)]
        for sizes_mnd in sizes:
            if is_fused:
                fused.TILE_M, fused.TILE_N, fused.TILE_D = sizes_mnd
            took = seconds(lambda p=product, a=left, w=weights: p.multiply(a, w))
            what = f"fused {sizes_mnd}" if is_fused else "unfused"
            print(f"{what:24} {1e3 * took:8.2f} ms, {operations / took / rate:.0%} of the TF32 rate")


def bench_mnist() -> None:
    with np.load(Path(os.environ["HEADRACE_DATA"]) / "mnist.npz", allow_pickle=False) as z:
        X, X_test = (z[k].reshape(len(z[k]), -1) / np.float32(255) for k in ("x_train", "x_test"))
        y, y_test = z["y_train"], z["y_test"]
    for memory in ("auto", "3GB"):
        for run in range(3):
            model = KernelClassifier(
                bandwidth=10.0, epochs=5, tol=0, max_memory=memory, device="cuda", verbose=False
            )
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.fit(X, y)
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            print(
                f"max_memory={memory} run {run}: {took:.3f} s, cached {model.plan_['cached']}, "
                f"accuracy {model.score(X_test, y_test):.4f}; the authors' code took {65 / took:.0f} to "
                f"{79 / took:.0f} times as long on an H200"
            )


def bench_floor() -> None:
    n, d, c, rate = 200_000, 512, 10, tf32_rate()
    X = np.random.RandomState(0).randn(n, d).astype(np.float32)
    y = X[:, :c].argmax(1)
    took = {}
    for epochs in (1, 3):
        model = KernelClassifier(
            bandwidth=20.0, epochs=epochs, tol=0, max_memory="8GB", device="cuda", verbose=False
        )
        took[epochs] = seconds(lambda m=model: m.fit(X, y), rounds=1)
    epoch, floor = (took[3] - took[1]) / 2, 2 * n * n * (d + c) / rate
    print(
        f"n={n}: epoch {epoch:.2f} s, floor {floor:.2f} s at {rate / 1e12:.0f} TFLOP/s, "
        f"{floor / epoch:.0%} of it"
    )


def bench_imagenet() -> None:
    n, d, c, m, rate = 1_300_000, 1536, 1000, 4096, tf32_rate()
    product = product_of(n, d, fused=True)
    weights = torch.randn(n, c, device=CUDA)
    left = product.operands.left(product.right_pk[:m])
    step = seconds(lambda: product.multiply(left, weights), rounds=3)
    epoch, floor = step * n / m, 2 * n * n * (d + c) / rate
    print(f"one batch of {m}: {step:.3f} s; extrapolated to an epoch: {epoch:.0f} s, floor {floor:.0f} s")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was measured")
        sys.exit(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for chosen in sys.argv[1:] or ("tiles", "mnist", "floor", "imagenet"):
        {"tiles": bench_tiles, "mnist": bench_mnist, "floor": bench_floor, "imagenet": bench_imagenet}[
            chosen
        ]()
