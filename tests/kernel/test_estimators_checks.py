"""scikit-learn's own checks, all of them."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from headrace import KernelClassifier, KernelRegressor


@parametrize_with_checks([KernelClassifier(verbose=False), KernelRegressor(verbose=False)])
def test_sklearn_contract(estimator: Any, check: Any) -> None:
    check(estimator)
