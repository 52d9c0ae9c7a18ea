"""The walk as one Triton kernel: one program, all inner products in registers, no launch per sign."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
