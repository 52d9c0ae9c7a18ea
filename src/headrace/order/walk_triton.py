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
    for i in range(count):
        here = column == i
        gap = tl.sum(tl.where(here, running - threshold, 0.0), axis=0)
        sign = tl.where(gap < 0, 1.0, -1.0).to(running.dtype)
        row = tl.load(gram + i * count + column, mask=inside, other=0.0)
        running += sign * row
        chosen = tl.where(here, sign, chosen)
    tl.store(signs + column, chosen, mask=inside)


def walk_triton(products: Tensor, gram: Tensor, bar: Tensor | None = None) -> Tensor:
    """Signs for at most some thousands of vectors; see `headrace.order.balance.walk`."""
    count = len(products)
    signs = torch.empty_like(products)
    if count:
        bar = torch.zeros_like(products) if bar is None else bar
        block = triton.next_power_of_2(count)
        _walk_kernel[(1,)](
            products.contiguous(), gram.contiguous(), bar.contiguous(), signs, count, BLOCK=block
        )
    return signs
