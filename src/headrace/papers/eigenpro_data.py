"""The data sets of `eigenpro`, shuffled, scaled and cut to size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import unknown
from headrace.papers import find_data, image_sets


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows to train on and rows to test on; X is dense or CSR."""

    X: Any
    y: Any
    X_test: Any
    y_test: Any


def load(name: str, rows: int, test_rows: int) -> Split:
    """At most so many random rows of a set."""
    readers = {"usps": _pixels, "covtype": _covtype, "a9a": _sparse, "w8a": _sparse}
    if name in image_sets.NAMES:
        images = image_sets.read_images(name)
        X, y, X_test, y_test = _flat(images.x), images.y, _flat(images.x_test), images.y_test
    elif name in readers:
        with np.load(find_data(f"{name}.npz"), allow_pickle=False) as file:
            X, y, X_test, y_test = readers[name](dict(file))
    else:
        raise unknown("data set", name, [*readers, *image_sets.NAMES])
    random = np.random.RandomState(0)
    kept, tested = random.permutation(len(y))[:rows], random.permutation(len(y_test))[:test_rows]
    return Split(X=X[kept], y=y[kept], X_test=X_test[tested], y_test=y_test[tested])


def _flat(images: Any) -> Any:
    """A row of numbers from 0 to 1 for every image."""
    scale = 255 if images.dtype == np.uint8 else 1
    return images.reshape(len(images), -1) / np.float32(scale)


def _pixels(file: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    return _flat(file["x_train"]), file["y_train"], _flat(file["x_test"]), file["y_test"]


def _covtype(file: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    order = np.random.RandomState(1).permutation(len(file["y"]))
    X, y = file["X"][order].astype(np.float32), file["y"][order]
    X = (X - X.mean(axis=0)) / (X.std(axis=0) + 1e-6)
    return X[20_000:], y[20_000:], X[:20_000], y[:20_000]


def _sparse(file: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    from scipy.sparse import csr_matrix

    def matrix(key: str) -> Any:
        parts = tuple(file[f"{key}_{part}"] for part in ("data", "indices", "indptr"))
        return csr_matrix(parts, shape=tuple(file[f"{key}_shape"]))

    keys = sorted(key.removesuffix("_indptr") for key in file if key.endswith("_indptr"))
    test = next((key for key in keys if "test" in key), None)
    train = next(key for key in keys if key != test)
    labels = {key: value for key, value in file.items() if value.ndim == 1 and key.startswith("y")}
    y = next(value for key, value in labels.items() if "test" not in key)
    X = matrix(train)
    if test is not None:
        return X, y, matrix(test), next(value for key, value in labels.items() if "test" in key)
    order = np.random.RandomState(1).permutation(len(y))
    cut = len(y) // 5
    return X[order[cut:]], y[order[cut:]], X[order[:cut]], y[order[:cut]]
