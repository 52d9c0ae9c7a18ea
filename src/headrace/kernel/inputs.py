"""Rows as they come in: copies merged, keys to recognise them by, sources told from arrays.

Two equal rows make the kernel matrix singular, and with different targets no function fits both. Equal rows
are therefore merged before training: one row with the sum of the weights and the weighted mean of the
targets has the same solution for both losses. Rows are compared by a 64-bit key first and then by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernel.operands import tensor_of

_PIECE = 4096
_HASHED_VALUES = 1 << 18
"""Values hashed at once on the CPU, where they stay in the processor's cache, and sixteen times as many on CUDA."""
_SHIFT = 29
_SHIFTED = (1 << (64 - _SHIFT)) - 1


def row_keys(rows: Any) -> NDArray[np.uint64]:
    """A 64-bit key of each row: equal rows have equal keys, whatever the dtype, layout or device."""
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
    on_device = isinstance(rows, Tensor) and rows.device.type != "cpu"
    factors_d = torch.from_numpy(factors.view(np.int64))
    factors_d = factors_d.to(rows.device) if on_device else factors_d
    keys = torch.empty(n, dtype=torch.int64, device=factors_d.device)
    piece_rows = max(1, (_HASHED_VALUES << (4 if on_device else 0)) // max(1, d))
    for start in range(0, n, piece_rows):
        values = tensor_of(rows[start : start + piece_rows]).double() + 0.0
        bits = values.view(torch.int64)
        # int64 wraps around as uint64 does; the mask takes away the copies of the sign that its shift brings in.
        mixed = bits.bitwise_xor((bits >> _SHIFT).bitwise_and_(_SHIFTED)).mul_(factors_d)
        torch.sum(mixed, dim=1, out=keys[start : start + piece_rows])
    return keys.cpu().numpy().view(np.uint64)


def _mix(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    # Adding zero turns −0 into +0. The shift spreads the mantissa's leading bits, which are often all there
    # are.
    bits = (values + 0.0).view(np.uint64)
    return bits ^ (bits >> np.uint64(_SHIFT))


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
    ordered = np.sort(keys)
    if not np.any(ordered[1:] == ordered[:-1]):
        return np.arange(len(index))
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    answer = first[inverse].astype(np.int64)
    suspects = np.flatnonzero(answer != np.arange(len(index)))
    for start in range(0, len(suspects), _PIECE):
        part = suspects[start : start + _PIECE]
        ours, theirs = rows[index[part]], rows[index[answer[part]]]
        if hasattr(ours, "tocsr"):
            different = np.asarray((ours != theirs).sum(axis=1)).ravel().astype(bool)
        else:
            different = np.any(np.asarray(_on_host(ours != theirs)), axis=1)
        answer[part[different]] = part[different]
    return answer


def _on_host(values: Any) -> Any:
    return values.cpu() if isinstance(values, Tensor) else values


def is_source(data: object) -> bool:
    """A `headrace.types.Source` and not an array."""
    return hasattr(data, "columns") and hasattr(data, "read") and hasattr(data, "__len__")
