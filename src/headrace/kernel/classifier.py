"""`KernelClassifier`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from headrace.errors import DataError
from headrace.kernel.base import KernelModel
from headrace.kernel.encoding import encode_classes
from headrace.kernel.stream_data import ClassReader


class KernelClassifier(ClassifierMixin, KernelModel):  # type: ignore[misc]
    """Kernel classification by EigenPro 2.0: batch, preconditioner and step follow from the device and the
    kernel.

    Parameters
    ----------
    kernel : "laplacian", "gaussian", "cauchy", "matern32", "matern52", "ntk", "polynomial", or a function
        A function gets two blocks of rows as tensors and returns the matrix of their kernel values.
    bandwidth : "auto" or float
        The length that distances are divided by. "auto" searches around the median distance by the
        leave-one-out error on at most 1000 rows.
    centers : None, int or array
        None makes every training row a centre. A number takes so many random rows, an array its rows; all
        data are then streamed past the centres, and may exceed memory when ``X`` is a source.
    ridge : float
        As ``alpha`` of scikit-learn's ``KernelRidge``.
    loss : "squared" or "logistic"
        Squared loss on indicators of the classes trains fastest; logistic loss gives better probabilities.
    epochs, tol : int, float
        Training ends after ``epochs`` passes, or when the residual has fallen to ``tol`` of the targets'
        size.
    early_stopping, validation_fraction, patience : bool, float, int
        Hold rows out, keep the best epoch, stop when ``patience`` epochs brought nothing better.
    batch_size : "auto" or int
    momentum : "auto", True or False
        AxlePro's acceleration; "auto" uses it where the kernel matrix is badly conditioned.
    warm_start : bool
        ``fit`` starts from the weights of the last ``fit`` for rows that it knew.
    device : "auto", a device, or a list of devices to split the centres over
    dtype : "auto", "float32", "float64" or "tf32"
    max_memory : "auto", bytes, or a size such as "4GB"
        What ``fit`` may allocate; "auto" is 80 % of what is free.
    random_state : None, int or RandomState
        None is the same as 0: a fit is repeatable unless asked otherwise.
    verbose : bool
        Print each automatic choice with its reason, and each epoch.
    cluster : None, a number of workers on this machine (3), "auto", an address, or a mapping
        Train on several machines, as `headrace.fit` does: rows are streamed past centres that all machines have, each
        machine has a range of the rows, and their weights are averaged after every block of rows. ``centers=None`` then
        takes 4000 random rows. How it went is in ``cluster_``.

    Attributes after ``fit``: ``classes_``, ``plan_`` (each automatic choice with its reason), ``bandwidth_``,
    ``n_iter_``, ``residuals_``, ``validation_scores_`` (with early stopping), ``n_features_in_``.
    """

    _numeric_targets = False

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> KernelClassifier:
        """One epoch over these rows; the first call needs all ``classes`` that will ever come.

        Without ``centers`` the rows become further centres of the model.
        """
        if not hasattr(self, "model_"):
            if classes is None:
                raise DataError(
                    "the first call of partial_fit needs classes=, all labels that will ever come"
                )
            self._set_classes(np.unique(classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise DataError(f"classes={classes!r} are not those of the first call, {_plain(self.classes_)!r}")
        self._partial_fit(X, y, sample_weight)
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        self._keep_classes = True
        try:
            return super()._partial_fit(X, y, sample_weight)
        finally:
            del self._keep_classes

    def _set_classes(self, classes: NDArray[Any]) -> None:
        if len(classes) < 2:
            raise DataError(
                f"y holds only one class, {_plain(classes)[0]!r}; a classifier needs at least two"
            )
        self.classes_ = classes

    def _encode(self, y: Any, *, reset: bool) -> NDArray[Any]:
        y = np.asarray(y)
        if y.ndim == 2 and y.shape[1] == 1:
            y = _as_one_column(y)
        if y.ndim != 1:
            raise DataError(f"y has the shape {y.shape}; a classifier needs one label for each row")
        check_classification_targets(y)
        if reset and not hasattr(self, "_keep_classes"):
            self._set_classes(np.unique(y))
        return encode_classes(y, self.classes_, self.loss)

    def _check_weighted(self, targets_nc: NDArray[np.float64], weights_n: NDArray[np.float64]) -> None:
        if len(np.unique(targets_nc[weights_n > 0], axis=0)) < 2 and not hasattr(self, "_keep_classes"):
            raise DataError("the rows whose sample_weight is not zero hold only one class; two are needed")

    def _quality(self, values_nc: torch.Tensor, targets_nc: torch.Tensor) -> torch.Tensor:
        if values_nc.shape[1] == 1:
            middle = 0.5 if self.loss == "logistic" else 0.0
            return ((values_nc[:, 0] > 0) == (targets_nc[:, 0] > middle)).double()
        return (values_nc.argmax(dim=1) == targets_nc.argmax(dim=1)).double()

    def _label_reader(self, source: Any) -> ClassReader:
        reader = ClassReader(source, self.loss)
        self._set_classes(reader.classes)
        return reader

    def decision_function(self, X: Any) -> NDArray[Any]:
        """One column for each class, or one number for each row when there are two classes (above 0: the
        second).
        """
        values = self._values(X)
        return values[:, 0] if len(self.classes_) == 2 else values

    def predict(self, X: Any) -> NDArray[Any]:
        """The most likely class of each row."""
        values = self._values(X)
        index = (values[:, 0] > 0).astype(np.intp) if len(self.classes_) == 2 else values.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[index]
        return labels

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Class probabilities.

        For the squared loss these are f's values moved to the nearest probability vector: right in order,
        but not calibrated. Use ``loss="logistic"`` or ``CalibratedClassifierCV`` where calibration matters.
        """
        values = torch.from_numpy(self._values(X))
        probabilities: NDArray[Any] = self.model_.loss.probabilities(values).numpy()
        return probabilities

    def _about(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "classes_dtype": self.classes_.dtype.str}

    def _take(self, about: dict[str, Any]) -> None:
        dtype = about["classes_dtype"]
        self.classes_ = np.asarray(about["classes"], dtype=object if dtype == "|O" else dtype)


def _as_one_column(y: NDArray[Any]) -> NDArray[Any]:
    from sklearn.utils.validation import column_or_1d

    column: NDArray[Any] = column_or_1d(y, warn=True)
    return column


def _plain(labels: NDArray[Any]) -> list[Any]:
    values: list[Any] = np.asarray(labels).tolist()
    return values
