"""Every bad input gets a sentence that says what was found and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from headrace import KernelClassifier, KernelRegressor
from headrace.errors import DataError, DeviceError, DivergenceError, ModelError, OptionError
from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.functions import find_kernel
from headrace.kernel.losses import find_loss
from headrace.kernel.operands import Operands
from headrace.kernel.precondition import build_preconditioner
from headrace.kernel.products import KernelProduct
from headrace.kernel.solver import Course, Problem, solve

X = np.random.RandomState(0).randn(60, 4)
Y = X[:, 0]
LABELS = (Y > 0).astype(int)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kernel": "laplace_kernel"}, OptionError, "did you mean 'laplac"),
        ({"kernel": 3}, OptionError, "a name or a function of two blocks"),
        ({"bandwidth": 0}, OptionError, "bandwidth=0 must be above 0"),
        ({"bandwidth": -2.0}, OptionError, "must be above 0"),
        ({"bandwidth": float("nan")}, OptionError, "must be above 0 and finite"),
        ({"bandwidth": "median"}, OptionError, 'give "auto" or a number'),
        ({"ridge": -1}, OptionError, "ridge=-1 must be a finite number"),
        ({"epochs": 0}, OptionError, "epochs=0 must be a whole number, 1 or more"),
        ({"batch_size": 2.5}, OptionError, "batch_size=2.5 must be a whole number"),
        ({"tol": "small"}, OptionError, "tol='small'"),
        ({"loss": "hinge"}, OptionError, "loss"),
        ({"dtype": "bfloat16"}, OptionError, "unknown dtype"),
        ({"momentum": "yes"}, OptionError, "momentum='yes'"),
        ({"device": "cuda:99"}, DeviceError, "this machine has"),
        ({"device": "gpu"}, DeviceError, "is not a device"),
        ({"max_memory": "lots"}, OptionError, "max_memory='lots'"),
        ({"max_memory": 1000}, OptionError, "need at least"),
        ({"centers": 0}, OptionError, "centers=0 must be 1 or more"),
        ({"centers": 0.5}, OptionError, "centers=0.5: give a whole number"),
        ({"centers": "many"}, OptionError, "centers='many': give a whole number"),
        ({"centers": np.ones((3, 2))}, OptionError, "the 4 features of X"),
        ({"early_stopping": True, "validation_fraction": 1.5}, OptionError, "between 0 and 1"),
        ({"early_stopping": True, "patience": 0}, OptionError, "patience=0"),
    ],
)
@pytest.mark.parametrize("kind", [KernelClassifier, KernelRegressor])
def test_options(kind: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    y = LABELS if kind is KernelClassifier else Y
    with pytest.raises(error, match=words):
        kind(verbose=False, **options).fit(X, y)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity(bad: float) -> None:
    broken = X.copy()
    broken[3, 1] = bad
    for rows, targets in ((broken, Y), (sp.csr_matrix(broken), Y), (X, np.where(Y[0] == Y, bad, Y))):
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            KernelRegressor(verbose=False).fit(rows, targets)


def test_distances_that_overflow() -> None:
    with pytest.raises(DataError, match=r"squared distances .* overflow float64; scale X"):
        KernelRegressor(verbose=False).fit(X * 1e200, Y)


def test_one_class_only() -> None:
    with pytest.raises(DataError, match="only one class, 'cat'; a classifier needs at least two"):
        KernelClassifier(verbose=False).fit(X, ["cat"] * 60)


def test_unknown_class_in_partial_fit() -> None:
    model = KernelClassifier(verbose=False).partial_fit(X, LABELS, classes=[0, 1])
    with pytest.raises(DataError, match="holds the label 7, which is not among the classes"):
        model.partial_fit(X, np.full(60, 7))
    with pytest.raises(DataError, match="first call of partial_fit needs classes="):
        KernelClassifier(verbose=False).partial_fit(X, LABELS)


def test_constant_features_and_equal_rows() -> None:
    model = KernelRegressor(verbose=False).fit(np.hstack([X, np.full((60, 3), 7.0)]), Y)
    assert np.abs(model.predict(np.hstack([X, np.full((60, 3), 7.0)])) - Y).max() < 1e-6
    same = KernelRegressor(verbose=False).fit(np.ones((30, 2)), np.arange(30.0))
    assert same.predict([[1.0, 1.0]]) == pytest.approx(14.5)


def test_fewer_rows_than_the_subsample_wants() -> None:
    model = KernelRegressor(batch_size=2, epochs=300, verbose=False).fit(X[:7], Y[:7])
    assert model.plan_["samples"] == 7
    np.testing.assert_allclose(model.predict(X[:7]), Y[:7], atol=1e-2)


def test_targets_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        KernelRegressor(verbose=False).fit(X, Y[:-1])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a, b: a.sum(dim=1), "returned the shape"),
        (lambda a, b: [[0.0] * len(b)] * len(a), "returned list"),
        (lambda a, b: -torch.cdist(a, b), "positive"),
        (lambda a, b: torch.cdist(a, b), "is not positive"),
        (lambda a, b: torch.full((len(a), len(b)), torch.nan), "returned NaN"),
    ],
)
@pytest.mark.parametrize("centers", [None, 20])
def test_kernel_functions(function: Any, words: str, centers: int | None) -> None:
    with pytest.raises(ModelError, match=words):
        KernelRegressor(function, centers=centers, verbose=False).fit(X, Y)


@pytest.mark.parametrize("centers", [None, 20])
def test_a_kernel_function_that_raises(centers: int | None) -> None:
    def lopsided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a[:, :2] @ b.T

    with pytest.raises(
        ModelError, match=r"kernel lopsided raised RuntimeError on two tensors of the shapes"
    ) as found:
        KernelRegressor(lopsided, centers=centers, verbose=False).fit(X, Y)
    assert str(X.shape[1]) in str(found.value)
    assert isinstance(found.value.__cause__, RuntimeError)


def test_a_kernel_function_that_runs_out_of_memory_gets_smaller_blocks() -> None:
    widths = []

    def hungry(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        widths.append(len(b))
        if len(widths) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return torch.exp(-torch.cdist(a, b))

    model = KernelRegressor(hungry, bandwidth=1.0, verbose=False).fit(X, Y)
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.parametrize("inside", [True, False])
def test_a_step_too_large_is_halved_and_training_goes_on(inside: bool) -> None:
    """A subsample far too small for the batch: without the guard this diverges."""
    random = np.random.RandomState(0)
    rows, targets = random.randn(2000, 10), random.randn(2000, 2)
    operands = Operands(
        kernel=find_kernel("gaussian"),
        bandwidth=3.0,
        mean_d=None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    product = KernelProduct(operands, operands.right(rows))
    preconditioner = build_preconditioner(product, 40, 1000, rows=2000)
    said: list[str] = []
    expansion = Expansion(
        [Part(product=product, weights_pc=torch.zeros(2000, 2, dtype=torch.float64), start=0)]
    )
    problem = Problem(
        expansion=expansion,
        targets_nc=torch.from_numpy(targets),
        loss=find_loss("squared", 2),
        cache=KernelCache(product, torch.float64),
    )
    step = 1.0 / preconditioner.top  # what would hold if 40 rows told the whole spectrum
    outcome = solve(
        problem,
        preconditioner,
        Course(batch=500, step=step, epochs=15, tol=0, say=said.append, check_inside=inside),
    )
    assert outcome.halvings >= 1 and "the step is halved" in said[0]
    assert outcome.residuals[-1] < outcome.residuals[0] < 1.5
    assert bool(torch.isfinite(expansion.gather()).all())


def test_a_step_that_no_halving_saves_is_an_error() -> None:
    random = np.random.RandomState(0)
    operands = Operands(
        kernel=find_kernel("gaussian"),
        bandwidth=3.0,
        mean_d=None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    product = KernelProduct(operands, operands.right(random.randn(300, 4)))
    preconditioner = build_preconditioner(product, 20, 10, rows=300)
    expansion = Expansion(
        [Part(product=product, weights_pc=torch.zeros(300, 1, dtype=torch.float64), start=0)]
    )
    problem = Problem(
        expansion=expansion, targets_nc=torch.ones(300, 1).double(), loss=find_loss("squared", 1)
    )
    with pytest.raises(DivergenceError, match="still grows after the step was halved"):
        solve(problem, preconditioner, Course(batch=30, step=-1e12, epochs=5, tol=0))


def test_out_of_memory_is_retried_smaller_and_then_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that needs more memory than there is for blocks above a size, as a real allocation would."""
    many = np.random.RandomState(0).randn(600, 3)

    def hungry(limit: int) -> Any:
        def gaussian(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            if len(a) * len(b) > limit:
                torch.empty(1 << 60)  # this allocation really fails
            return torch.exp(-(torch.cdist(a, b) ** 2))

        return gaussian

    options = {"bandwidth": 1.0, "batch_size": 100, "epochs": 2}
    with pytest.raises(OptionError, match=r"memory ran out with max_memory=.*again within.*centers="):
        KernelRegressor(hungry(10), **options).fit(many, many[:, 0])
    assert capsys.readouterr().out.count("trying again within") == 2
    model = KernelRegressor(hungry(1 << 17), **options).fit(many, many[:, 0])
    assert capsys.readouterr().out.count("trying again within") == 2
    assert np.isfinite(model.predict(many[:5])).all()


PEAK = """
import sys, numpy as np, torch
import headrace as hr
kernel, n, centers, limit = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3]), int(sys.argv[4]) << 20
random = np.random.RandomState(0)
small = random.randn(2600, 50).astype(np.float32)
warm = hr.KernelClassifier(kernel, epochs=1, batch_size=64, max_memory="400MB", verbose=False)
warm.fit(small, small[:, 0] > 0)
X = random.randn(n, 50).astype(np.float32)
y = 1 * (X[:, 0] > 0) + (X[:, 1] > 0)
# Writing 5 there sets the process's high-water mark back to what it holds now.
open("/proc/self/clear_refs", "w").write("5")
def status(name):
    return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) * 1024
before = status("VmRSS")
model = hr.KernelClassifier(
    kernel, bandwidth=5.0, epochs=1, centers=centers, max_memory=limit, verbose=False
).fit(X, y)
print(model.plan_["cached"], status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("kernel", "n", "centers", "limit_mb", "cached"),
    [
        ("laplacian", 6000, None, 200, False),
        pytest.param("matern52", 8000, None, 600, True, marks=pytest.mark.slow),
        pytest.param("gaussian", 2400, None, 500, True, marks=pytest.mark.slow),
        pytest.param("laplacian", 30_000, 1500, 250, None, marks=pytest.mark.slow),
    ],
)
def test_memory_stays_within_the_limit(
    kernel: str, n: int, centers: int | None, limit_mb: int, cached: bool | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, kernel, str(n), str(centers), str(limit_mb)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    was_cached, used = done.stdout.split()
    assert cached is None or was_cached == str(cached)
    assert 0 < int(used) <= limit_mb << 20, f"{int(used) / 2**20:.0f} MB used of {limit_mb}"
