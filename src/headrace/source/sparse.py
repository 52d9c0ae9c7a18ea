"""Sparse rows: SciPy matrices, LIBSVM files, and taking rows out of a CSR tensor without a loop.

A sparse column is a torch CSR tensor with int64 indices. ``take_rows`` works on any device and touches only
the entries of the rows it takes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError


def csr(crow: Tensor, col: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A CSR tensor; torch's notice that the layout is in beta is not repeated to our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(crow, col, values, size=size, check_invariants=False)


def from_scipy(matrix: Any) -> Tensor:
    """Any SciPy sparse matrix or array as a CSR tensor of float32 (or what it has, if not float64)."""
    rows = matrix.tocsr()
    data = rows.data.astype(np.float32) if rows.data.dtype.kind in "biu" else rows.data
    if data.dtype == np.float64:
        data = data.astype(torch.zeros(0).numpy().dtype)
    return csr(
        torch.from_numpy(rows.indptr.astype(np.int64)),
        torch.from_numpy(rows.indices.astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(data)),
        tuple(rows.shape),
    )


def is_scipy(value: Any) -> bool:
    """Whether this is a SciPy sparse matrix, without importing SciPy."""
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")


def take_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """The given rows of a CSR matrix, in the order given."""
    crow, col, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    starts = crow.index_select(0, rows)
    lengths = crow.index_select(0, rows + 1) - starts
    new_crow = torch.zeros(len(rows) + 1, dtype=crow.dtype, device=crow.device)
    torch.cumsum(lengths, 0, out=new_crow[1:])
    total = int(new_crow[-1])
    # Entry k of the result stands at k + (start of its row in the matrix − start of its row in the result).
    shift = torch.repeat_interleave(starts - new_crow[:-1], lengths, output_size=total)
    take = torch.arange(total, device=crow.device) + shift
    return csr(
        new_crow, col.index_select(0, take), values.index_select(0, take), (len(rows), matrix.shape[1])
    )


def slice_rows(matrix: Tensor, rows: range) -> Tensor:
    """A contiguous range of rows of a CSR matrix; the entries are views."""
    crow = matrix.crow_indices()
    first, last = int(crow[rows.start]), int(crow[rows.stop])
    return csr(
        crow[rows.start : rows.stop + 1] - first,
        matrix.col_indices()[first:last],
        matrix.values()[first:last],
        (len(rows), matrix.shape[1]),
    )


def read_libsvm(path: Path, features: int | None) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """The rows and the labels of a LIBSVM file."""
    from sklearn.datasets import load_svmlight_file

    try:
        matrix, labels = load_svmlight_file(str(path), n_features=features, dtype=np.float32)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} was read as LIBSVM text (one 'label index:value ...' line for every row) and failed: "
            f"{error}"
        ) from error
    if matrix.shape[0] == 0:
        raise DataError(f"{path} holds no rows")
    return from_scipy(matrix), labels


def looks_like_libsvm(path: Path) -> bool:
    """Whether the first line that says something is ``label index:value ...``."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).decode("ascii")
    except (UnicodeDecodeError, OSError):
        return False
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return False
    label, *pairs = lines[0].split("#")[0].split()
    return is_number(label) and bool(pairs) and all(is_pair(p) for p in pairs[: max(1, len(pairs) - 1)])


def is_pair(word: str) -> bool:
    """Whether a word is ``index:value``."""
    index, colon, value = word.partition(":")
    return bool(colon) and index.isdigit() and is_number(value)


def is_number(word: str) -> bool:
    """Whether a word reads as a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True
