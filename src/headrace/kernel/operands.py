"""Rows as operands: how the rows of X become the two sides of one matrix product that yields a kernel's
argument.

For a radial kernel the right operand of a row v (centred, divided by the bandwidth) is [v, |v|², 1] and the
left one is [−2v, 1, |v|²]. Their inner product *is* the squared distance, so norms cost no pass of their own
over a block.

Two rules keep distances honest in float32:

- Rows are centred on the training mean first; rounding grows with the norm, not with the distance.
- Norms are made smaller by a few units of rounding. What would have been a tiny distance of either sign
  between a row and itself, or a copy of it, then always clamps to zero, and k(x, x) is exactly 1. (Without
  this the square root in the Laplacian kernel turns an error of 1e-7 into one of 3e-4.) Other distances
  change by no more than they were uncertain by.

Where products run on tensor cores (``exact_norms``), rows are rounded to what both float16 and TF32 hold, and
norms are those of the rounded rows, added apart in float32. The products are then exact, and all that is left of
the low precision is that the data were rounded at 2^-11: no error grows near zero distance.

Sparse rows are kept as CSR and never centred; only a block of the left side is made dense.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DataError
from headrace.kernel.compiled import apply_compiled
from headrace.kernel.functions import KernelFunction, call_user_kernel

ROUNDING_UNITS = 8
"""By how many units of rounding norms shrink. A guess that holds for 4 to 4000 features (tests/kernel)."""
TENSOR_CORE_UNITS = 64
"""The same where tensor cores add up, which truncate. Far below what rounding the rows changes."""
LARGEST_HALF = 60_000.0

PIECE_ROWS = 2048
CUDA_PIECE_ROWS = 16_384


@dataclass(frozen=True, kw_only=True)
class Operands:
    """How rows become operands for one kernel on one device."""

    kernel: KernelFunction
    bandwidth: float
    mean_d: Tensor | None
    """Subtracted from dense rows before a radial kernel; None for the others."""
    dtype: torch.dtype
    device: torch.device
    exact_norms: bool = False

    def width(self, features: int) -> int:
        """Columns of an operand."""
        return features + {"radial": 2, "dot": 1, "callable": 0}[self.kernel.family]

    def right(self, rows: Any, order: NDArray[np.int64] | None = None) -> Tensor:
        """The right operand of ``rows``, or of ``rows[order]``: dense from an array, CSR from a scipy
        matrix.
        """
        if hasattr(rows, "tocsr"):
            return self._right_sparse(rows.tocsr() if order is None else rows.tocsr()[order])
        n = rows.shape[0] if order is None else len(order)
        d = rows.shape[1]
        out = torch.empty(n, self.width(d), dtype=self.dtype, device=self.device)
        index: Any = order
        if order is not None and isinstance(rows, Tensor):
            index = torch.from_numpy(order).to(rows.device)
        # In pieces, so that temporaries stay small beside the operand itself.
        pieces = CUDA_PIECE_ROWS if self.device.type == "cuda" else PIECE_ROWS
        for start in range(0, n, pieces):
            stop = min(n, start + pieces)
            piece = rows[start:stop] if index is None else rows[index[start:stop]]
            self._fill(out[start:stop], tensor_of(piece).to(self.device, self.dtype))
        return out

    def _fill(self, out: Tensor, piece: Tensor) -> None:
        d = piece.shape[1]
        if self.kernel.family == "callable":
            out.copy_(piece)
            return
        scale = self.kernel.row_scale / self.bandwidth
        if self.kernel.family == "radial":
            values = out[:, :d]
            if self.mean_d is None:
                torch.mul(piece, scale, out=values)
            else:
                torch.sub(piece, self.mean_d, out=values)
                values.mul_(scale)
            if self.exact_norms:
                values.clamp_(-LARGEST_HALF, LARGEST_HALF).copy_(values.half())
            units = TENSOR_CORE_UNITS if self.exact_norms else ROUNDING_UNITS
            shrink = 1 - units * torch.finfo(self.dtype).eps
            torch.sum(values * values, dim=1, out=out[:, d]).mul_(shrink)
            out[:, d + 1] = 1
            return
        torch.mul(piece, scale, out=out[:, :d])
        out[:, d] = 1
        if self.kernel.normalised:
            out.div_(torch.linalg.vector_norm(out, dim=1, keepdim=True))

    def _right_sparse(self, rows: Any) -> Tensor:
        if self.kernel.family == "callable":
            raise DataError("a kernel function of the user's own needs dense rows; pass X.toarray()")
        scale = self.kernel.row_scale / self.bandwidth
        values = rows.data.astype(np.float64) * scale
        pointers, columns = rows.indptr.astype(np.int64), rows.indices.astype(np.int64)
        n, d = rows.shape
        counts = np.diff(pointers)
        squares = np.bincount(np.repeat(np.arange(n), counts), weights=values**2, minlength=n)
        shrink = 1 - ROUNDING_UNITS * torch.finfo(self.dtype).eps
        extra = [np.ones(n)] if self.kernel.family == "dot" else [squares * shrink, np.ones(n)]
        if self.kernel.normalised:
            length = np.sqrt(squares + 1)
            values, extra = values / np.repeat(length, counts), [1 / length]
        k = len(extra)
        # The extra columns stand at the end of each row; insert keeps the column numbers ascending.
        ends = np.repeat(pointers[1:], k)
        values = np.insert(values, ends, np.stack(extra, axis=1).ravel())
        columns = np.insert(columns, ends, np.tile(np.arange(d, d + k), n))
        pointers = pointers + k * np.arange(n + 1)
        return csr_tensor(pointers, columns, values, (n, d + k), self.dtype, self.device)

    def left(self, right_mk: Tensor) -> Tensor:
        """The left operand of rows whose right operand is given; always dense."""
        dense = right_mk.to_dense() if right_mk.layout == torch.sparse_csr else right_mk
        if self.kernel.family != "radial":
            return dense
        d = dense.shape[1] - 2
        out = torch.empty_like(dense)
        torch.mul(dense[:, :d], -2, out=out[:, :d])
        out[:, d] = dense[:, d + 1]
        out[:, d + 1] = dense[:, d]
        return out

    def evaluate(
        self,
        left_mk: Tensor,
        right_nk: Tensor,
        out: Tensor,
        scratch: Tensor | None = None,
        *,
        compiled: bool = False,
    ) -> Tensor:
        """The kernel's values of all pairs, written into ``out`` (m×n); ``compiled``: in one pass, where that fits."""
        kernel = self.kernel
        if kernel.family == "callable":
            return out.copy_(call_user_kernel(kernel, left_mk, right_nk))
        if right_nk.layout == torch.sparse_csr:
            out.copy_(torch.mm(right_nk, left_mk.T).T)
        elif self.exact_norms and kernel.family == "radial":
            d = left_mk.shape[1] - 2
            torch.addmm(right_nk[:, d], left_mk[:, :d], right_nk[:, :d].T, out=out)
            out.add_(left_mk[:, d + 1 :])
        else:
            torch.mm(left_mk, right_nk.T, out=out)
        assert kernel.apply is not None
        if compiled and apply_compiled(kernel.code, out):
            return out
        if kernel.needs_scratch and scratch is None:
            scratch = torch.empty_like(out)
        kernel.apply(out, scratch)
        return out

    def diagonal(self, right_nk: Tensor) -> Tensor:
        """k(x, x) of each row."""
        if self.kernel.name == "polynomial":
            if right_nk.layout == torch.sparse_csr:
                counts = right_nk.crow_indices().diff()
                rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
                squares = torch.zeros(len(counts), dtype=self.dtype, device=self.device)
                return squares.index_add_(0, rows, right_nk.values().square()).pow_(3)
            return right_nk.square().sum(dim=1).pow_(3)
        if self.kernel.family != "callable":
            return torch.ones(right_nk.shape[0], dtype=self.dtype, device=self.device)
        pieces = [
            call_user_kernel(self.kernel, piece, piece).diagonal() for piece in torch.split(right_nk, 256)
        ]
        return torch.cat(pieces)


def tensor_of(piece: Any) -> Tensor:
    """A tensor of a block of rows, whatever numeric type it has."""
    if isinstance(piece, Tensor):
        return piece
    array = np.asarray(piece)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.float64)  # torch knows no unsigned integers beyond one byte here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about read-only arrays, which are only read
        return torch.from_numpy(np.ascontiguousarray(array))


def csr_tensor(
    pointers: Any, columns: Any, values: Any, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A torch CSR tensor from numpy parts, without torch's notice that the layout is young."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(
            torch.as_tensor(pointers),
            torch.as_tensor(columns),
            torch.as_tensor(values).to(dtype),
            size=shape,
            device=device,
        )


def take_rows(right_nk: Tensor, rows: Any) -> Tensor:
    """Rows of an operand by a slice or an int64 tensor; a dense answer for sparse operands."""
    if right_nk.layout != torch.sparse_csr:
        taken: Tensor = right_nk[rows]
        return taken
    n = right_nk.shape[0]
    index = torch.arange(n, device=right_nk.device)[rows] if isinstance(rows, slice) else rows
    pointers, columns, values = right_nk.crow_indices(), right_nk.col_indices(), right_nk.values()
    counts = pointers.diff()[index]
    out = torch.zeros(len(index), right_nk.shape[1], dtype=values.dtype, device=values.device)
    line = torch.repeat_interleave(torch.arange(len(index), device=index.device), counts)
    within = torch.arange(len(line), device=index.device) - (counts.cumsum(0) - counts)[line]
    at = pointers[index][line] + within
    out[line, columns[at]] = values[at]
    return out


def slice_rows(right_nk: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of an operand; sparse stays sparse."""
    if right_nk.layout != torch.sparse_csr:
        return right_nk[start:stop]
    pointers = right_nk.crow_indices()
    low, high = int(pointers[start]), int(pointers[stop])
    return csr_tensor(
        pointers[start : stop + 1] - low,
        right_nk.col_indices()[low:high],
        right_nk.values()[low:high],
        (stop - start, right_nk.shape[1]),
        right_nk.dtype,
        right_nk.device,
    )
