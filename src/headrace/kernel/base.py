"""What the classifier and the regressor share: parameters, validation, early stopping, prediction, files.

Parameters are stored as given and checked in ``fit``, as scikit-learn wants. Everything that computes lives
elsewhere; this file checks, converts and hands over.
"""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from headrace.errors import DataError, OptionError, unknown
from headrace.kernel.bandwidth import check_bandwidth
from headrace.kernel.devices import choose_devices
from headrace.kernel.fitting import AfterEpoch, Settings, extend, fit_rows
from headrace.kernel.functions import find_kernel
from headrace.kernel.inputs import is_source
from headrace.kernel.losses import find_loss
from headrace.kernel.model import Model
from headrace.kernel.stopping import EarlyStopping
from headrace.kernel.storage import load_model, save_model
from headrace.kernel.stream_data import SourceRows
from headrace.kernel.streaming import extend_stream, fit_stream
from headrace.types import Plan

DTYPES = ("auto", "float32", "float64", "tf32")


class KernelModel(BaseEstimator):  # type: ignore[misc]
    """Base of the two estimators; see `KernelClassifier` for the parameters."""

    def __init__(
        self,
        kernel: Any = "laplacian",
        *,
        bandwidth: Any = "auto",
        centers: Any = None,
        ridge: float = 0.0,
        loss: str = "squared",
        epochs: int = 10,
        tol: float = 1e-3,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 3,
        batch_size: Any = "auto",
        momentum: Any = "auto",
        warm_start: bool = False,
        device: Any = "auto",
        dtype: str = "auto",
        max_memory: Any = "auto",
        random_state: Any = None,
        verbose: bool = True,
        cluster: Any = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.centers = centers
        self.ridge = ridge
        self.loss = loss
        self.epochs = epochs
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.batch_size = batch_size
        self.momentum = momentum
        self.warm_start = warm_start
        self.device = device
        self.dtype = dtype
        self.max_memory = max_memory
        self.random_state = random_state
        self.verbose = verbose
        self.cluster = cluster

    # What the two estimators decide for themselves.

    @abstractmethod
    def _encode(self, y: Any, *, reset: bool) -> NDArray[Any]:
        """Targets as an n×c array; learns classes when ``reset``."""

    @abstractmethod
    def _quality(self, values_nc: torch.Tensor, targets_nc: torch.Tensor) -> torch.Tensor:
        """Goodness of each held-out row for early stopping; higher is better."""

    # Training

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Train on rows ``X`` (array, CSR matrix, or a `headrace.types.Source`) and targets ``y``."""
        earlier = getattr(self, "model_", None) if self.warm_start else None
        if is_source(X) and not hasattr(X, "shape"):
            return self._fit_source(X, sample_weight, earlier)
        rows, targets, weights = self._validated(X, y, sample_weight, reset=True)
        settings = self._settings(targets.shape[1])
        stopping = None
        if self.early_stopping:
            rows, targets, weights, stopping = self._hold_out(rows, targets, weights, settings.seed)
        if self.cluster is not None:
            model = self._fit_together(rows, targets, weights, settings, earlier, stopping)
        elif self.centers is None:
            model = fit_rows(rows, targets, weights, settings, earlier=earlier, after_epoch=stopping)
        else:
            model = fit_stream(
                rows, targets, weights, self._centers(rows), settings, earlier=earlier, after_epoch=stopping
            )
        return self._finish(model, stopping)

    def _fit_together(
        self,
        rows: Any,
        targets: Any,
        weights: Any,
        settings: Settings,
        earlier: Model | None,
        after_epoch: AfterEpoch | None,
    ) -> Model:
        from headrace.kernel.together import fit_together

        centers = None if self.centers is None else self._centers(rows)
        model, self.cluster_ = fit_together(
            rows, targets, weights, centers, settings, self.cluster, earlier=earlier, after_epoch=after_epoch
        )
        return model

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        if self.cluster is not None:
            warnings.warn(
                "partial_fit trains on this machine alone; cluster= is for fit", UserWarning, stacklevel=3
            )
        first = not hasattr(self, "model_")
        rows, targets, weights = self._validated(X, y, sample_weight, reset=first)
        settings = self._settings(targets.shape[1], epochs=1)
        if first and self.centers is None:
            model = fit_rows(rows, targets, weights, settings)
        elif first:
            model = fit_stream(rows, targets, weights, self._centers(rows), settings)
        elif self.centers is None and self.model_.stream is None:
            model = extend(self.model_, rows, targets, weights, settings)
        else:
            model = extend_stream(self.model_, rows, targets, weights, settings)
        return self._finish(model, None)

    def _fit_source(self, source: Any, sample_weight: Any, earlier: Model | None) -> Any:
        if sample_weight is not None:
            raise DataError(
                "sample_weight= cannot be given with a source; weights would need a column of their own"
            )
        if self.early_stopping:
            raise OptionError(
                "early_stopping= needs rows in memory; hold rows out yourself and use partial_fit"
            )
        labels = self._label_reader(source)
        rows = SourceRows(source)
        self.n_features_in_ = rows.shape[1]
        settings = self._settings(labels.outputs)
        if self.cluster is not None:
            model = self._fit_together(rows, labels, None, settings, earlier, None)
        elif self.centers is None:
            X, targets = rows.load(labels)
            model = fit_rows(X, targets, None, settings, earlier=earlier)
        else:
            model = fit_stream(
                rows, labels, None, self._centers(rows), settings, earlier=earlier, after_epoch=None
            )
        return self._finish(model, None)

    @abstractmethod
    def _label_reader(self, source: Any) -> Any:
        """How a source's target column becomes an n×c array, with the number of columns in ``outputs``."""

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        # A whole fit on an accelerator looks for NaN and infinity there (`fitting.check_finite`).
        here = not choose_devices(self.device).on_cuda or self.early_stopping or self.centers is not None
        X, y = validate_data(
            self,
            X,
            y,
            reset=reset,
            accept_sparse="csr",
            dtype="numeric",
            multi_output=True,
            y_numeric=self._numeric_targets,
            ensure_all_finite=here or not reset,
        )
        targets = self._encode(y, reset=reset)
        if sample_weight is None:
            return X, targets, None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise DataError("every sample_weight is zero; at least one row must count")
        self._check_weighted(targets, weights)
        return X, targets, weights

    _numeric_targets = True

    def _check_weighted(self, targets_nc: NDArray[np.float64], weights_n: NDArray[np.float64]) -> None:
        """Whether the rows that count can be learned from."""

    def _finish(self, model: Model, stopping: EarlyStopping | None) -> Any:
        if stopping is not None:
            stopping.restore(model)
            self.validation_scores_ = stopping.scores
        self.model_ = model
        self.plan_: Plan = model.plan
        self.bandwidth_ = model.operands.bandwidth
        self.n_iter_ = max(1, len(model.residuals))
        self.residuals_ = list(model.residuals)
        return self

    def _hold_out(
        self, rows: Any, targets: Any, weights: Any, seed: int
    ) -> tuple[Any, Any, Any, EarlyStopping]:
        n = rows.shape[0]
        fraction: Any = self.validation_fraction
        if not (isinstance(fraction, int | float | np.number) and 0 < fraction < 1):
            raise OptionError(f"validation_fraction={fraction!r} must lie between 0 and 1")
        held = math.ceil(n * fraction)
        if n - held < 1 or held < 1:
            raise DataError(f"early_stopping= holds out {held} of {n} rows, which leaves nothing to train on")
        order = np.random.RandomState(seed).permutation(n)
        out, kept = np.sort(order[:held]), np.sort(order[held:])
        held_weights = None if weights is None else weights[out]
        stopping = EarlyStopping(
            rows[out],
            torch.from_numpy(targets[out]),
            held_weights,
            self._quality,
            _whole(self, "patience", 1),
        )
        return rows[kept], targets[kept], None if weights is None else weights[kept], stopping

    def _settings(self, outputs: int, epochs: int | None = None) -> Settings:
        ridge: Any = self.ridge
        tol: Any = self.tol
        if (
            isinstance(ridge, bool)
            or not isinstance(ridge, int | float | np.number)
            or not 0 <= ridge < math.inf
        ):
            raise OptionError(f"ridge={ridge!r} must be a finite number, 0 or above")
        if isinstance(tol, bool) or not isinstance(tol, int | float | np.number) or not tol >= 0:
            raise OptionError(f"tol={self.tol!r} must be a number, 0 or above")
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.momentum not in (True, False, "auto"):
            raise OptionError(f'momentum={self.momentum!r}: give "auto", True or False')
        batch = None if self.batch_size == "auto" else _whole(self, "batch_size", 1)
        return Settings(
            kernel=find_kernel(self.kernel),
            bandwidth=check_bandwidth(self.bandwidth),
            ridge=float(ridge),
            loss=find_loss(self.loss, outputs),
            epochs=epochs or _whole(self, "epochs", 1),
            tol=float(tol),
            batch_size=batch,
            momentum=self.momentum,
            devices=choose_devices(self.device),
            dtype=self.dtype,
            max_memory=self.max_memory,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1))
            if self.random_state is not None
            else 0,
            say=_say if self.verbose else _stay_silent,
        )

    def _centers(self, rows: Any) -> Any:
        """The number of centres, or their rows."""
        centers = self.centers
        if isinstance(centers, int | np.integer) and not isinstance(centers, bool):
            if centers < 1:
                raise OptionError(
                    f"centers={centers} must be 1 or more, an array of rows, or None for all rows"
                )
            return int(centers)
        if isinstance(centers, str | bool | float):
            raise OptionError(
                f"centers={centers!r}: give a whole number, an array of rows, or None for all rows"
            )
        given = np.asarray(centers) if not hasattr(centers, "tocsr") else centers
        if given.ndim != 2 or given.shape[1] != rows.shape[1] or given.shape[0] < 1:
            raise OptionError(
                f"centers has the shape {tuple(given.shape)}; give a number, None, or rows with the "
                f"{rows.shape[1]} features of X"
            )
        if hasattr(given, "tocsr") != hasattr(rows, "tocsr"):
            raise OptionError("centers and X must both be dense or both sparse")
        return given

    # Prediction

    def _values(self, X: Any) -> NDArray[Any]:
        check_is_fitted(self, "model_")
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype="numeric")
        values: NDArray[Any] = self.model_.values(X).numpy()
        return values

    # Files

    def save(self, path: str | Path) -> None:
        """Write the fitted model into the folder ``path`` (safetensors and JSON; no pickle)."""
        check_is_fitted(self, "model_")
        about = {
            "class": type(self).__name__,
            "n_features_in": self.n_features_in_,
            "params": {k: v for k, v in self.get_params().items() if _plain(v)},
            **self._about(),
        }
        save_model(self.model_, Path(path), about)

    @classmethod
    def load(cls, path: str | Path, device: Any = "cpu") -> Any:
        """The model that was saved into the folder ``path``."""
        model, about = load_model(Path(path), choose_devices(device).first)
        if about["class"] != cls.__name__:
            raise DataError(f"{path} holds a {about['class']}; load it with {about['class']}.load")
        estimator = cls(**about["params"])
        estimator.n_features_in_ = about["n_features_in"]
        estimator._take(about)
        return estimator._finish(model, None)

    def _about(self) -> dict[str, Any]:
        """What `load` needs beside the model, as JSON."""
        return {}

    def _take(self, about: dict[str, Any]) -> None:
        """The other side of `_about`."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags


def _whole(estimator: KernelModel, name: str, least: int) -> int:
    value = getattr(estimator, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, {least} or more")
    return int(value)


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list) and all(_plain(item) for item in value))
    )


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")


def _stay_silent(sentence: str) -> None:
    """For verbose=False."""
