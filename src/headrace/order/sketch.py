"""The Kronecker sketch: every example gradient as k = k_o·k_i numbers, whatever the model's size.

For a weight of shape o × i the sketch is R_oᵀ G R_i with fixed random R_o (o × k_o) and R_i (i × k_i), and the
sketches of all parameters are *added*: inner products of the sums estimate inner products of whole gradients, and the
precision goes where the gradient's energy is. A bias is one more column of its weight; a vector parameter is a weight
with one column. A side no longer than its k is embedded exactly (orthonormal rows), a longer one is projected
on orthonormal columns, scaled by √(side / k). How k is split depends on the layer (`headrace.order.cost.split_k`).

A projection belongs to a parameter, not to a layer, so the uses of a shared weight add up as they must. It is drawn
from the seed and the parameter's name: processes agree on it and nothing needs saving.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.order.cost import split_k

_EXACT_QR = 65536  # longer sides are drawn as ± signs: a QR of a million rows takes seconds and gains nothing


@dataclass(frozen=True)
class Projection:
    """One parameter's R_o and R_i; ``bias`` is R_i's row for the bias."""

    rows: Tensor
    columns: Tensor
    columns_t: Tensor
    """R_iᵀ, contiguous: as filters of a convolution, strides would choose a slow layout."""
    bias: Tensor

    @property
    def split(self) -> tuple[int, int]:
        return self.rows.shape[1], self.columns.shape[1]


def draw_side(side: int, k: int, generator: torch.Generator) -> Tensor:
    """A side × k matrix R with E[R Rᵀ] = 1: an isometry when side ≤ k."""
    if side > _EXACT_QR:
        signs = torch.randint(0, 2, (side, k), generator=generator, dtype=torch.float64)
        return (2 * signs - 1) / math.sqrt(k)
    gaussian = torch.randn(max(side, k), min(side, k), generator=generator, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(gaussian)
    # Fixing the signs makes the basis uniform, and the same on every LAPACK.
    basis = torch.mul(basis, torch.where(triangle.diagonal() < 0, -1.0, 1.0))
    return basis.T.contiguous() if side <= k else basis * math.sqrt(side / k)


class Projections:
    """The projections of a model's parameters, found by identity; one copy per dtype that is met."""

    def __init__(self, k: int, seed: int) -> None:
        self.k = k
        self.seed = seed
        self._names: dict[int, tuple[str, Tensor]] = {}
        self._drawn: dict[tuple[int, torch.dtype, torch.device], Projection] = {}

    def name(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            # The same model wrapped for many processes or compiled must get the same projections.
            name = name.replace("_orig_mod.", "").removeprefix("module.")
            self._names.setdefault(id(parameter), (name, parameter))

    def of(self, parameter: Tensor, like: Tensor) -> Projection:
        key = id(parameter), like.dtype, like.device
        found = self._drawn.get(key)
        if found is None:
            found = self._drawn[key] = self._draw(parameter, like.dtype, like.device)
        return found

    def _draw(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Projection:
        name, _ = self._names[id(parameter)]
        k_rows, k_columns = split_k(self.k, *matrix_shape(parameter.shape), convolution=parameter.dim() > 2)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (self.seed & 0xFFFFFFFF))
        rows, columns = matrix_shape(parameter.shape)
        left = draw_side(rows, k_rows, generator)
        # One more column of the weight for its bias.
        right = draw_side(columns + 1, k_columns, generator)
        left, right = left.to(device, dtype), right.to(device, dtype)
        columns_t = right[:-1].T.contiguous()
        return Projection(left, right[:-1].contiguous(), columns_t, right[-1])

    def bytes(self) -> int:
        return sum(p.rows.nbytes + p.columns.nbytes + p.bias.nbytes for p in self._drawn.values())


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter as a matrix: its first dimension by all others."""
    return (1, 1) if len(shape) == 0 else (shape[0], math.prod(shape[1:]))


class SketchSum:
    """Adds up one batch's sketches, layer by layer, into b × k numbers that it owns."""

    def __init__(self, batch: int, projections: Projections) -> None:
        self.batch = batch
        self.projections = projections
        self._sum: Tensor | None = None

    def add_outer(self, left_bk: Tensor, right_bk: Tensor) -> None:
        """One outer product per example."""
        left, right = _at_least_float(left_bk)[:, :, None], _at_least_float(right_bk)[:, None, :]
        if self._sum is None:
            self._sum = (left * right).view(self.batch, -1)
        else:
            self._sum.view(self.batch, left.shape[1], -1).addcmul_(left, right)

    def add(self, sketch_bkk: Tensor) -> None:
        sketch = _at_least_float(sketch_bkk).reshape(self.batch, -1)
        self._sum = sketch if self._sum is None else self._sum.add_(sketch)

    def result(self, scale: float | Tensor) -> Tensor | None:
        """The sketches times ``scale``; None when nothing was added."""
        return None if self._sum is None else self._sum * scale


def _at_least_float(x: Tensor) -> Tensor:
    # Half precision is enough for the factors but not for sums over layers and batches.
    return x.float() if x.dtype.itemsize < 4 else x
