"""The E-step and the step of the topics as batched torch operations: what `fused.py` does without Triton.

The same recurrence, starts and test for convergence as the compiled kernels. Documents of similar length go
together, padded to the longest, in groups whose copied rows stay below `GROUP_NUMBERS`. A document that has
converged keeps its γ; groups shrink to the documents still moving every `LOOK` iterations, which is the only time
the host waits for the device. No topic leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.topics.estep import Inference
from headrace.topics.priors import LEAST
from headrace.topics.resident import Part, Resident

GROUP_NUMBERS = 32_000_000
"""128 MB of float32: large enough to fill an accelerator, small enough for any."""
LOOK = 8
NOTHING = 1e-30
SPREAD = 0.1 * 12.0**0.5


@dataclass(frozen=True)
class Tables:
    """B of all words, every row divided by its largest element."""

    rows_vw: Tensor
    """The padding of K is zero."""
    scales_v: Tensor
    """The logarithm of what a row was divided by."""
    floors_v: Tensor | None
    """scikit-learn's constant in units of it; None for no such constant."""


@dataclass(frozen=True)
class Inferred:
    """What the E-step of a mini-batch leaves behind."""

    gammas_bk: Tensor
    powers_bw: Tensor
    """exp(ψ(γ)), zero for topics that left and in the padding."""
    shares_e: Tensor
    """count / Σ_k e_k B_wk of every entry of the corpus; those of this mini-batch are filled."""
    rounds_b: Tensor


@dataclass(frozen=True)
class Beginning:
    """Where documents begin, on the device."""

    jumps: Tensor
    """The generator of near-one starts, by `jumps`."""
    alpha_k: Tensor
    """The documents' prior, float32."""


def starts(beginning: Beginning, noise: int, documents_b: Tensor) -> Tensor:
    """Where γ begins: one, or near one by the compiled kernels' generator."""
    count, topics, jumps = len(documents_b), len(beginning.alpha_k), beginning.jumps
    if not noise:
        return torch.ones(count, topics, device=documents_b.device)
    draw_b = (noise + (documents_b.to(torch.int64) + 1) * 2654435761) & 0xFFFFFFFF
    draw_bk = (draw_b[:, None] * jumps[0] + jumps[1]) & 0xFFFFFFFF
    return 1.0 + SPREAD * (draw_bk.to(torch.float32) * 2.0**-32 - 0.5)


def jumps(topics: int, device: torch.device) -> Tensor:
    """2 × K: draw k of the generator is first row × start + second row, modulo 2³²."""
    factors, offsets, a, c = [], [], 1, 0
    for _ in range(topics):
        a, c = a * 747796405 & 0xFFFFFFFF, (c * 747796405 + 2891336453) & 0xFFFFFFFF
        factors.append(a)
        offsets.append(c)
    return torch.tensor([factors, offsets], dtype=torch.int64, device=device)


def tables(
    excess_vw: Tensor, column_w: Tensor, topics: int, prior: float, scale: float, collapsed: bool, eps: float
) -> Tables:
    """B from the topics λ = prior + scale × excess."""
    mass = prior * len(excess_vw)
    sums_k = (mass + scale * column_w[:topics]).clamp_(min=1e-3 * mass)
    lambda_vk = prior + scale * excess_vw[:, :topics]
    rows_vw = torch.zeros_like(excess_vw)
    if collapsed:
        rows_vk = lambda_vk / sums_k.to(torch.float32)
        top_v = rows_vk.amax(dim=1) + NOTHING
        rows_vw[:, :topics] = rows_vk / top_v[:, None]
        scales_v = torch.log(top_v)
    else:
        logs_vk = torch.digamma(lambda_vk) - torch.digamma(sums_k).to(torch.float32)
        scales_v = logs_vk.amax(dim=1)
        rows_vw[:, :topics] = torch.exp(logs_vk - scales_v[:, None])
    floors_v = (eps * torch.exp((-scales_v).clamp(max=80.0))).clamp(max=1e30) if eps else None
    return Tables(rows_vw, scales_v, floors_v)


def infer(
    resident: Resident, part: Part, given: Tables, how: Inference, noise: int, beginning: Beginning
) -> Inferred:
    """γ of a mini-batch of documents, group by group."""
    device, alpha_k, width = resident.device, beginning.alpha_k, given.rows_vw.shape[1]
    topics = len(alpha_k)
    gammas_bk = torch.empty(part.documents, topics, device=device)
    powers_bw = torch.zeros(part.documents, width, device=device)
    shares_e = torch.zeros(len(resident.counts), device=device)
    rounds_b = torch.zeros(part.documents, dtype=torch.int32, device=device)
    rows_vk = given.rows_vw[:, :topics]
    for chosen, entry_bn, real_bn in _groups(resident, part, topics):
        word_bn = resident.indices[entry_bn].to(torch.int64)
        count_bn = torch.where(real_bn, resident.counts[entry_bn], 0.0)
        mass_b = float(how.alpha.sum()) + count_bn.sum(dim=1)
        floor_bn = torch.full_like(count_bn, NOTHING)
        if given.floors_v is not None:
            floor_bn += given.floors_v[word_bn] * mass_b[:, None]
        start_bk = starts(beginning, noise, part.first + chosen)
        gamma_bk, rounds = _iterate(rows_vk[word_bn], count_bn, floor_bn, start_bk, alpha_k, how)
        empty_b = ~real_bn.any(dim=1)
        gamma_bk = torch.where(empty_b[:, None], alpha_k, gamma_bk)
        e_bk = _powers(gamma_bk, how.collapsed)
        share_bn = count_bn / (torch.bmm(rows_vk[word_bn], e_bk[:, :, None])[:, :, 0] + floor_bn)
        gammas_bk[chosen], powers_bw[chosen, :topics] = gamma_bk, e_bk
        rounds_b[chosen] = torch.where(empty_b, 0, rounds)
        shares_e[entry_bn[real_bn]] = share_bn[real_bn]
    return Inferred(gammas_bk, powers_bw, shares_e, rounds_b)


def _powers(gamma_bk: Tensor, collapsed: bool) -> Tensor:
    return gamma_bk if collapsed else torch.exp(torch.digamma(gamma_bk))


def _groups(resident: Resident, part: Part, topics: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Documents in padded groups: (their numbers, the numbers of their entries, which of those are real)."""
    start = 0
    while start < part.documents:
        longest = max(1, int(part.lengths[start]))
        stop = min(part.documents, start + max(1, GROUP_NUMBERS // (longest * topics)))
        chosen = part.order[start:stop].to(torch.int64)
        begin_b = resident.indptr[part.first + chosen]
        length_b = resident.indptr[part.first + chosen + 1] - begin_b
        place_n = torch.arange(longest, device=resident.device)
        real_bn = place_n < length_b[:, None]
        yield chosen, torch.where(real_bn, begin_b[:, None] + place_n, 0), real_bn
        start = stop


def _iterate(
    rows_bnk: Tensor, count_bn: Tensor, floor_bn: Tensor, gamma_bk: Tensor, alpha_k: Tensor, how: Inference
) -> tuple[Tensor, Tensor]:
    """γ of one group, and the iterations of each document."""
    result_bk = gamma_bk.clone()
    rounds_b = torch.zeros(len(gamma_bk), dtype=torch.int32, device=gamma_bk.device)
    moving = torch.arange(len(gamma_bk), device=gamma_bk.device)
    active_b = torch.ones(len(gamma_bk), dtype=torch.bool, device=gamma_bk.device)
    for number in range(how.max_iter):
        e_bk = _powers(gamma_bk, how.collapsed)
        share_bn = count_bn / (torch.bmm(rows_bnk, e_bk[:, :, None])[:, :, 0] + floor_bn)
        new_bk = alpha_k + e_bk * torch.bmm(share_bn[:, None, :], rows_bnk)[:, 0, :]
        change_b = (new_bk - gamma_bk).abs().mean(dim=1)
        gamma_bk = torch.where(active_b[:, None], new_bk, gamma_bk)
        rounds_b[moving] += active_b.to(torch.int32)
        active_b = active_b & (change_b >= how.tol)
        if (number + 1) % LOOK == 0:
            result_bk[moving] = gamma_bk
            kept = active_b.nonzero()[:, 0]
            if not len(kept):
                return result_bk, rounds_b
            moving, rows_bnk, count_bn, floor_bn = (
                moving[kept],
                rows_bnk[kept],
                count_bn[kept],
                floor_bn[kept],
            )
            gamma_bk, active_b = gamma_bk[kept], active_b[kept]
    result_bk[moving] = gamma_bk
    return result_bk, rounds_b


def add(
    excess_vw: Tensor, resident: Resident, part: Part, given: Tables, done: Inferred, factor: float
) -> None:
    """excess += factor × B × Σ over documents of share × e."""
    lo, hi = resident.entry_slice(part)
    if lo == hi:
        return
    firsts = resident.indptr[part.first : part.first + part.documents + 1]
    doc_e = torch.repeat_interleave(torch.arange(part.documents, device=resident.device), firsts.diff())
    sums_vw = torch.zeros_like(excess_vw)
    step = max(1, GROUP_NUMBERS // excess_vw.shape[1])
    for start in range(lo, hi, step):
        stop = min(hi, start + step)
        words_e = resident.indices[start:stop].to(torch.int64)
        parts_ew = done.shares_e[start:stop, None] * done.powers_bw[doc_e[start - lo : stop - lo]]
        sums_vw.index_add_(0, words_e, parts_ew)
    excess_vw += sums_vw.mul_(given.rows_vw).mul_(factor)


def improved(alpha_k: Tensor, gammas_bk: Tensor, weight: float) -> Tensor:
    """`priors.improved` where γ lies."""
    old_k = alpha_k.to(torch.float64)
    counts_bk = torch.maximum(gammas_bk.to(torch.float64), old_k)
    above_k = (torch.digamma(counts_bk) - torch.digamma(old_k)).sum(dim=0)
    below = (torch.digamma(counts_bk.sum(dim=1)) - torch.digamma(old_k.sum())).sum()
    new_k = (old_k * (above_k / below).clamp(min=1e-3) ** weight).clamp(min=LEAST)
    return torch.where(below > 0, new_k, old_k).to(torch.float32)


def document_terms(alpha_k: Tensor, gammas_bk: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The bound's terms of θ but for log Γ(α), in float64; and exp(E[log θ]), padded."""
    gamma_bk = gammas_bk.to(torch.float64)
    sums_b = gamma_bk.sum(dim=1)
    logs_bk = torch.digamma(gamma_bk) - torch.digamma(sums_b)[:, None]
    value = ((alpha_k.to(torch.float64) - gamma_bk) * logs_bk).sum() + torch.lgamma(gamma_bk).sum()
    powers_bw = torch.zeros(len(gamma_bk), width, device=gamma_bk.device)
    powers_bw[:, : len(alpha_k)] = torch.exp(logs_bk)
    return value - torch.lgamma(sums_b).sum(), powers_bw


def topic_terms(excess_vw: Tensor, sums_k: Tensor, prior: float, scale: float) -> Tensor:
    """`kernels.topic_terms`: Σ of log Γ(λ) − (λ − prior)(ψ(λ) − ψ(Σλ)), in float64."""
    log_sums_k = torch.digamma(sums_k)
    value = torch.zeros((), dtype=torch.float64, device=excess_vw.device)
    for part_vw in excess_vw.split(max(1, GROUP_NUMBERS // (4 * excess_vw.shape[1]))):
        part_vk = scale * part_vw[:, : len(sums_k)].to(torch.float64)
        lambda_vk = part_vk + prior
        value += (torch.lgamma(lambda_vk) - part_vk * (torch.digamma(lambda_vk) - log_sums_k)).sum()
    return value


def word_sum(resident: Resident, part: Part, given: Tables, powers_bw: Tensor) -> Tensor:
    """Σ count × log(scale_w Σ_k powers_k rows_wk) over the documents of a part, in float64."""
    lo, hi = resident.entry_slice(part)
    firsts = resident.indptr[part.first : part.first + part.documents + 1]
    doc_e = torch.repeat_interleave(torch.arange(part.documents, device=resident.device), firsts.diff())
    total = torch.zeros((), dtype=torch.float64, device=resident.device)
    step = max(1, GROUP_NUMBERS // given.rows_vw.shape[1])
    for start in range(lo, hi, step):
        stop = min(hi, start + step)
        words_e = resident.indices[start:stop].to(torch.int64)
        inner_e = (given.rows_vw[words_e] * powers_bw[doc_e[start - lo : stop - lo]]).sum(dim=1)
        logs_e = torch.log(inner_e + NOTHING) + given.scales_v[words_e]
        total += (resident.counts[start:stop] * logs_e).sum(dtype=torch.float64)
    return total
