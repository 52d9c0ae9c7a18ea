"""`KernelRegressor`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin

from headrace.errors import OptionError
from headrace.kernel.base import KernelModel
from headrace.kernel.stream_data import NumberReader


class KernelRegressor(RegressorMixin, KernelModel):  # type: ignore[misc]
    """Kernel regression by EigenPro 2.0: batch, preconditioner and step follow from the device and the
    kernel.

    With ``ridge=0`` training approaches the interpolant, with ``ridge=a`` the solution of scikit-learn's
    ``KernelRidge(alpha=a)``. The parameters are those of `KernelClassifier`, but for ``loss``, which is
    "squared".

    Attributes after ``fit``: ``plan_`` (each automatic choice with its reason), ``bandwidth_``, ``n_iter_``,
    ``residuals_``, ``validation_scores_`` (with early stopping), ``n_features_in_``.
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegressor:
        """One epoch over these rows. Without ``centers`` they become further centres of the model."""
        self._partial_fit(X, y, sample_weight)
        return self

    def _settings(self, outputs: int, epochs: int | None = None) -> Any:
        if self.loss != "squared":
            raise OptionError(
                f'loss={self.loss!r}: a regressor has loss="squared"; "logistic" is for classifiers'
            )
        return super()._settings(outputs, epochs)

    def _encode(self, y: Any, *, reset: bool) -> NDArray[Any]:
        targets: NDArray[Any] = np.asarray(y, dtype=np.float64)
        if reset:
            self._one_column = targets.ndim == 1
        return targets[:, None] if targets.ndim == 1 else targets

    def _quality(self, values_nc: torch.Tensor, targets_nc: torch.Tensor) -> torch.Tensor:
        return -(values_nc - targets_nc).square().mean(dim=1)

    def _label_reader(self, source: Any) -> NumberReader:
        reader = NumberReader(source)
        self._one_column = reader.one_column
        return reader

    def predict(self, X: Any) -> NDArray[Any]:
        """The values of f, of the shape that ``y`` had."""
        values = self._values(X)
        return values[:, 0] if self._one_column else values

    def _about(self) -> dict[str, Any]:
        return {"one_column": self._one_column}

    def _take(self, about: dict[str, Any]) -> None:
        self._one_column = about["one_column"]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
