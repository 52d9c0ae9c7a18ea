"""The Triton kernels against torch: in Triton's interpreter on the CPU, and on a GPU where there is one.

The interpreter has to be chosen before triton is imported, so its test runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from headrace import KernelClassifier
from headrace.kernel import cache as cache_module
from headrace.kernel.cache import KernelCache
from headrace.kernel.functions import KERNELS, find_kernel
from headrace.kernel.operands import Operands
from headrace.kernel.products import KernelProduct
from headrace.kernel.tiles import Tiles, chosen

# rows, centres, features, outputs: tiles exactly filled, odd, single, more outputs than a tile
SHAPES = [(128, 256, 64, 16), (5, 7, 3, 1), (1, 1, 1, 1), (70, 129, 130, 64)]
ODD = (131, 261, 33, 10)
FUSED = sorted(name for name in KERNELS if KERNELS[name].code >= 0)
CASES = [*((name, ODD) for name in FUSED), *(("laplacian", shape) for shape in SHAPES)]


def compare(device: torch.device, slack: float, tiles: Tiles, cases: list[tuple[str, Any]]) -> None:
    """Kernels and shapes against float64 of the same rounded rows."""
    generator = torch.Generator().manual_seed(0)
    for name, (m, n, d, c) in cases:
        rows = torch.randn(m + n, d, generator=generator) + 3
        weights = (10.0 ** (n % 9 - 4)) * torch.randn(n, c, generator=generator).to(device)
        compare_one(fused_product(rows, name, d**0.5, device), m, weights, slack, tiles)
    a_row_is_at_no_distance_from_itself(device, tiles)
    products_of_a_fused_model(device)


def compare_one(product: KernelProduct, m: int, weights: torch.Tensor, slack: float, tiles: Tiles) -> None:
    from headrace.kernel import fused

    operands, right, device = product.operands, product.right_pk, weights.device
    (n, c), d, code = weights.shape, right.shape[1] - 2, operands.kernel.code
    left, packed = fused.pack_left(operands.left(right[:m])), fused.pack_right(right[m:])
    wanted = exact_values(operands.kernel.name, right[:m, :d], right[m:, :d])
    room = torch.full((m, n + 3), -1.0, device=device)
    fused.kernel_block(code, left, packed, room[:, :n], tiles)
    torch.testing.assert_close(room[:, :n].double(), wanted, atol=slack, rtol=0)
    assert bool((room[:, n:] == -1).all()), "wrote beyond the block"
    into = torch.ones(m, c, device=device)
    fused.fused_multiply(code, left, packed, weights, into, tiles)
    size = float(weights.abs().max()) * n**0.5
    # A kernel value is rounded to 11 bits before the product.
    exact = wanted @ weights.double()
    torch.testing.assert_close(into.double() - 1, exact, atol=5e-4 * size + slack, rtol=1e-3)
    half = torch.zeros(m, n + 5, dtype=torch.float16, device=device)
    half[:, :n] = wanted
    rows = torch.randperm(m, generator=torch.Generator().manual_seed(m))[: 1 + m // 2].to(device)
    exact = half[rows, :n].double() @ weights.double()
    torch.testing.assert_close(
        fused.half_multiply(half, rows, weights).double(), exact, atol=1e-5 * size, rtol=1e-5
    )
    torch.testing.assert_close(fused.half_head(half, rows, n), half[rows, :n].float(), atol=0, rtol=0)


def exact_values(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Kernel values in float64 from rows that the bandwidth and the kernel's factor have scaled."""
    t = torch.cdist(left.double(), right.double(), compute_mode="donot_use_mm_for_euclid_dist").square_()
    KERNELS[name].apply(t, torch.empty_like(t))
    return t


def a_row_is_at_no_distance_from_itself(device: torch.device, tiles: Tiles) -> None:
    """The square root in the Laplacian kernel makes 3e-4 of an error of 1e-7."""
    from headrace.kernel import fused

    rows = torch.randn(150, 784, generator=torch.Generator().manual_seed(3)) * 5 + 20
    product = fused_product(rows, "laplacian", 28.0, device)
    block = torch.empty(150, 150, device=device)
    packed = product.packed()
    fused.kernel_block(1, fused.pack_left(product.operands.left(product.right_pk)), packed, block, tiles)
    torch.testing.assert_close(block.diagonal(), torch.ones(150, device=device), atol=0, rtol=0)


def fused_product(rows: torch.Tensor, name: str, bandwidth: float, device: torch.device) -> KernelProduct:
    operands = Operands(
        kernel=find_kernel(name),
        bandwidth=bandwidth,
        mean_d=rows.mean(0).to(device),
        dtype=torch.float32,
        device=device,
        exact_norms=True,
    )
    return KernelProduct(operands, operands.right(rows), block_values=4096, fused=True)


def products_of_a_fused_model(device: torch.device) -> None:
    """What the solver calls: products with and without the part on S, and a matrix kept in half precision."""
    rows = torch.randn(150, 6, generator=torch.Generator().manual_seed(1))
    product = fused_product(rows, "gaussian", 2.0, device)
    wanted = exact_values("gaussian", product.right_pk[:, :6], product.right_pk[:, :6])
    cache = KernelCache(product, torch.float16)
    torch.testing.assert_close(cache.matrix_nn.double(), wanted, atol=5e-4, rtol=0)
    left = product.operands.left(product.right_pk[3::7])
    numbers = torch.arange(3, 150, 7, device=device)
    for outputs in (3, 70):  # fused, and by blocks
        weights = torch.randn(150, outputs, generator=torch.Generator().manual_seed(2)).to(device)
        exact = wanted[3::7] @ weights.double()
        for rows_of in (slice(3, 150, 7), numbers):
            torch.testing.assert_close(cache.values(rows_of, weights).double(), exact, atol=1e-2, rtol=0)
        keep = torch.empty(len(left), 20, device=device)
        found = product.multiply(left, weights, keep)
        torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=0)
        torch.testing.assert_close(keep.double(), wanted[3::7, :20], atol=1e-4, rtol=0)
    for rows_of in (slice(3, 150, 7), numbers):
        torch.testing.assert_close(cache.head(rows_of, 20).double(), wanted[3::7, :20], atol=5e-4, rtol=0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter() -> None:
    code = (
        "import importlib.util, torch, triton.runtime.interpreter as i\n"
        # The interpreter converts arrays of one element with int(), which numpy 2.4 refuses.
        "before = i._LangPatchScope.set_attr\n"
        "def set_attr(self, obj, name, value):\n"
        "    index = lambda tensor: int(tensor.handle.data.item())\n"
        "    return before(self, obj, name, index if name == '__index__' else value)\n"
        "i._LangPatchScope.set_attr = set_attr\n"
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r})\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        "t.compare(torch.device('cpu'), 1e-4, t.Tiles(), t.CASES)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("features", [6, 230])
def test_half_precision_cache_without_triton(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(150, features, generator=torch.Generator().manual_seed(1))
    operands = Operands(
        kernel=find_kernel("gaussian"),
        bandwidth=features**0.5,
        mean_d=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    product = KernelProduct(operands, operands.right(rows), block_values=4096)
    monkeypatch.setattr(cache_module, "BUILD_ROWS", 32)
    half, single = KernelCache(product, torch.float16), KernelCache(product, torch.float32)
    weights = torch.randn(150, 3, generator=torch.Generator().manual_seed(2))
    direct = torch.empty(150, 150)
    product.evaluate(operands.left(product.right_pk), 0, 150, direct)
    torch.testing.assert_close(single.matrix_nn, direct, atol=1e-6, rtol=0)
    for rows_of in (slice(0, 150, 4), slice(149, 150, 9)):
        torch.testing.assert_close(
            half.values(rows_of, weights), single.values(rows_of, weights), atol=2e-2, rtol=0
        )


def test_rounded_rows_keep_the_kernel_near_and_ones_on_the_diagonal() -> None:
    """Rows for tensor cores, on the CPU: 2^-11 of rounding moves kernel values by less than 1e-3."""
    rows = np.random.RandomState(0).randn(200, 300) * 4 + 9
    rows[100:] = rows[:100]
    rows[0] = 1e9  # far beyond float16
    values = {}
    for exact in (False, True):
        operands = Operands(
            kernel=find_kernel("laplacian"),
            bandwidth=70.0,
            mean_d=torch.from_numpy(rows[1:].mean(0)).float(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            exact_norms=exact,
        )
        product = KernelProduct(operands, operands.right(rows))
        values[exact] = torch.empty(200, 200)
        product.evaluate(operands.left(product.right_pk), 0, 200, values[exact])
    torch.testing.assert_close(values[True], values[False], atol=1e-3, rtol=0)
    assert bool((values[True][:100, 100:].diagonal()[1:] == 1).all())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    found = chosen(device)
    assert found.works and found.multiply is not None, found.reason
    cases = [*((name, ODD) for name in FUSED), ("laplacian", SHAPES[0])]  # each is compiled anew
    compare(device, 2e-4, found.multiply, cases)


@pytest.mark.gpu
def test_a_fit_on_a_gpu_is_a_fit_on_the_cpu() -> None:
    random = np.random.RandomState(0)
    X = random.randn(7000, 20).astype(np.float32)
    y = (X[:, 0] > 0) + 2 * (X[:, 1] > 0)
    options = {"bandwidth": 5.0, "epochs": 5, "tol": 0, "momentum": False, "verbose": False}
    scores = {
        device: KernelClassifier(device=device, **options).fit(X[:6000], y[:6000]).score(X[6000:], y[6000:])
        for device in ("cpu", "cuda")
    }
    assert abs(scores["cpu"] - scores["cuda"]) < 0.02, scores
