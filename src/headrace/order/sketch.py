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
from typing import Any

import torch
from torch import Tensor, nn

from headrace.order.cost import split_k

_EXACT_QR = 65536  # longer sides are drawn as ± signs: a QR of a million rows takes seconds and gains nothing


@dataclass(frozen=True)
class Taps:
    """A projection of a convolution's patches of which each column looks at one place of the filter alone.

    Neighbouring pixels tell nearly the same, so a few random places serve as well as dense filters. The channels are
    mixed first, by one small product; a column's patch values are then a shifted view of that.
    """

    mix: Tensor
    """k_i × channels, ± one number."""
    places: tuple[tuple[int, ...], ...]
    """For each column its place in the filter."""


@dataclass(frozen=True)
class Projection:
    """One parameter's R_o and R_i; ``bias`` is R_i's row for the bias.

    The transposed copies are contiguous: R_iᵀ aᵀ is up to three times as fast as a R_i when k_i is small.
    """

    rows: Tensor
    columns: Tensor
    bias: Tensor
    rows_t: Tensor
    columns_t: Tensor
    bias_t: Tensor
    taps: Taps | None = None

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


def draw_taps(shape: Sequence[int], k: int, generator: torch.Generator) -> tuple[Tensor, Taps]:
    """A matrix for the patches of filters of this shape (channels, size …) and the bias, and how to apply it.

    Columns look at different places; the channels' weights are ± √(places / k), so that E[R Rᵀ] = 1.
    """
    channels, sizes = shape[0], shape[1:]
    places = math.prod(sizes)
    chosen = torch.randperm(places, generator=generator)[:k].tolist()
    signs = 2 * torch.randint(0, 2, (k, channels), generator=generator, dtype=torch.float64) - 1
    mix = signs * math.sqrt(places / k)
    matrix = torch.zeros(channels, places, k, dtype=torch.float64)
    for column, place in enumerate(chosen):
        matrix[:, place, column] = mix[column]
    bias = 2 * torch.randint(0, 2, (1, k), generator=generator, dtype=torch.float64) - 1
    where = tuple(tuple(int(i) for i in torch.unravel_index(torch.tensor(c), tuple(sizes))) for c in chosen)
    return torch.cat([matrix.view(-1, k), bias / math.sqrt(k)]), Taps(mix, where)


class Projections:
    """The projections of a model's parameters, found by identity; one copy per dtype that is met."""

    def __init__(self, k: int, seed: int) -> None:
        self.k = k
        self.seed = seed
        self._names: dict[int, tuple[str, Tensor]] = {}
        self._tables: set[int] = set()
        self._filters: set[int] = set()
        self._drawn: dict[tuple[int, torch.dtype, torch.device], Projection] = {}

    def name(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            # The same model wrapped for many processes or compiled must get the same projections.
            name = name.replace("_orig_mod.", "").removeprefix("module.")
            self._names.setdefault(id(parameter), (name, parameter))

    def know(self, model: nn.Module) -> None:
        """Note which parameters are looked up row by row, and which are filters of plain convolutions."""
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                self._tables.add(id(module.weight))
            elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
                self._filters.add(id(module.weight))

    def of(self, parameter: Tensor, like: Tensor) -> Projection:
        key = id(parameter), like.dtype, like.device
        found = self._drawn.get(key)
        if found is None:
            found = self._drawn[key] = self._draw(parameter, like.dtype, like.device)
        return found

    def _draw(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Projection:
        name, _ = self._names[id(parameter)]
        rows, columns = matrix_shape(parameter.shape)
        table, filters = id(parameter) in self._tables, id(parameter) in self._filters
        k_rows, k_columns = split_k(self.k, rows, columns, convolution=parameter.dim() > 2, table=table)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (self.seed & 0xFFFFFFFF))
        left = draw_side(rows, k_rows, generator).to(device, dtype)
        taps: Taps | None = None
        # One more column of the weight for its bias.
        if filters and math.prod(parameter.shape[2:]) >= k_columns > 1 and columns >= k_columns:
            right, taps = draw_taps(parameter.shape[1:], k_columns, generator)
            taps = Taps(taps.mix.to(device, dtype), taps.places)
        else:
            right = draw_side(columns + 1, k_columns, generator)
        right = right.to(device, dtype)
        return Projection(
            rows=left,
            columns=right[:-1].contiguous(),
            bias=right[-1],
            rows_t=left.T.contiguous(),
            columns_t=right[:-1].T.contiguous(),
            bias_t=right[-1][:, None].contiguous(),
            taps=taps,
        )

    def bytes(self) -> int:
        held = ((p.rows, p.columns, p.bias, p.rows_t, p.columns_t) for p in self._drawn.values())
        return sum(t.nbytes for tensors in held for t in tensors)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter as a matrix: its first dimension by all others."""
    return (1, 1) if len(shape) == 0 else (shape[0], math.prod(shape[1:]))


MOST_FACTORS = 16  # layers whose factors wait for the outer product; 40 numbers each against 256 in all


class SketchSum:
    """Adds up one batch's sketches, layer by layer.

    Layers with one position per example come as factors (k_o × b and k_i × b, examples last), whose outer products wait
    until several batches are there (`join`): one long pass over memory costs a third of many short ones.
    """

    def __init__(self, batch: int, projections: Projections) -> None:
        self.batch = batch
        self.projections = projections
        self.factors: list[tuple[Tensor, Tensor]] = []
        self.summed: Tensor | None = None
        """k × b."""

    def add_outer(self, left_kb: Tensor, right_kb: Tensor) -> None:
        """One outer product per example, from factors with the examples last."""
        self.factors.append((left_kb, right_kb))
        if len(self.factors) == MOST_FACTORS:
            self.summed, self.factors = _outer(self.factors, self.summed), []

    def add(self, sketch_bkk: Tensor) -> None:
        sketch = _at_least_float(sketch_bkk).reshape(self.batch, -1).T
        self.summed = sketch if self.summed is None else self.summed.add_(sketch)

    @property
    def empty(self) -> bool:
        return not self.factors and self.summed is None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two sums must have in common to be joined."""
        kinds = tuple((left.shape[0], left.dtype, left.device) for left, _ in self.factors)
        return (self.summed is None, *kinds)


def join(sums: Sequence[SketchSum], scales: Sequence[float | Tensor]) -> Tensor:
    """The sketches of several batches one after another (n × k), each batch times its scale."""
    if len({one.shape for one in sums}) > 1:
        return torch.cat([join([one], [scale]) for one, scale in zip(sums, scales, strict=True)])
    if len(sums) == 1:
        total = _outer(sums[0].factors, sums[0].summed)
    else:
        layers = zip(*(one.factors for one in sums), strict=True)
        factors = [(torch.cat([f[0] for f in of], 1), torch.cat([f[1] for f in of], 1)) for of in layers]
        summed = [one.summed for one in sums if one.summed is not None]
        total = _outer(factors, torch.cat(summed, 1) if summed else None)
    first = scales[0]
    if all(scale is first or (type(scale) is float and scale == first) for scale in scales):
        total = total.mul_(first)
    else:
        each = [total.new_ones(one.batch).mul_(scale) for one, scale in zip(sums, scales, strict=True)]
        total = total.mul_(torch.cat(each))
    return total.T


def _outer(factors: Sequence[tuple[Tensor, Tensor]], total: Tensor | None) -> Tensor:
    """``total`` (k × n) plus the outer products of the factors, in place."""
    for left_kn, right_kn in factors:
        left, right = _at_least_float(left_kn)[:, None, :], _at_least_float(right_kn)[None, :, :]
        if total is None:
            total = (left * right).flatten(0, 1)
        else:
            total.unflatten(0, (left.shape[0], -1)).addcmul_(left, right)
    assert total is not None
    return total


def _at_least_float(x: Tensor) -> Tensor:
    # Half precision is enough for the factors but not for sums over layers and batches.
    return x if x.dtype is torch.float32 else x.float() if x.dtype.itemsize < 4 else x
