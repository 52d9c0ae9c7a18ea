"""The walk in Triton: one program, what it needs in registers, no launch per sign.

`walk_triton` walks over inner products. `sign_pairs` walks over the vectors themselves, which needs no Gram matrix, and
does everything else that a chunk of pairs needs in the same launch: the running sum, the signs by row, the drift meter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.order.drift import SLOTS, DriftMeter


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _walk_kernel(products, gram, bar, signs, count: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    inside = column < count
    running = tl.load(products + column, mask=inside, other=0.0)
    threshold = tl.load(bar + column, mask=inside, other=0.0)
    chosen = tl.zeros([BLOCK], dtype=running.dtype)
    row = tl.load(gram + column, mask=inside, other=0.0)
    for i in range(count):
        # The next row is on its way while this one's sign is found.
        following = tl.load(gram + (i + 1) * count + column, mask=inside & (i + 1 < count), other=0.0)
        here = column == i
        gap = tl.sum(tl.where(here, running - threshold, 0.0), axis=0)
        sign = tl.where(gap < 0, 1.0, -1.0).to(running.dtype)
        running += sign * row
        chosen = tl.where(here, sign, chosen)
        row = following
    tl.store(signs + column, chosen, mask=inside)


def walk_triton(products: Tensor, gram: Tensor, bar: Tensor | None = None) -> Tensor:
    """Signs for at most some thousands of vectors; see `headrace.order.balance.walk`."""
    count = len(products)
    signs = torch.empty_like(products)
    if count:
        bar = torch.zeros_like(products) if bar is None else bar
        block = max(32, triton.next_power_of_2(count))
        # One warp needs no barrier to find a sign; more than 16 numbers a lane would spill.
        warps = 1 if block <= 512 else 4
        _walk_kernel[(1,)](
            products.contiguous(),
            gram.contiguous(),
            bar.contiguous(),
            signs,
            count,
            BLOCK=block,
            num_warps=warps,
        )
    return signs


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _finite(x):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # a gradient that overflowed tells nothing


@triton.jit(do_not_specialize=["rows", "n"], do_not_specialize_on_alignment=["indices"])  # type: ignore[untyped-decorator, unused-ignore]
def _pairs_kernel(  # type: ignore[no-untyped-def]
    vectors, indices, signs, running, sums, counts, energy, position, rows, n,
    k: tl.constexpr, SIGNS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < k
    total = tl.load(running + column, mask=inside, other=0.0)
    begin = tl.load(position)
    slot = tl.minimum(begin * SLOTS // n, SLOTS - 1)
    end = ((slot + 1) * n + SLOTS - 1) // SLOTS  # the first row of the next stretch
    stretch = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    held = 0
    even = tl.load(vectors + column, mask=inside, other=0.0)
    odd = tl.load(vectors + k + column, mask=inside, other=0.0)
    left, right = tl.load(indices), tl.load(indices + 1)
    for first in range(0, rows - 1, 2):
        # The next pair is on its way while this one's sign is found.
        there = column < tl.where(first + 3 < rows, k, 0)
        next_even = tl.load(vectors + (first + 2) * k + column, mask=there, other=0.0)
        next_odd = tl.load(vectors + (first + 3) * k + column, mask=there, other=0.0)
        following = tl.minimum(first + 2, rows - 2)
        next_left, next_right = tl.load(indices + following), tl.load(indices + following + 1)
        even, odd = _finite(even), _finite(odd)
        gap = even - odd
        sign = tl.where(tl.sum(total * gap, axis=0) < 0, 1.0, -1.0).to(total.dtype)
        total += sign * gap
        tl.store(signs + left * SIGNS, sign.to(tl.int8))
        tl.store(signs + right * SIGNS, (-sign).to(tl.int8))
        for which in tl.static_range(2):
            if begin + first + which >= end:
                here = sums + slot * k + column
                tl.store(here, tl.load(here, mask=inside, other=0.0) + stretch, mask=inside)
                tl.store(counts + slot, tl.load(counts + slot) + held)
                stretch = tl.zeros([BLOCK], dtype=tl.float32)
                held = 0
                slot = tl.minimum((begin + first + which) * SLOTS // n, SLOTS - 1)
                end = ((slot + 1) * n + SLOTS - 1) // SLOTS
            row = (even if which == 0 else odd).to(tl.float32)
            stretch += row
            squares += row * row
            held += 1
        even, odd, left, right = next_even, next_odd, next_left, next_right
    here = sums + slot * k + column
    tl.store(here, tl.load(here, mask=inside, other=0.0) + stretch, mask=inside)
    tl.store(counts + slot, tl.load(counts + slot) + held)
    tl.store(running + column, total, mask=inside)
    tl.store(energy, tl.load(energy) + tl.sum(squares, axis=0))
    tl.store(position, begin + rows)


def sign_pairs(
    vectors_bk: Tensor, indices: Tensor, signs_n1: Tensor, running_k: Tensor, meter: DriftMeter
) -> None:
    """Sign an even number of rows pair by pair; moves the running sum and the meter along, in place."""
    rows, k = vectors_bk.shape
    if rows == 0:
        return
    block = max(32, triton.next_power_of_2(k))
    _pairs_kernel[(1,)](
        vectors_bk.contiguous(), indices.contiguous(), signs_n1, running_k, meter.sums, meter.counts, meter.energy,
        meter.position, rows, max(meter.n, 1), k, signs_n1.stride(0), SLOTS, BLOCK=block,
        num_warps=1 if block <= 512 else 4,
    )  # fmt: skip
