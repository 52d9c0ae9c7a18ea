"""The Triton kernels against torch: in Triton's interpreter on the CPU, and on a GPU where there is one.

The interpreter has to be chosen before triton is imported, so its test runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from headrace.kernel import cache as cache_module
from headrace.kernel.cache import KernelCache
from headrace.kernel.functions import KERNELS, find_kernel
from headrace.kernel.operands import Operands
from headrace.kernel.products import KernelProduct

# rows, centres, features, outputs: tiles exactly filled, odd, single, more outputs than a tile
SHAPES = [(64, 64, 32, 16), (5, 7, 3, 1), (1, 1, 1, 1), (67, 131, 33, 10), (70, 129, 65, 64)]


def compare(device: torch.device, tf32: bool) -> None:
    from headrace.kernel import fused

    generator = torch.Generator().manual_seed(0)
    for name in sorted(k for k in KERNELS if KERNELS[k].code >= 0):
        for m, n, d, c in SHAPES:
            rows = torch.randn(m + n, d, generator=generator)
            operands = Operands(
                kernel=find_kernel(name),
                bandwidth=d**0.5,
                mean_d=rows.mean(0).to(device),
                dtype=torch.float32,
                device=device,
                exact_norms=tf32,
            )
            right = operands.right(rows)
            left, centres = operands.left(right[:m]), right[m:]
            weights = torch.randn(n, c, generator=generator).to(device)
            exact = KernelProduct(operands, centres)
            wanted = torch.empty(m, n, device=device)
            exact.evaluate(left, 0, n, wanted)
            room = torch.full((m, n + 3), -1.0, device=device)
            fused.kernel_block(operands, left, centres, room[:, :n])
            slack = 2e-3 if tf32 else 2e-6
            torch.testing.assert_close(room[:, :n], wanted, atol=slack, rtol=0)
            assert bool((room[:, n:] == -1).all()), "wrote beyond the block"
            into = torch.ones(m, c, device=device)
            fused.fused_multiply(operands, left, centres, weights, into)
            torch.testing.assert_close(into, 1 + wanted @ weights, atol=slack * n, rtol=1e-4)
            half = wanted.half()
            torch.testing.assert_close(
                fused.half_multiply(half, weights), half.float() @ weights, atol=slack * n, rtol=1e-3
            )
    cached_in_half(device)


def cached_in_half(device: torch.device) -> None:
    """A matrix kept in half precision, with weights in single."""
    rows = torch.randn(150, 6, generator=torch.Generator().manual_seed(1))
    operands = Operands(
        kernel=find_kernel("gaussian"), bandwidth=2.0, mean_d=None, dtype=torch.float32, device=device
    )
    product = KernelProduct(operands, operands.right(rows), block_values=4096, fused=True)
    cache = KernelCache(product, torch.float16)
    weights = torch.randn(150, 3, generator=torch.Generator().manual_seed(2)).to(device)
    full = torch.empty(150, 150, device=device)
    product.evaluate(operands.left(product.right_pk), 0, 150, full)
    found = cache.values(slice(3, 150, 7), weights)
    torch.testing.assert_close(found, full[3::7] @ weights, atol=2e-2, rtol=0)
    torch.testing.assert_close(cache.head(slice(3, 150, 7), 20), full[3::7, :20], atol=1e-3, rtol=0)


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
        "t.compare(torch.device('cpu'), tf32=False)\n"
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


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
def test_on_a_gpu(tf32: bool) -> None:
    compare(torch.device("cuda"), tf32)
