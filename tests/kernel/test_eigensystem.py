"""The randomised eigensolver of large subsamples against LAPACK, and rows that already lie on a device."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from headrace import KernelRegressor
from headrace.kernel import eigensystem
from headrace.kernel.eigensystem import leading_eigenpairs
from headrace.kernel.fitting import fit_rows
from headrace.kernel.formulas import directions_for_batch
from headrace.kernel.inputs import merge_copies, row_keys
from headrace.kernel.precondition import wanted_directions


def kernel_matrix(rows: int) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.exp(-torch.cdist(x, x) / 4).float()


def test_block_krylov_finds_what_lapack_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = kernel_matrix(900)
    values, vectors = torch.linalg.eigh(matrix.double())
    monkeypatch.setattr(eigensystem, "DENSE_LIMIT", 100)
    found, directions = leading_eigenpairs(matrix, 60)
    assert len(found) == 60 and directions.shape == (900, 60)
    # The last of them are seen least sharply: the spectrum falls slowly there.
    torch.testing.assert_close(found[:40], values.flip(0)[:40], rtol=2e-3, atol=0)
    torch.testing.assert_close(found, values.flip(0)[:60], rtol=3e-2, atol=0)
    directions = directions.double()
    torch.testing.assert_close(
        directions.T @ directions, torch.eye(60, dtype=torch.float64), atol=1e-5, rtol=0
    )
    left = (matrix.double() @ directions - directions * found).norm(dim=0) / found[0]
    assert float(left.max()) < 2e-3
    # The leading ones, which are flattened most, are nearly exact.
    assert float((vectors.flip(1)[:, :10] * directions[:, :10]).sum(0).abs().min()) > 0.9999


def test_as_many_eigenpairs_as_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = kernel_matrix(1300)
    monkeypatch.setattr(eigensystem, "DENSE_LIMIT", 100)
    monkeypatch.setattr(eigensystem, "LEAST_ASKED", 10)
    monkeypatch.setattr(eigensystem, "SMALLEST_PART", 130)
    shown: list[int] = []

    def enough(values: torch.Tensor) -> bool:
        shown.append(len(values))
        return len(values) >= 33

    values, vectors = leading_eigenpairs(matrix, 1000, enough=enough)
    assert shown == [10, 20, 40]
    assert len(values) == vectors.shape[1] == 40
    values, _ = leading_eigenpairs(matrix, 1000, enough=lambda values: False)
    assert len(values) == 1300, "all of them, when no part is enough"


def settings(model: KernelRegressor) -> object:
    return model._settings(1)


def test_rows_in_a_tensor_train_the_same_model() -> None:
    random = np.random.RandomState(0)
    X = random.randn(3000, 5)
    X[7] = X[2900]
    y = np.sin(X[:, :1])
    options = settings(KernelRegressor(bandwidth=2.0, batch_size=100, epochs=2, verbose=False))
    from_array = fit_rows(X, y, None, options)
    from_tensor = fit_rows(torch.from_numpy(X), y, None, options)
    assert from_tensor.plan["copies_merged"] == 1
    torch.testing.assert_close(from_tensor.values(X[:50]), from_array.values(X[:50]), atol=1e-4, rtol=0)


def test_keys_do_not_depend_on_layout_dtype_or_device() -> None:
    random = np.random.RandomState(1)
    X = random.randint(-3, 4, (4000, 70)) * (random.rand(4000, 70) < 0.4)
    X[0], X[-1] = 0, 0
    keys = row_keys(X)
    for other in (X.astype(np.float32), -0.0 - X.astype(float), torch.from_numpy(X), sp.csr_matrix(X)):
        same = row_keys(-other if isinstance(other, np.ndarray) and np.signbit(other[0, 0]) else other)
        np.testing.assert_array_equal(same, keys)
    assert keys[0] == keys[-1] and len(np.unique(keys)) == len(np.unique(X, axis=0))
    merged = merge_copies(torch.from_numpy(X), np.zeros((4000, 1)), None)
    assert merged.copies == 4000 - len(np.unique(X, axis=0))


def test_one_eigenvalue_far_above_the_others_does_not_leave_the_batch_unused() -> None:
    assert wanted_directions(np.array([0.1, *[1e-4] * 300]), 500, peak=1.0) == 2
    slow = np.array([0.1 * 0.97**i for i in range(300)])
    assert wanted_directions(slow, 500, peak=1.0) == directions_for_batch(slow, 500)
    random = np.random.RandomState(0)
    X = random.randn(3000, 50)
    model = KernelRegressor(
        "laplacian", bandwidth=5.0, batch_size=500, epochs=20, tol=0, momentum=False, verbose=False
    ).fit(X, X[:, 0])
    assert model.plan_["batch"] > 250  # 8 without the second direction
    assert model.model_.halvings == 0 and model.residuals_[-1] < 0.05
