"""The library against naive float64: kernels, interpolant, ridge, one epoch step by step, gradients."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

from headrace import KernelClassifier, KernelRegressor
from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.functions import KERNELS, find_kernel
from headrace.kernel.losses import find_loss, project_to_simplex
from headrace.kernel.operands import Operands
from headrace.kernel.precondition import build_preconditioner
from headrace.kernel.products import KernelProduct
from headrace.kernel.solver import Course, Problem, batches, solve

CPU = torch.device("cpu")


def make_product(
    X: np.ndarray, name: str, bandwidth: float, dtype: torch.dtype = torch.float64
) -> KernelProduct:
    mean = torch.from_numpy(X.mean(axis=0)).to(dtype)
    operands = Operands(
        kernel=find_kernel(name),
        bandwidth=bandwidth,
        mean_d=mean if find_kernel(name).family == "radial" else None,
        dtype=dtype,
        device=CPU,
    )
    return KernelProduct(operands, operands.right(X), block_values=512)


def full_matrix(product: KernelProduct) -> torch.Tensor:
    n = product.rows
    out = torch.empty(n, n, dtype=product.operands.dtype)
    return product.evaluate(product.operands.left(product.right_pk), 0, n, out)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernel_values(oracle: ModuleType, name: str) -> None:
    X = np.random.RandomState(0).randn(37, 5) + 3
    found = full_matrix(make_product(X, name, 2.0)).numpy()
    np.testing.assert_allclose(found, oracle.kernel_matrix(name, X, X, 2.0), rtol=1e-6, atol=3e-8)


@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"polynomial"}))
@pytest.mark.parametrize("features", [4, 300, 4000])
def test_float32_values_of_a_row_with_itself_and_its_copies_are_one(name: str, features: int) -> None:
    X = np.random.RandomState(1).randn(60, features).astype(np.float32) * 5 + 20
    X[30:] = X[:30]
    matrix = full_matrix(make_product(X, name, 3.0 * features**0.5, torch.float32))
    ones = torch.ones(30)
    torch.testing.assert_close(matrix[:30, 30:].diagonal(), ones, atol=5e-4 if name == "ntk" else 0, rtol=0)
    torch.testing.assert_close(matrix[:30, :30].diagonal(), ones, atol=5e-4 if name == "ntk" else 0, rtol=0)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_interpolant_by_cholesky(oracle: ModuleType, name: str) -> None:
    random = np.random.RandomState(2)
    X, Y = random.randn(500, 20), random.randn(500, 2)
    probe = random.randn(40, 20)
    model = KernelRegressor(name, bandwidth=4.0, epochs=50, tol=1e-13, verbose=False).fit(X, Y)
    # The oracle's loops are slow; the matrix was checked above, so numpy may build it here.
    weights = oracle.interpolant(oracle_matrix(name, X, X, 4.0), Y)
    expected = oracle_matrix(name, probe, X, 4.0) @ weights
    assert np.abs(model.predict(X) - Y).max() < 1e-6
    assert np.abs(model.predict(probe) - expected).max() < 1e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("name", "bandwidth"), [("laplacian", 2.0), ("matern32", 1.2)])
def test_interpolant_by_small_batches(oracle: ModuleType, name: str, bandwidth: float) -> None:
    """The stochastic method itself, not the whole eigensystem."""
    random = np.random.RandomState(3)
    X, Y = random.randn(500, 8), random.randn(500, 3)
    model = KernelRegressor(
        name,
        bandwidth=bandwidth,
        batch_size=50,
        epochs=800,
        tol=1e-10,
        dtype="float64",
        verbose=False,
        momentum=False,
    ).fit(X, Y)
    assert model.plan_["batch"] <= 50
    weights = oracle.interpolant(oracle_matrix(name, X, X, bandwidth), Y)
    probe = random.randn(40, 8)
    assert np.abs(model.predict(probe) - oracle_matrix(name, probe, X, bandwidth) @ weights).max() < 1e-6


def oracle_matrix(name: str, left: np.ndarray, right: np.ndarray, bandwidth: float) -> np.ndarray:
    r2 = ((left[:, None, :] - right[None]) ** 2).sum(-1) / bandwidth**2
    r, inner = np.sqrt(r2), left @ right.T / bandwidth**2 + 1
    if name == "ntk":
        lengths = np.sqrt((left**2).sum(1) / bandwidth**2 + 1)[:, None] * np.sqrt(
            (right**2).sum(1) / bandwidth**2 + 1
        )
        u = np.clip(inner / lengths, -1, 1)
        return (2 * u * (np.pi - np.arccos(u)) + np.sqrt(1 - u**2)) / (2 * np.pi)
    return {
        "gaussian": np.exp(-r2 / 2),
        "laplacian": np.exp(-r),
        "cauchy": 1 / (1 + r2),
        "matern32": (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
        "matern52": (1 + np.sqrt(5) * r + 5 * r2 / 3) * np.exp(-np.sqrt(5) * r),
        "polynomial": inner**3,
    }[name]


@pytest.mark.parametrize("batch", ["auto", 40])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ridge", [1.0, 5.0])
def test_ridge_against_sklearn(batch: object, weighted: bool, ridge: float) -> None:
    random = np.random.RandomState(4)
    X, Y = random.randn(400, 6), random.randn(400, 2)
    weights = random.uniform(0.2, 2.0, 400) if weighted else None
    ours = KernelRegressor(
        "gaussian",
        bandwidth=1.5,
        ridge=ridge,
        batch_size=batch,
        dtype="float64",
        epochs=600,
        tol=1e-10,
        momentum=False,
        verbose=False,
    ).fit(X, Y, sample_weight=weights)
    theirs = KernelRidge(alpha=ridge, kernel="rbf", gamma=1 / (2 * 1.5**2)).fit(X, Y, sample_weight=weights)
    probe = random.randn(50, 6)
    np.testing.assert_allclose(ours.predict(probe), theirs.predict(probe), atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_epoch_against_the_naive_loop(oracle: ModuleType, cached: bool, weighted: bool) -> None:
    random = np.random.RandomState(5)
    X, Y = random.randn(60, 4), random.randn(60, 2)
    row_weights = random.uniform(0.5, 2, 60) if weighted else None
    ridge, samples, batch, step = 0.3, 25, 16, 3.0
    product = make_product(X, "laplacian", 2.0)
    weights_t = None if row_weights is None else torch.from_numpy(row_weights)
    preconditioner = build_preconditioner(product, samples, 60, rows=60, ridge=ridge, row_weights_n=weights_t)
    assert preconditioner.directions > 3
    expansion = Expansion(
        [Part(product=product, weights_pc=torch.zeros(60, 2, dtype=torch.float64), start=0)]
    )
    problem = Problem(
        expansion=expansion,
        targets_nc=torch.from_numpy(Y),
        loss=find_loss("squared", 2),
        ridge=ridge,
        row_weights_n=weights_t,
        cache=KernelCache(product, torch.float64) if cached else None,
    )
    solve(problem, preconditioner, Course(batch=batch, step=step, epochs=1, tol=0.0, seed=7))
    order = [list(range(60))[rows] for rows in batches(0, 60, batch, torch.Generator().manual_seed(7))]
    assert sorted(i for rows in order for i in rows) == list(range(60))
    expected = oracle.eigenpro_epoch(
        oracle.kernel_matrix("laplacian", X, X, 2.0),
        Y,
        np.zeros((60, 2)),
        order,
        samples,
        preconditioner.vectors_sk.numpy(),
        preconditioner.coefficients_k.numpy() * samples,
        step,
        row_weights,
        ridge,
    )
    np.testing.assert_allclose(expansion.gather().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("name", "outputs"), [("squared", 3), ("logistic", 1), ("logistic", 4)])
def test_gradients(oracle: ModuleType, name: str, outputs: int) -> None:
    random = np.random.RandomState(6)
    values = random.randn(5, outputs)
    targets = np.eye(max(2, outputs))[random.randint(0, max(2, outputs), 5)][:, :outputs]

    def objective(f: np.ndarray) -> float:
        if name == "squared":
            return float(0.5 * ((f - targets) ** 2).sum())
        if outputs == 1:
            return float((np.log1p(np.exp(f)) - f * targets).sum())
        return float((np.log(np.exp(f).sum(1)) - (f * targets).sum(1)).sum())

    loss = find_loss(name, outputs)
    found = loss.gradient(torch.from_numpy(values.copy()), torch.from_numpy(targets)) * loss.curvature
    np.testing.assert_allclose(found.numpy(), oracle.numeric_gradient(objective, values), atol=1e-6)


def test_logistic_solution_is_stationary(oracle: ModuleType) -> None:
    """At the minimum the objective's gradient by the weights vanishes."""
    random = np.random.RandomState(8)
    X = random.randn(120, 3)
    y = (X[:, 0] + random.randn(120) > 0).astype(int)
    model = KernelClassifier(
        "gaussian", bandwidth=1.0, loss="logistic", ridge=0.5, epochs=3000, tol=1e-9, verbose=False
    ).fit(X, y)
    K = oracle_matrix("gaussian", X, X, 1.0)
    f = model.decision_function(X)
    weights = np.linalg.solve(K + 1e-12 * np.eye(120), f)
    stationary = K @ (1 / (1 + np.exp(-f)) - y + 0.5 * weights)
    assert np.abs(stationary).max() < 1e-5


def test_projection_to_probabilities() -> None:
    values = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    found = project_to_simplex(values)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(200, dtype=torch.float64))
    assert bool((found >= 0).all())
    assert bool((found.argmax(1) == values.argmax(1)).all())
    # Nearest: no other probability vector is closer.
    others = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample((50, 200))
    assert bool(((others - values) ** 2).sum(-1).min(0).values.ge(((found - values) ** 2).sum(-1)).all())
