"""Rows on the accelerator as they are, before anything is computed from them.

Checking, hashing, averaging and permuting 60,000 images takes a processor longer than an accelerator takes to
train on them. So rows travel once, in the type they have, through page-locked memory, and all of that happens
over there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernel.operands import tensor_of

STAGE_BYTES = 8 << 20
STAGES = 3
SHARE = 4
"""Rows may take one part in so many of the budget; larger ones stay where they are."""


def place_rows(rows: Any, device: torch.device, budget: int) -> tuple[Any, int]:
    """(the rows on the device, bytes that this took), or the rows as they are when they do not fit."""
    if hasattr(rows, "tocsr") or isinstance(rows, Tensor) or device.type != "cuda":
        return rows, 0
    if SHARE * rows.nbytes > budget or rows.dtype.kind not in "fiub":
        return rows, 0
    placed = upload(tensor_of(rows), device)
    return placed, placed.numel() * placed.element_size()


def upload(source: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the processor fills one page-locked stage while others are being sent."""
    if device.type != "cuda":
        return source
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    values, sent = source.reshape(-1), out.view(-1)
    size = STAGE_BYTES // source.element_size()
    stages = [torch.empty(size, dtype=source.dtype, pin_memory=True) for _ in range(STAGES)]
    events: list[torch.cuda.Event | None] = [None] * STAGES
    with torch.cuda.device(device):
        for number, start in enumerate(range(0, len(values), size)):
            slot = number % STAGES
            earlier = events[slot]
            if earlier is not None:
                earlier.synchronize()  # the stage is free once its last copy has arrived
            piece = values[start : start + size]
            stage = stages[slot][: len(piece)].copy_(piece)
            sent[start : start + size].copy_(stage, non_blocking=True)
            sending = torch.cuda.Event()
            sending.record()
            events[slot] = sending
    return out


def all_finite(rows: Tensor) -> bool:
    """Whether no value is NaN or infinite; one number comes back from the device."""
    if not rows.is_floating_point():
        return True
    return bool(torch.isfinite(rows.sum(dtype=torch.float64)))
