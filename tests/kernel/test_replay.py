"""Captured steps are the steps they replace: on the CPU with a capture that repeats the call, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace import KernelClassifier
from headrace.kernel import fitting, replay
from headrace.kernel.cache import KernelCache
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.formulas import momentum, step_size
from headrace.kernel.functions import find_kernel
from headrace.kernel.losses import find_loss
from headrace.kernel.operands import Operands
from headrace.kernel.precondition import build_preconditioner
from headrace.kernel.products import KernelProduct
from headrace.kernel.replay import LEAST_STEPS, Capture, decide_replay
from headrace.kernel.solver import Course, Outcome, Problem, solve

ROWS, BATCH = 203, 20  # eleven batches, of 18 and of 19 rows

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ridge and weights": {"ridge": 0.3, "weighted": True},
    "logistic": {"loss": "logistic"},
    "two classes": {"loss": "logistic", "outputs": 1},
    "momentum": {"accelerated": True},
    "momentum that grows": {"accelerated": True, "too_large": 30.0},
    "a step that grows": {"too_large": 60.0},
}


def repeat(call: Callable[[], None]) -> Callable[[], None]:
    """Captures nothing, and so finds what changes its address or its rows between two replays."""
    return call


def course_of(
    capture: Capture | None,
    *,
    ridge: float = 0.0,
    weighted: bool = False,
    loss: str = "squared",
    outputs: int = 3,
    accelerated: bool = False,
    too_large: float = 1.0,
) -> tuple[torch.Tensor, Outcome, list[str]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    operands = Operands(
        kernel=find_kernel("laplacian"),
        bandwidth=2.0,
        mean_d=None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    product = KernelProduct(operands, operands.right(rows))
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    targets = torch.randn(ROWS, outputs, generator=generator, dtype=torch.float64)
    pre = build_preconditioner(product, 100, BATCH, rows=ROWS, ridge=ridge, row_weights_n=weights)
    constants = None
    if accelerated:
        constants = momentum(BATCH, ROWS, peak=pre.peak / too_large, top=pre.top / too_large, bottom=0.1)
    start = torch.zeros_like(targets)
    problem = Problem(
        expansion=Expansion([Part(product=product, weights_pc=start, start=0)]),
        targets_nc=targets.sigmoid() if loss == "logistic" else targets,
        loss=find_loss(loss, outputs),
        ridge=ridge,
        row_weights_n=weights,
        cache=KernelCache(product, torch.float64),
    )
    said: list[str] = []
    course = Course(
        batch=BATCH,
        step=too_large * step_size(BATCH, peak=pre.peak, top=pre.top),
        epochs=6,
        tol=0.0,
        momentum=constants,
        capture=capture,
        say=said.append,
    )
    return problem.expansion.gather(), solve(problem, pre, course), said


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_the_steps(name: str) -> None:
    recorded: list[Any] = []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        recorded.append(call)
        return repeat(call)

    eager, replayed = course_of(None, **CASES[name]), course_of(capture, **CASES[name])
    torch.testing.assert_close(replayed[0], eager[0], atol=1e-10, rtol=1e-8)
    np.testing.assert_allclose(replayed[1].residuals, eager[1].residuals, rtol=1e-8)
    assert replayed[2] == eager[2]
    assert replayed[1].halvings == eager[1].halvings
    assert replayed[1].momentum_dropped == eager[1].momentum_dropped
    if "grows" in name:
        assert eager[2], "nothing grew: the case tests nothing"
    else:
        assert len(recorded) == 2, "one capture for each size of a batch"


@pytest.mark.parametrize("after", [0, 1])
def test_a_capture_that_fails_is_said_and_changes_nothing(after: int) -> None:
    captures: list[Any] = []

    def failing(call: Callable[[], None]) -> Callable[[], None]:
        captures.append(call)
        if len(captures) > after:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return repeat(call)

    eager, failed = course_of(None), course_of(failing)
    torch.testing.assert_close(failed[0], eager[0], atol=1e-10, rtol=1e-8)
    assert len(captures) == after + 1
    assert failed[1].capture_failed == "RuntimeError: operation not permitted"
    assert len(failed[2]) == 1
    assert "operation not permitted" in failed[2][0]


def test_when_steps_are_captured() -> None:
    assert decide_replay(True, LEAST_STEPS)[0]
    assert not decide_replay(True, LEAST_STEPS - 1)[0]
    assert not decide_replay(False, 10 * LEAST_STEPS)[0]


GPU_CASES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": False},
    "momentum": {"momentum": True},
    "logistic": {"loss": "logistic", "momentum": False},
    "ridge": {"ridge": 0.5, "momentum": False},
    "early stopping": {"early_stopping": True, "momentum": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_replayed_fits_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding differs in TF32, where programs add up in no fixed order: residuals move by a hundredth in 12 epochs."""
    random = np.random.RandomState(0)
    X = random.randn(7001, 20).astype(np.float32)
    y = (X[:, 0] > 0) + 2 * (X[:, 1] > 0)
    weights = random.rand(7001) + 0.5 if name == "ridge" else None
    options = {
        "bandwidth": 5.0,
        "epochs": 12,
        "tol": 0,
        "batch_size": 500,
        "device": "cuda",
        "verbose": False,
    }

    def fit() -> KernelClassifier:
        return KernelClassifier(**options, **GPU_CASES[name]).fit(X, y, sample_weight=weights)

    replayed = fit()
    assert replayed.plan_["steps"] == "replayed", replayed.plan_
    monkeypatch.setattr(replay, "LEAST_STEPS", 10**9)
    launched = fit()
    assert launched.plan_["steps"] == "launched"
    np.testing.assert_allclose(replayed.residuals_, launched.residuals_, rtol=3e-2)
    a, b = replayed.decision_function(X[:2000]), launched.decision_function(X[:2000])
    assert np.abs(a - b).max() < 2e-2 * np.abs(b).max()


@pytest.mark.gpu
def test_a_failed_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronisation is not permitted while capturing; the fit goes on as if nothing had been tried."""
    random = np.random.RandomState(0)
    X = random.randn(6000, 20).astype(np.float32)
    y = (X[:, 0] > 0) + 2 * (X[:, 1] > 0)
    options = {
        "bandwidth": 5.0,
        "epochs": 12,
        "tol": 0,
        "batch_size": 500,
        "device": "cuda",
        "verbose": False,
    }
    wanted = KernelClassifier(**options).fit(X, y)
    real = replay.cuda_graph

    def spoilt(device: torch.device) -> Capture:
        capture = real(device)

        def spoil(call: Callable[[], None]) -> Callable[[], None]:
            def synchronises() -> None:
                call()
                torch.cuda.synchronize()

            return capture(synchronises)

        return spoil

    monkeypatch.setattr(fitting, "cuda_graph", spoilt)
    model = KernelClassifier(**options).fit(X, y)
    assert model.plan_["steps"] == "launched"
    np.testing.assert_allclose(model.residuals_, wanted.residuals_, rtol=3e-2)
    monkeypatch.setattr(fitting, "cuda_graph", real)
    assert KernelClassifier(**options).fit(X, y).plan_["steps"] == "replayed"


@pytest.mark.gpu
def test_graphs_that_are_gone_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "CAPTURES_KEPT", 4)
    X = np.random.RandomState(0).randn(6000, 20).astype(np.float32)
    options = {
        "bandwidth": 5.0,
        "epochs": 12,
        "tol": 0,
        "batch_size": 500,
        "device": "cuda",
        "verbose": False,
    }
    reserved = []
    for _ in range(12):
        KernelClassifier(**options).fit(X, X[:, 0] > 0)
        reserved.append(torch.cuda.memory_reserved() >> 20)
    assert max(reserved[8:]) <= max(reserved[:4]), reserved
