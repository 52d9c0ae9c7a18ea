"""The compiled pass against torch in float64, when it is chosen, and products with few columns."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headrace import KernelClassifier, KernelRegressor
from headrace.kernel import compiled, products
from headrace.kernel.compiled import LEAST_VALUES, apply_compiled, decide_compiled
from headrace.kernel.functions import KERNELS

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
RADIAL = sorted(name for name in KERNELS if KERNELS[name].code >= 0)


@needs_numba
@pytest.mark.parametrize("shape", [(1, 1), (7, 333), (300, 1111)])
@pytest.mark.parametrize("name", RADIAL)
def test_the_compiled_pass_makes_kernel_values(name: str, shape: tuple[int, int]) -> None:
    kernel = KERNELS[name]
    block = 10 ** (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 12 - 8)
    block.view(-1)[0] = -1e-6
    exact = block.double()
    assert kernel.apply is not None
    kernel.apply(exact, torch.empty_like(exact))
    assert apply_compiled(kernel.code, block)
    torch.testing.assert_close(block.double(), exact, rtol=0, atol=3e-7)
    assert block.view(-1)[0] == 1, "a row has the kernel value 1 with itself"


@needs_numba
@pytest.mark.parametrize("name", RADIAL)
def test_rows_without_bound_are_far_apart(name: str) -> None:
    block = torch.tensor([[1e4, 1e20, 3e38, torch.inf]])
    apply_compiled(KERNELS[name].code, block)
    assert block.max() <= (2e-4 if name == "cauchy" else 1e-30)
    assert block.min() >= 0


@needs_numba
def test_threads_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is done once, also when callers share the threads."""
    monkeypatch.setattr(compiled, "LEAST_PIECE", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    blocks = [torch.rand(61, 173, generator=torch.Generator().manual_seed(k)) for k in range(16)]
    wanted = [torch.exp(-block) for block in blocks]
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda block: apply_compiled(0, block), blocks))
    for block, exact in zip(blocks, wanted, strict=True):
        torch.testing.assert_close(block, exact, rtol=0, atol=3e-7)


def test_blocks_that_it_leaves_alone() -> None:
    wide = torch.ones(4, 6)
    assert not apply_compiled(0, wide[:, :3])
    assert not apply_compiled(0, wide.double())
    assert bool((wide == 1).all())


def test_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not decide_compiled(-1, torch.float32, LEAST_VALUES)[0]
    assert not decide_compiled(0, torch.float64, LEAST_VALUES)[0]
    assert not decide_compiled(0, torch.float32, LEAST_VALUES - 1)[0]
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    chosen, why = decide_compiled(0, torch.float32, LEAST_VALUES)
    assert not chosen
    assert "numba" in why


@needs_numba
@pytest.mark.parametrize("centers", [None, 300])
@pytest.mark.parametrize("cached", [True, False])
def test_fits_with_and_without_it(centers: int | None, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(0)
    X = random.randn(3000, 6).astype(np.float32)
    y = np.sin(X[:, 0]) + X[:, 1]
    options = {
        "kernel": "matern52",
        "bandwidth": 4.0,
        "batch_size": 200,
        "epochs": 4,
        "tol": 0,
        "centers": centers,
        "dtype": "float32",
        "max_memory": "auto" if cached else "130MB",
        "verbose": False,
    }
    without = KernelRegressor(**options).fit(X, y)
    monkeypatch.setattr(compiled, "LEAST_VALUES", 1)
    used: list[int] = []
    real = compiled.apply_compiled
    monkeypatch.setattr("headrace.kernel.operands.apply_compiled", lambda c, b: used.append(c) or real(c, b))
    fitted = KernelRegressor(**options).fit(X, y)
    assert without.plan_["products"] == "blocks"
    assert fitted.plan_["products"] == "compiled"
    assert used, "the compiled pass was not used"
    np.testing.assert_allclose(fitted.residuals_, without.residuals_, rtol=1e-2)
    np.testing.assert_allclose(fitted.predict(X[:200]), without.predict(X[:200]), atol=2e-2)


@pytest.mark.parametrize("columns", [1, 2, 10, 40])
def test_products_with_few_columns(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(33, 90, generator=generator, dtype=torch.float64)
    weights = torch.randn(90, columns, generator=generator, dtype=torch.float64)
    exact = torch.einsum("mn,nc->mc", block, weights)
    found = products.times(block, weights)
    torch.testing.assert_close(found, exact)
    assert found.is_contiguous()
    torch.testing.assert_close(products.times(block[::3], weights), exact[::3])
    total = products.by_columns(exact)
    torch.testing.assert_close(total.addmm_(block, weights), exact)


@needs_numba
def test_a_classifier_that_travels(tmp_path: object) -> None:
    """A fitted model with the compiled pass can be pickled; numba's functions stay behind."""
    import pickle

    random = np.random.RandomState(0)
    X = random.randn(400, 3).astype(np.float32)
    model = KernelClassifier(dtype="float32", bandwidth=2.0, verbose=False).fit(X, X[:, 0] > 0)
    model.model_.expansion.first.product.compiled = True
    values = model.decision_function(X)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).decision_function(X), values)
