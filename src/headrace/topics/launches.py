"""How the Triton kernels of `fused.py` are launched: which documents together, with how many threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.topics import fused
from headrace.topics.batched import Beginning, Inferred, Tables
from headrace.topics.estep import Inference
from headrace.topics.resident import Part, Resident

SWEEP = (4, 16)
"""Warps, and words read at a time, of the stages that read all topics."""
CLASSES = ((128, 1), (512, 4), (1024, 8))
"""Documents of up to so many distinct words: so many warps in the stage that holds them in registers. Longer
documents are read again in every iteration."""
LIVE = 16
"""Topics a document may keep when it goes on in registers."""


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def tables(
    excess_vw: Tensor, column_w: Tensor, topics: int, prior: float, scale: float, collapsed: bool, eps: float
) -> Tables:
    """`batched.tables` in one kernel."""
    words, width = excess_vw.shape
    rows_vw, scales_v = torch.empty_like(excess_vw), torch.empty(words, device=excess_vw.device)
    floors_v = torch.empty_like(scales_v) if eps else scales_v
    tile = 8
    fused.rows_kernel[(-(-words // tile),)](
        excess_vw, column_w, rows_vw, floors_v, scales_v, words, topics, width, prior, scale, eps,
        COLLAPSED=collapsed, HAS_EPS=bool(eps), K_PAD=_power_of_two(width), TILE=tile,
    )  # fmt: skip
    return Tables(rows_vw, scales_v, floors_v if eps else None)


def infer(
    resident: Resident, part: Part, given: Tables, how: Inference, noise: int, beginning: Beginning
) -> Inferred:
    """`batched.infer`: a launch for each class of lengths, and nothing that the host waits for."""
    device, alpha_k, width = resident.device, beginning.alpha_k, given.rows_vw.shape[1]
    topics = len(alpha_k)
    gammas_bk = torch.empty(part.documents, topics, device=device)
    powers_bw = torch.empty(part.documents, width, device=device)
    moved_b = torch.empty(part.documents, device=device)
    rounds_b = torch.empty(part.documents, dtype=torch.int32, device=device)
    shares_e = torch.empty(len(resident.counts), device=device)
    floors_v = given.scales_v if given.floors_v is None else given.floors_v
    documents = (resident.indptr, resident.indices, resident.counts)
    numbers = (part.first, topics, width, how.tol * topics, float(how.alpha.sum()), how.max_iter)
    kind = {"COLLAPSED": how.collapsed, "HAS_EPS": given.floors_v is not None, "K_PAD": _power_of_two(width)}
    warps, tile = SWEEP
    few = LIVE if topics > LIVE else 0
    if not part.documents:
        return Inferred(gammas_bk, powers_bw, shares_e, rounds_b)
    fused.begin_kernel[(part.documents,)](
        *documents, part.order, given.rows_vw, floors_v, alpha_k, beginning.jumps, gammas_bk, powers_bw, moved_b,
        rounds_b, *numbers, noise, **kind, HAS_NOISE=bool(noise), TILE=tile, CAP=few, num_warps=warps,
    )  # fmt: skip
    for block, block_warps, start, stop, single in _classes(part) if few else ():
        fused.few_kernel[(stop - start,)](
            *documents, part.order[start:stop], given.rows_vw, floors_v, alpha_k, gammas_bk, powers_bw, moved_b,
            rounds_b, *numbers, **kind, CAP=few, BLOCK=block, SINGLE=single, num_warps=block_warps,
        )  # fmt: skip
    fused.finish_kernel[(part.documents,)](
        *documents, part.order, given.rows_vw, floors_v, alpha_k, gammas_bk, powers_bw, shares_e, moved_b, rounds_b,
        *numbers, **kind, TILE=tile, num_warps=warps,
    )  # fmt: skip
    return Inferred(gammas_bk, powers_bw, shares_e, rounds_b)


def _classes(part: Part) -> list[tuple[int, int, int, int, bool]]:
    """(words in a block, warps, first and last in the order, whether the block holds a whole document)."""
    # Lengths fall: documents longer than a class's limit come first.
    longer = [int(np.searchsorted(-part.lengths, -limit, side="left")) for limit, _ in CLASSES]
    found = [(*CLASSES[-1], 0, longer[-1], False)]
    for (block, warps), start, stop in zip(CLASSES, longer, [part.documents, *longer], strict=False):
        found.append((block, warps, start, stop, True))
    return [entry for entry in found if entry[3] > entry[2]]


def add(
    excess_vw: Tensor, resident: Resident, part: Part, given: Tables, done: Inferred, factor: float
) -> None:
    """`batched.add`: one program for each distinct word of the mini-batch."""
    if part.end > part.begin:
        width = excess_vw.shape[1]
        fused.step_kernel[(part.end - part.begin,)](
            resident.words, resident.starts, resident.entries, resident.docs, done.shares_e, done.powers_bw,
            given.rows_vw, excess_vw, part.begin, factor, width, K_PAD=_power_of_two(width), TILE=8, num_warps=2,
        )  # fmt: skip


def word_sum(resident: Resident, part: Part, given: Tables, powers_bw: Tensor) -> Tensor:
    """`batched.word_sum` in one kernel."""
    out = torch.empty(part.documents, dtype=torch.float64, device=resident.device)
    width = given.rows_vw.shape[1]
    if part.documents:
        fused.likelihood_kernel[(part.documents,)](
            resident.indptr, resident.indices, resident.counts, given.rows_vw, given.scales_v, powers_bw, out,
            part.first, width, K_PAD=_power_of_two(width), TILE=32,
        )  # fmt: skip
    return out.sum()
