"""Pieces: one layer's example gradients, kept as the factors that the backward pass has anyway.

Each kind of piece knows four things: its sketch, its inner products with a vector, its Gram matrix and its weighted
sum. None needs the example gradients themselves unless that is the cheapest way (`headrace.order.cost`).

- `Factors`: Σ_p δ_p a_pᵀ and Σ_p δ_p: linear layers, recurrent and attention projections.
- `Convolution`: the same with a_p cut out of the input; unfolded only where it must be.
- `Tokens`: δ_p added to the row of token p: embeddings.
- `Dense`: example gradients that are there: norms, grouped convolutions, anything else.

Shapes: b examples, p positions, o rows and i columns of the weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.order.cost import Sizes, choose_gram, choose_sketch, choose_tokens_gram
from headrace.order.sketch import Projection, SketchSum, Taps, matrix_shape

View = Callable[[Tensor], Tensor]
"""Parameter → its part of a long vector, in the parameter's shape."""


@dataclass
class Dense:
    """Example gradients of one parameter, b × its shape."""

    parameter: Tensor
    gradients: Tensor

    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def sketch(self, into: SketchSum) -> None:
        projection = into.projections.of(self.parameter, self.gradients)
        rows, columns = matrix_shape(self.parameter.shape)
        matrices = self.gradients.reshape(len(self.gradients), rows, columns)
        if columns == 1:
            left = projection.rows_t @ matrices[:, :, 0].T
            into.add_outer(left, projection.columns_t.expand(-1, left.shape[1]))
        else:
            into.add(project_sum(projection.rows_t, matrices) @ projection.columns)

    def flat(self) -> Tensor:
        return self.gradients.reshape(len(self.gradients), -1)

    def dot(self, view: View) -> Tensor:
        return self.flat() @ view(self.parameter).reshape(-1)

    def gram(self) -> Tensor:
        flat = self.flat()
        return flat @ flat.T

    def add_to(self, view: View, weights: Tensor) -> None:
        view(self.parameter).add_((weights @ self.flat()).view(self.parameter.shape))

    def dense(self) -> list[Dense]:
        return [self]


@dataclass
class Factors:
    """δ (b × p × o) and a (b × p × i) of a weight and its bias; either may be None (absent or frozen)."""

    weight: Tensor | None
    bias: Tensor | None
    left: Tensor
    right: Tensor

    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def _sizes(self) -> Sizes:
        return Sizes(self.left.shape[0], self.left.shape[1], self.left.shape[2], self.right.shape[2])

    def sketch(self, into: SketchSum) -> None:
        if self.weight is None:
            Dense(self._bias(), self.left.sum(1)).sketch(into)
            return
        projection = into.projections.of(self.weight, self.left)
        right = self.right if self.right.dtype == self.left.dtype else self.right.to(self.left.dtype)
        if self.left.shape[1] == 1:
            left_kb = projection.rows_t @ self.left[:, 0].T
            into.add_outer(left_kb, project_inputs(right[:, 0], projection, self.bias))
            return
        way = choose_sketch(self._sizes(), *projection.split)
        into.add(contract(self.left, right, projection, self.bias, way))

    def _bias(self) -> Tensor:
        assert self.bias is not None
        return self.bias

    def dot(self, view: View) -> Tensor:
        value = self.left.new_zeros(())
        if self.weight is not None:
            value = self.right @ view(self.weight).reshape(self.left.shape[2], -1).T
        if self.bias is not None:
            value = value + view(self.bias)
        return (self.left * value).sum((1, 2))

    def gram(self) -> Tensor:
        b, p, _, _ = self._sizes()
        if p == 1:
            left, right = self.left[:, 0], self.right[:, 0]
            inputs = right @ right.T if self.weight is not None else left.new_zeros(b, b)
            return (inputs + float(self.bias is not None)) * (left @ left.T)
        if choose_gram(self._sizes()) == "materialise":
            return sum((piece.gram() for piece in self.dense()), self.left.new_zeros(b, b))
        left, right = self.left.reshape(b * p, -1), self.right.reshape(b * p, -1)
        inputs = right @ right.T if self.weight is not None else left.new_zeros(b * p, b * p)
        pairs = (inputs + float(self.bias is not None)) * (left @ left.T)
        return pairs.view(b, p, b, p).sum((1, 3))

    def add_to(self, view: View, weights: Tensor) -> None:
        left = self.left * weights[:, None, None]
        if self.weight is not None:
            product = left.flatten(0, 1).T @ self.right.flatten(0, 1)
            view(self.weight).add_(product.view(self.weight.shape))
        if self.bias is not None:
            view(self.bias).add_(left.sum((0, 1)))

    def dense(self) -> list[Dense]:
        pieces = []
        if self.weight is not None:
            product = torch.bmm(self.left.transpose(1, 2), self.right)
            pieces.append(Dense(self.weight, product.view(-1, *self.weight.shape)))
        if self.bias is not None:
            pieces.append(Dense(self.bias, self.left.sum(1)))
        return pieces


def project_inputs(right: Tensor, projection: Projection, bias: Tensor | None) -> Tensor:
    """([a, 1] R_i)ᵀ, or (a R_i)ᵀ without a bias, for one row a per example."""
    if bias is None:
        return projection.columns_t @ right.T
    return torch.addmm(projection.bias_t, projection.columns_t, right.T)


def project_all(matrix_kf: Tensor, x: Tensor) -> Tensor:
    """b × p × f projected to k × b × p, as one product over all positions and without copying x where possible."""
    b, p, f = x.shape
    if not x.is_contiguous() and x.stride(2) == 1 and x.stride(1) == b * x.stride(0):
        # Positions came first in memory (sequence-first attention): the small result is turned, not x.
        flat = matrix_kf @ x.transpose(0, 1).reshape(-1, f).T
        return flat.view(-1, p, b).transpose(1, 2).contiguous()
    return (matrix_kf @ x.reshape(-1, f).T).view(-1, b, p)


def contract(left: Tensor, right: Tensor, projection: Projection, bias: Tensor | None, way: str) -> Tensor:
    """R_oᵀ (Σ_p δ_p [a_p, 1]ᵀ) R_i, in the order of contraction that ``way`` names."""
    if way in ("inputs", "sketch"):
        right_kbp = project_all(projection.columns_t, right)
        if bias is not None:
            right_kbp += projection.bias_t[:, :, None]
        right = right_kbp.permute(1, 2, 0)
        if way == "inputs":
            return project_sum(projection.rows_t, torch.bmm(left.transpose(1, 2), right))
        return torch.bmm(project_all(projection.rows_t, left).transpose(0, 1), right)
    if way == "outputs":
        left = left @ projection.rows
        result = torch.bmm(left.transpose(1, 2), right) @ projection.columns
        summed = left.sum(1)
    else:
        result = project_sum(projection.rows_t, torch.bmm(left.transpose(1, 2), right)) @ projection.columns
        summed = left.sum(1) @ projection.rows
    return result if bias is None else result + summed[:, :, None] * projection.bias


def project_sum(rows_t: Tensor, sums_bok: Tensor) -> Tensor:
    """R_oᵀ times every example's o × k matrix, as one product: broadcasting would run one per example."""
    b, o, k = sums_bok.shape
    return (rows_t @ sums_bok.transpose(0, 1).reshape(o, b * k)).view(-1, b, k).transpose(0, 1)


@dataclass
class Convolution:
    """A convolution without groups: input (b × c × …) and δ (b × o × …)."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d
    weight: Tensor | None
    bias: Tensor | None
    input: Tensor
    delta: Tensor

    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    def sketch(self, into: SketchSum) -> None:
        if self.weight is None:
            self.factors().sketch(into)
            return
        delta = self.delta.flatten(2)
        sizes = Sizes(len(delta), delta.shape[2], self.weight.shape[0], self.weight[0].numel())
        projection = into.projections.of(self.weight, delta)
        touched = None if projection.taps is None else self.weight.shape[1]
        way = choose_sketch(sizes, *projection.split, unfold=True, touched=touched)
        if way in ("outputs", "materialise"):
            factors = self.factors()
            into.add(contract(factors.left, factors.right, projection, self.bias, way))
            return
        right = self._project(projection, self.input.to(delta.dtype)).flatten(2)
        if self.bias is not None and projection.taps is not None:
            right += projection.bias_t
        if way == "sketch":
            into.add(torch.bmm(projection.rows_t @ delta, right.transpose(1, 2)))
            return
        # Channels last in memory: with delta as the right factor the product is 1.2 to 4.5 times as fast on cores.
        first = (delta, right.transpose(1, 2)) if delta.is_contiguous() else (right, delta.transpose(1, 2))
        sums = torch.bmm(*first)
        into.add(project_sum(projection.rows_t, sums if delta.is_contiguous() else sums.transpose(1, 2)))

    def _project(self, projection: Projection, x: Tensor) -> Tensor:
        """The inputs under R_i, b × k_i × positions, without cutting out patches."""
        if projection.taps is not None:
            return tap(self.module, projection.taps, x, self.delta.shape[2:])
        # A convolution with k_i random filters.
        assert self.weight is not None
        filters = projection.columns_t.view(-1, *self.weight.shape[1:])
        return convolve(self.module, x, filters, projection.bias if self.bias is not None else None)

    def factors(self) -> Factors:
        right = patches(self.module, self.input).to(self.delta.dtype)
        return Factors(self.weight, self.bias, self.delta.flatten(2).transpose(1, 2), right)

    def dot(self, view: View) -> Tensor:
        value = self.delta.new_zeros(())
        if self.weight is not None:
            value = convolve(self.module, self.input.to(self.delta.dtype), view(self.weight), None)
        if self.bias is not None:
            value = value + view(self.bias).view(-1, *[1] * (self.delta.dim() - 2))
        return (self.delta * value).flatten(1).sum(1)

    def gram(self) -> Tensor:
        return self.factors().gram()

    def add_to(self, view: View, weights: Tensor) -> None:
        self.factors().add_to(view, weights)

    def dense(self) -> list[Dense]:
        return self.factors().dense()


_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def pad(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """The input with the convolution's padding made explicit."""
    sides = module._reversed_padding_repeated_twice
    if not any(sides):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, sides, mode=mode)


def convolve(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The module's convolution with other filters."""
    function = _CONVOLVE[x.dim() - 2]
    if module.padding_mode == "zeros":
        result: Tensor = function(x, weight, bias, module.stride, module.padding, module.dilation)
    else:
        result = function(pad(module, x), weight, bias, module.stride, 0, module.dilation)
    return result


def tap(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, taps: Taps, x: Tensor, places: Sequence[int]) -> Tensor:
    """Mixed channels, each seen from its own place in the filter: b × k_i × the output's places."""
    mixed = torch.matmul(taps.mix, x.flatten(2)).view(len(x), -1, *x.shape[2:])
    mixed = pad(module, mixed)
    seen = []
    for column, place in enumerate(taps.places):
        cut: tuple[Any, ...] = tuple(
            slice(at * gap, at * gap + (count - 1) * step + 1, step)
            for at, gap, step, count in zip(place, module.dilation, module.stride, places, strict=True)
        )
        seen.append(mixed[(slice(None), column, *cut)])
    return torch.stack(seen, 1)


def patches(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """The input cut into the patches that the filters see: b × p × (c · filter size)."""
    x = pad(module, x)
    spatial = x.dim() - 2
    for axis in range(spatial):
        size, step, gap = module.kernel_size[axis], module.stride[axis], module.dilation[axis]
        x = x.unfold(2 + axis, (size - 1) * gap + 1, step)[..., ::gap]
    places = list(range(2, 2 + spatial))
    x = x.permute(0, *places, 1, *range(2 + spatial, 2 + 2 * spatial))
    return x.flatten(1 + spatial).flatten(1, spatial)


@dataclass
class Tokens:
    """An embedding: token numbers (b × p) and δ (b × p × i)."""

    weight: Tensor
    ids: Tensor
    delta: Tensor

    def parameters(self) -> list[Tensor]:
        return [self.weight]

    def sketch(self, into: SketchSum) -> None:
        projection = into.projections.of(self.weight, self.delta)
        left = F.embedding(self.ids, projection.rows)
        if self.ids.shape[1] == 1:
            into.add_outer(left[:, 0].T, projection.columns_t @ self.delta[:, 0].T)
        else:
            right = project_all(projection.columns_t, self.delta)
            into.add(torch.bmm(left.transpose(1, 2), right.permute(1, 2, 0)))

    def dot(self, view: View) -> Tensor:
        return (F.embedding(self.ids, view(self.weight)) * self.delta).sum((1, 2))

    def gram(self) -> Tensor:
        b, p = self.ids.shape
        distinct, places = torch.unique(self.ids, return_inverse=True)
        if choose_tokens_gram(b, p, len(distinct), self.delta.shape[2]) == "materialise":
            rows = self.delta.new_zeros(b, len(distinct), self.delta.shape[2])
            index = places[:, :, None].expand_as(self.delta)
            flat = rows.scatter_add_(1, index, self.delta).flatten(1)
            return flat @ flat.T
        ids, delta = self.ids.reshape(-1), self.delta.flatten(0, 1)
        pairs = (delta @ delta.T) * (ids[:, None] == ids[None, :])
        return pairs.view(b, p, b, p).sum((1, 3))

    def add_to(self, view: View, weights: Tensor) -> None:
        delta = (self.delta * weights[:, None, None]).flatten(0, 1)
        view(self.weight).index_add_(0, self.ids.reshape(-1), delta)

    def dense(self) -> list[Dense]:
        rows = self.delta.new_zeros(len(self.ids), *self.weight.shape)
        index = self.ids[:, :, None].expand_as(self.delta)
        return [Dense(self.weight, rows.scatter_add_(1, index, self.delta))]


@dataclass
class Normed:
    """A norm's scale and shift: example gradients that are made when they are asked for."""

    weight: Tensor | None
    bias: Tensor | None
    normalise: Callable[[Tensor], Tensor]
    """The norm without scale and shift; it must treat every example by itself."""
    input: Tensor
    delta: Tensor
    keep: tuple[int, ...]
    """The dimensions (besides the first) that the parameters have."""

    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]

    @functools.cached_property
    def _parts(self) -> list[Dense]:
        others = [d for d in range(1, self.delta.dim()) if d not in self.keep]
        parts: list[Dense] = []
        if self.weight is not None:
            value = self.delta * self.normalise(self.input).to(self.delta.dtype)
            parts.append(Dense(self.weight, value.sum(others) if others else value))
        if self.bias is not None:
            parts.append(Dense(self.bias, self.delta.sum(others) if others else self.delta))
        return parts

    def sketch(self, into: SketchSum) -> None:
        for part in self._parts:
            part.sketch(into)

    def dot(self, view: View) -> Tensor:
        return sum((part.dot(view) for part in self._parts), self.delta.new_zeros(len(self.delta)))

    def gram(self) -> Tensor:
        b = len(self.delta)
        return sum((part.gram() for part in self._parts), self.delta.new_zeros(b, b))

    def add_to(self, view: View, weights: Tensor) -> None:
        for part in self._parts:
            part.add_to(view, weights)

    def dense(self) -> list[Dense]:
        return self._parts


Piece = Dense | Factors | Convolution | Tokens | Normed

_OF_EXAMPLES = ("gradients", "left", "right", "input", "delta", "ids")
"""The fields of pieces that have one entry per example."""


def join_pieces(batches: Sequence[Sequence[Piece]]) -> list[Piece] | None:
    """The pieces of several batches, one after another layer by layer; None when they do not match."""
    if len({len(pieces) for pieces in batches}) > 1:
        return None
    if len(batches) == 1:
        return list(batches[0])
    joined = [_join(parts) for parts in zip(*batches, strict=True)]
    return None if any(piece is None for piece in joined) else [p for p in joined if p is not None]


def _join(parts: Sequence[Piece]) -> Piece | None:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return None
    if any([id(p) for p in part.parameters()] != [id(p) for p in first.parameters()] for part in parts):
        return None
    values: dict[str, Tensor] = {}
    for name in _OF_EXAMPLES:
        if hasattr(first, name):
            tensors = [getattr(part, name) for part in parts]
            if any(t.shape[1:] != tensors[0].shape[1:] or t.dtype != tensors[0].dtype for t in tensors):
                return None
            values[name] = torch.cat(tensors)
    return dataclasses.replace(first, **values)  # type: ignore[arg-type]


class LongRows:
    """The exact example gradients of a batch over all its pieces, as inner products with vectors of d numbers.

    A parameter that several pieces share is materialised: its gradient is the sum of them.
    """

    def __init__(
        self,
        pieces: list[Piece],
        places: dict[int, tuple[int, torch.Size]],
        batch: int,
        scale: float | Tensor,
    ) -> None:
        self.pieces = merge_shared(pieces)
        self.places = places
        self.batch = batch
        self.scale = scale

    def __len__(self) -> int:
        return self.batch

    def _view(self, vector: Tensor) -> View:
        def view(parameter: Tensor) -> Tensor:
            start, shape = self.places[id(parameter)]
            return vector[start : start + shape.numel()].view(shape)

        return view

    def dot(self, vector: Tensor) -> Tensor:
        view = self._view(vector)
        return sum((p.dot(view) for p in self.pieces), vector.new_zeros(self.batch)) * self.scale

    def gram(self) -> Tensor:
        total = sum(p.gram() for p in self.pieces)
        assert isinstance(total, Tensor)
        return total * self.scale * self.scale

    def add_to(self, vector: Tensor, weights: Tensor) -> None:
        view = self._view(vector)
        for piece in self.pieces:
            piece.add_to(view, weights * self.scale)


def merge_shared(pieces: list[Piece]) -> list[Piece]:
    """Pieces of which no two hold the same parameter."""
    uses: dict[int, int] = {}
    for piece in pieces:
        for parameter in piece.parameters():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    kept: list[Piece] = []
    summed: dict[int, Dense] = {}
    for piece in pieces:
        if all(uses[id(p)] == 1 for p in piece.parameters()):
            kept.append(piece)
            continue
        for dense in piece.dense():
            known = summed.get(id(dense.parameter))
            if known is None:
                summed[id(dense.parameter)] = dense
            else:
                summed[id(dense.parameter)] = Dense(known.parameter, known.gradients + dense.gradients)
    return [*kept, *summed.values()]
