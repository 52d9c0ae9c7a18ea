"""Rows as they come in: copies merged, keys to recognise them by, sources told from arrays.

Two equal rows make the kernel matrix singular, and with different targets no function fits both. Equal rows
are therefore merged before training: one row with the sum of the weights and the weighted mean of the
targets has the same solution for both losses. Rows are compared by a 64-bit key first and then by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 4096


def row_keys(rows: Any) -> NDArray[np.uint64]:
    """A 64-bit key of each row: equal rows have equal keys, whatever the dtype or layout."""
    n, d = rows.shape
    factors = (
        np.random.RandomState(20_191).randint(0, 2**62, size=d, dtype=np.int64).astype(np.uint64) * 2 + 1
    )
    if hasattr(rows, "tocsr"):
        csr = rows.tocsr()
        terms = _mix(csr.data.astype(np.float64)) * factors[csr.indices]
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        sums: NDArray[np.uint64] = running[csr.indptr[1:]] - running[csr.indptr[:-1]]
        return sums
    keys = np.empty(n, np.uint64)
    for start in range(0, n, _PIECE):
        piece = np.ascontiguousarray(rows[start : start + _PIECE], dtype=np.float64)
        keys[start : start + _PIECE] = (_mix(piece) * factors).sum(axis=1, dtype=np.uint64)
    return keys


def _mix(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    # Adding zero turns −0 into +0. The shift spreads the mantissa's leading bits, which are often all there
    # are.
    bits = (values + 0.0).view(np.uint64)
    return bits ^ (bits >> np.uint64(29))


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Distinct rows with what belongs to them."""

    index: NDArray[np.int64]
    """The row of X that each distinct row is."""
    targets_nc: NDArray[np.float64]
    row_weights_n: NDArray[np.float64] | None
    copies: int
    """Rows that were merged into another."""
    keys: NDArray[np.uint64]


def merge_copies(
    rows: Any, targets_nc: NDArray[np.float64], row_weights_n: NDArray[np.float64] | None
) -> Merged:
    """Drop rows of weight zero and merge equal rows."""
    n = rows.shape[0]
    index = np.arange(n)
    keys = row_keys(rows)
    if row_weights_n is not None:
        index = np.flatnonzero(row_weights_n)
        keys = keys[index]
    first = _first_equal(rows, index, keys)
    distinct = first == np.arange(len(index))
    copies = int(len(index) - distinct.sum())
    targets, weights = targets_nc[index], None if row_weights_n is None else row_weights_n[index]
    if copies:
        old = np.ones(len(index)) if weights is None else weights
        group = np.cumsum(distinct)[first] - 1
        total = np.bincount(group, weights=old)
        targets = np.stack(
            [np.bincount(group, weights=old * column) / total for column in targets.T.astype(np.float64)],
            axis=1,
        )
        weights = total.astype(np.float64)
    if weights is not None and np.all(weights == weights[0]) and weights[0] == 1:
        weights = None
    return Merged(
        index=index[distinct], targets_nc=targets, row_weights_n=weights, copies=copies, keys=keys[distinct]
    )


def _first_equal(rows: Any, index: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each position the first position that holds an equal row."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    answer = first[inverse].astype(np.int64)
    suspects = np.flatnonzero(answer != np.arange(len(index)))
    for start in range(0, len(suspects), _PIECE):
        part = suspects[start : start + _PIECE]
        ours, theirs = rows[index[part]], rows[index[answer[part]]]
        if hasattr(ours, "tocsr"):
            different = np.asarray((ours != theirs).sum(axis=1)).ravel().astype(bool)
        else:
            different = np.any(np.asarray(ours != theirs), axis=1)
        answer[part[different]] = part[different]
    return answer


def is_source(data: object) -> bool:
    """A `headrace.types.Source` and not an array."""
    return hasattr(data, "columns") and hasattr(data, "read") and hasattr(data, "__len__")
