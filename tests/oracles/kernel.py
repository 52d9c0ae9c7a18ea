"""Naive float64 versions of what headrace.kernel computes. No code is shared with the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def kernel_value(name: str, x: np.ndarray, z: np.ndarray, bandwidth: float) -> float:
    """One kernel value from two rows, written from the definition."""
    r = math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(x, z, strict=True))) / bandwidth
    inner = sum(float(a) * float(b) for a, b in zip(x, z, strict=True)) / bandwidth**2
    if name == "gaussian":
        return math.exp(-(r**2) / 2)
    if name == "laplacian":
        return math.exp(-r)
    if name == "cauchy":
        return 1 / (1 + r**2)
    if name == "matern32":
        return (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r)
    if name == "matern52":
        return (1 + math.sqrt(5) * r + 5 * r**2 / 3) * math.exp(-math.sqrt(5) * r)
    if name == "polynomial":
        return (inner + 1) ** 3
    assert name == "ntk"
    lengths = math.sqrt(sum(float(a) ** 2 for a in x) / bandwidth**2 + 1) * math.sqrt(
        sum(float(b) ** 2 for b in z) / bandwidth**2 + 1
    )
    u = min(1.0, max(-1.0, (inner + 1) / lengths))
    angle = math.acos(u)
    zero = (math.pi - angle) / math.pi
    one = (u * (math.pi - angle) + math.sqrt(1 - u * u)) / math.pi
    return (u * zero + one) / 2


def kernel_matrix(name: str, left: np.ndarray, right: np.ndarray, bandwidth: float) -> np.ndarray:
    return np.array([[kernel_value(name, x, z, bandwidth) for z in right] for x in left])


def interpolant(kernel_nn: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Weights by Cholesky."""
    factor = np.linalg.cholesky(kernel_nn)
    return np.linalg.solve(factor.T, np.linalg.solve(factor, targets))


def eigenpro_epoch(
    kernel_nn: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    batches: list[list[int]],
    samples: int,
    vectors: np.ndarray,
    damping: np.ndarray,
    step: float,
    row_weights: np.ndarray | None = None,
    ridge: float = 0.0,
) -> np.ndarray:
    """One epoch of EigenPro 2.0, element by element; ``damping`` holds D, S is the first rows."""
    weights = weights.copy()
    outputs = targets.shape[1]
    for batch in batches:
        m = len(batch)
        gradient = np.zeros((m, outputs))
        for row, i in enumerate(batch):
            for o in range(outputs):
                value = sum(kernel_nn[i, j] * weights[j, o] for j in range(len(weights)))
                w = 1.0 if row_weights is None else row_weights[i]
                gradient[row, o] = w * (value - targets[i, o]) + ridge * weights[i, o]
        old = weights.copy()
        for row, i in enumerate(batch):
            weights[i] = old[i] - step / m * gradient[row]
        for o in range(outputs):
            on_samples = [
                sum(kernel_nn[a, i] * gradient[row, o] for row, i in enumerate(batch)) for a in range(samples)
            ]
            for b in range(samples):
                for j in range(len(damping)):
                    inner = sum(vectors[a, j] * on_samples[a] for a in range(samples))
                    weights[b, o] += step / m / samples * vectors[b, j] * damping[j] * inner
    return weights


def numeric_gradient(
    function: Callable[[np.ndarray], float], at: np.ndarray, width: float = 1e-6
) -> np.ndarray:
    """Central differences."""
    result = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += width
        down[index] -= width
        result[index] = (function(up) - function(down)) / (2 * width)
    return result


def squared_on_centers(
    kernel_np: np.ndarray, kernel_pp: np.ndarray, targets: np.ndarray, ridge: float
) -> np.ndarray:
    """Weights of p centres that minimise the squared loss plus ridge times the squared norm."""
    system = kernel_np.T @ kernel_np + ridge * kernel_pp
    return np.linalg.solve(system + 1e-12 * np.trace(system) * np.eye(len(system)), kernel_np.T @ targets)
