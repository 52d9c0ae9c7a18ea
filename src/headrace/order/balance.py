"""Signs and orders: the pure part of gradient balancing.

An epoch visits vectors z_1, z_2, … (centred example gradients, or differences of pairs). A walk gives each a sign
that keeps the running sum s small: ε = +1 if ⟨s, z⟩ < bar, else −1, then s += εz. The bar is 0 for the greedy walk
(so a tie gives −1) and a·(1 − 2u) with u uniform in [0, 1) for the random ones, which then draw + with probability
½(1 − ⟨s, z⟩/a). The next order takes the + in visiting order and then the − reversed (Harvey and Samadi 2014):
its largest prefix sum is at most half of (the largest prefix sum before + the largest signed prefix sum).

A walk needs no vectors, only the inner products r_i = ⟨s, z_i⟩ and the Gram matrix C. That is what makes a batch
cheap: one product for all inner products, then a scalar loop. On a CUDA device the loop is one Triton kernel, or a
chain of small torch kernels where Triton is missing; neither waits for the host.

Shape suffixes: n examples, b batch, k sketch or gradient dimension.
Papers: Lu, Guo, De Sa (NeurIPS 2022); Cooper et al. (NeurIPS 2023).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor

from headrace.errors import OptionError

Array = numpy.typing.NDArray[Any]

BLOCK = 32  # vectors whose Gram matrix is made at once on a CPU: 16 to 64 are equally fast for k = 256
RULES = ("greedy", "random", "adaptive")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a sign follows from the inner product with the running sum."""

    name: str = "greedy"
    """``greedy``; ``random``: the self-balancing walk; ``adaptive``: the same with a scale that adapts."""
    scale: float = 1.0
    """``random`` only: c in P(+) = ½ − ⟨s, z⟩/2c, in units of the largest ‖z‖² seen. High is near to coin flips."""

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise OptionError(f"rule {self.name!r} is unknown: known are {', '.join(RULES)}")
        if not self.scale > 0:
            raise OptionError(f"scale={self.scale!r} was asked for; it must be above 0")


def walk(products: Tensor, gram: Tensor, bar: Tensor | None = None) -> Tensor:
    """Signs ±1 for vectors whose inner products with the running sum and with one another are given.

    ``bar`` holds one threshold per vector; None is zero for all.
    """
    if products.device.type == "cpu":
        return _walk_on_host(products, gram, bar)
    if has_kernel(products.device):
        from headrace.order.walk_triton import walk_triton

        return walk_triton(products, gram, bar)
    return walk_in_torch(products, gram, bar)


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def warm_walk(device: torch.device, lengths: Iterable[int]) -> None:
    """Compile what walks over so many vectors need: while a graph is captured it is too late."""
    if has_kernel(device):
        for length in lengths:
            walk(torch.zeros(length, device=device), torch.zeros(length, length, device=device))


def warm_pairs(device: torch.device, dtype: torch.dtype, k: int) -> None:
    """Compile what signs pairs of such vectors."""
    from headrace.order.drift import DriftMeter
    from headrace.order.walk_triton import sign_pairs

    signs, rows = torch.zeros(2, 1, dtype=torch.int8, device=device), torch.arange(2, device=device)
    vectors = torch.zeros(3, k, dtype=dtype, device=device)
    sign_pairs(vectors[:2], rows, signs, vectors[2], DriftMeter(2, k, device))


def _walk_on_host(products: Tensor, gram: Tensor, bar: Tensor | None) -> Tensor:
    running: Array = products.detach().numpy().copy()
    chosen: Array = numpy.empty(len(running), dtype=running.dtype)
    bars = None if bar is None else bar.tolist()
    _walk_rows(running, gram.detach().numpy(), bars, chosen)
    return torch.from_numpy(chosen)


def _walk_rows(running: Array, gram: Array, bars: list[float] | None, signs: Array) -> None:
    """The walk itself; ``running`` holds the inner products and is used up.

    NumPy rather than torch: a torch operation costs about 3 µs here, a NumPy one 0.5 µs.
    """
    for i, row in enumerate(gram):
        if running[i] < (0.0 if bars is None else bars[i]):
            signs[i] = 1.0
            running += row
        else:
            signs[i] = -1.0
            running -= row


def walk_vectors(vectors_bk: Tensor, running_k: Tensor, bar: Tensor | None = None) -> Tensor:
    """Signs for vectors that are there; moves the running sum along, in place."""
    if vectors_bk.device.type != "cpu":
        signs = walk(vectors_bk @ running_k, vectors_bk @ vectors_bk.T, bar)
        running_k.addmv_(vectors_bk.T, signs)
        return signs
    vectors, running = vectors_bk.detach().numpy(), running_k.detach().numpy()
    chosen: Array = numpy.empty(len(vectors), dtype=vectors.dtype)
    bars = None if bar is None else bar.tolist()
    for start in range(0, len(vectors), BLOCK):
        block, here = vectors[start : start + BLOCK], chosen[start : start + BLOCK]
        stretch = None if bars is None else bars[start : start + BLOCK]
        products = block @ running
        if not numpy.isfinite(products).all():
            # Gradients that overflowed (a too large AMP scale) tell nothing: their rows stay unsigned.
            here[:] = 0.0
            continue
        _walk_rows(products, block @ block.T, stretch, here)
        running += here @ block
    return torch.from_numpy(chosen)


def walk_in_torch(products: Tensor, gram: Tensor, bar: Tensor | None = None) -> Tensor:
    """The same walk in torch operations alone, which never wait for the device."""
    running = products.clone()
    bar = torch.zeros_like(products) if bar is None else bar
    signs = []
    for i in range(len(gram)):
        sign = torch.where(running[i] < bar[i], 1.0, -1.0).to(running.dtype)
        running = running + sign * gram[i]
        signs.append(sign)
    return torch.stack(signs) if signs else torch.zeros_like(products)


def walk_adaptive(products: Tensor, gram: Tensor, uniform: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The walk whose scale is the largest |⟨s, z⟩| so far; returns the signs and the new scale."""
    running = products.clone()
    signs = []
    for i in range(len(gram)):
        largest = torch.maximum(largest, running[i].abs())
        bar = largest * (1 - 2 * uniform[i])
        sign = torch.where(running[i] < bar, 1.0, -1.0).to(running.dtype)
        running = running + sign * gram[i]
        signs.append(sign)
    return torch.stack(signs) if signs else torch.zeros_like(products), largest


def reorder(order: Tensor, signs: Tensor) -> Tensor:
    """The next order: those with sign + in visiting order, then those with sign − reversed.

    ``signs[t]`` belongs to ``order[t]``; an entry with sign 0 keeps its rank. Shapes do not depend on values, so this
    runs on a device without waiting for it.
    """
    signed = signs != 0
    plus, minus = signs > 0, signs < 0
    free = torch.argsort(torch.logical_not(signed).to(torch.uint8), stable=True)
    rank = torch.where(minus, signed.sum() - minus.cumsum(0), plus.cumsum(0) - 1)
    here = torch.arange(len(order), device=order.device)
    target = torch.where(signed, free[rank.clamp_(min=0)], here)
    return torch.empty_like(order).scatter_(0, target, order)


def reorder_tree(order: Tensor, signs: Tensor) -> Tensor:
    """The next order from several levels of signs (n × depth): the first splits, each half is split again."""
    if signs.shape[1] == 0 or len(order) == 0:
        return order
    if signs.shape[1] == 1:
        return reorder(order, signs[:, 0])
    first = signs[:, 0]
    # Only the root holds unsigned entries apart: below it a left-over goes with the +.
    below = torch.where(signs[:, 1:] == 0, torch.ones_like(signs[:, 1:]), signs[:, 1:])
    plus = reorder_tree(order[first > 0], below[first > 0])
    minus = reorder_tree(order[first < 0], below[first < 0])
    result = order.clone()
    result[first != 0] = torch.cat([plus, minus.flip(0)])
    return result


def drift(vectors_nk: Tensor, order: Tensor | None = None) -> float:
    """H: the largest norm of a prefix sum of the centred vectors in this order. Lower is better; about √n if random."""
    centred = vectors_nk - vectors_nk.mean(0)
    if order is not None:
        centred = centred[order]
    return float(centred.cumsum(0).norm(dim=1).max()) if len(centred) else 0.0
