"""Values of any kind → tensors that training can use, with the `Column` that describes them.

What is changed, and nothing else: float64 arrays become torch's default dtype (pass a tensor to keep
float64); integer targets become int64, as torch's losses want them; text becomes integer classes, sorted by
name; integer types that torch does not compute with become the next larger one that it does.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.types import Column

WIDER: dict[str, Any] = {
    "u2": np.dtype("<i4"),
    "u4": np.dtype("<i8"),
    "u8": np.dtype("<i8"),
    "f16": np.dtype("<f8"),
}


def as_tensor(values: Any, name: str) -> Tensor:
    """``values`` as a tensor, without a copy where torch can use the memory as it is."""
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"column {name!r} has rows of unequal length: {error}") from error
    if array.dtype.kind == "O":
        raise DataError(object_message(array, name))
    if array.dtype.kind not in "biufc":
        raise DataError(f"column {name!r} holds {array.dtype} values; only numbers and text can be used")
    return wrap(native(array))


def native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values in a type and byte order that torch knows."""
    wider = WIDER.get(array.dtype.kind + str(array.dtype.itemsize))
    if wider is not None:
        return np.asarray(array, dtype=wider)
    if not array.dtype.isnative:
        array = np.ascontiguousarray(array).byteswap().view(array.dtype.newbyteorder("="))
    return array


def wrap(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the array's own memory; sources never write to it, so a read-only map is fine."""
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def object_message(array: np.ndarray[Any, Any], name: str) -> str:
    """What is wrong with a column of Python objects."""
    lengths = {len(value) if hasattr(value, "__len__") else None for value in array.reshape(-1)}
    if lengths != {None} and len(lengths) > 1:
        known = sorted(length for length in lengths if length is not None)
        return (
            f"column {name!r} has rows of unequal length, from {known[0]} to {known[-1]}; pad or cut "
            f"them first"
        )
    kinds = sorted({type(value).__name__ for value in array.reshape(-1)})
    return f"column {name!r} holds Python objects ({', '.join(kinds[:5])}); only numbers and text can be used"


def is_text(values: Any) -> bool:
    """Whether a column holds text, as labels often do."""
    if isinstance(values, Tensor):
        return False
    array = np.asarray(values) if not isinstance(values, list) else np.asarray(values, dtype=object)
    if array.dtype.kind in "US":
        return True
    if array.dtype.kind == "T":  # NumPy's variable-width strings
        return True
    return (
        array.dtype.kind == "O" and array.ndim == 1 and any(isinstance(value, str) for value in array[:1000])
    )


def encode_classes(values: Any, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Labels of any kind → int64 classes and their names, in sorted order."""
    array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind in "OT":
        missing = np.array([not isinstance(value, str) for value in array])
        if missing.any() and array.dtype.kind == "O" and any(isinstance(value, str) for value in array):
            row = int(missing.argmax())
            raise DataError(
                f"column {name!r}: {int(missing.sum())} of {len(array)} labels are not text, the first in "
                f"row {row} "
                f"({array[row]!r}); fill or drop those rows"
            )
        array = array.astype(str)
    found, codes = np.unique(array, return_inverse=True)
    return torch.from_numpy(codes.reshape(array.shape).astype(np.int64)), tuple(label_name(v) for v in found)


def label_name(value: Any) -> str:
    """A class's name; ``1.0`` in a LIBSVM file is the class 1."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def served_dtype(dtype: torch.dtype, *, role: str, keep_floats: bool) -> torch.dtype:
    """The dtype in which a column of ``dtype`` reaches the model."""
    if dtype == torch.float64 and not keep_floats:
        return torch.get_default_dtype()
    if role == "target" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64
    return dtype


def build_column(name: str, values: Any, *, role: str, classes: bool | None = None) -> tuple[Column, Tensor]:
    """One column and its values as stored; the column tells the dtype in which they are served."""
    names: tuple[str, ...] = ()
    if role == "target" and (classes or (classes is None and is_text(values))):
        stored, names = encode_classes(values, name)
    elif is_text(values):
        raise DataError(
            f"column {name!r} holds text; only a target may, as the names of classes. "
            "Turn it into numbers first, or leave it out of input="
        )
    else:
        stored = as_tensor(values, name)
    if stored.ndim == 0:
        raise DataError(f"column {name!r} is a single number; a column needs one entry for every example")
    served = served_dtype(stored.dtype, role=role, keep_floats=isinstance(values, Tensor))
    column = Column(
        name=name,
        dtype=served,
        shape=tuple(stored.shape[1:]),
        sparse=stored.layout == torch.sparse_csr,
        role=role,
        classes=names,
    )
    return column, stored
