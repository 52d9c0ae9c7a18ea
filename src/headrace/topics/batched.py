"""The E-step as batched torch operations, for an accelerator.

The same recurrence, starts and test for convergence as the compiled kernels, with many documents in one
product. Documents of similar length go together, padded to the longest, in groups whose copied rows stay
below `GROUP_NUMBERS`. A document that has converged keeps its γ; groups shrink to the documents still moving
every `LOOK` iterations, which is also the only time the host waits for the device.

One worker, no lock-free threads. Run on the CPU by the tests; on a CUDA device it has not been measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import DeviceError
from headrace.topics.corpus import Corpus
from headrace.topics.estep import Inference, Run, runs_of
from headrace.topics.local import Rate, Tally, check_finite, plan_rounds
from headrace.topics.state import SMALLEST_SCALE, Topics

GROUP_NUMBERS = 32_000_000
"""128 MB of float32: large enough to fill an accelerator, small enough for any."""
LOOK = 8
FLOOR = 1e-30


def torch_device(name: str) -> torch.device:
    """``"torch"`` is torch on the CPU; anything else is a torch device, which must be there."""
    if name == "torch":
        return torch.device("cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(f"device={name!r} was asked for and torch sees no CUDA device; use device='cpu'")
    return torch.device(name)


class DeviceTopics:
    """A copy of the topics on a device."""

    def __init__(self, topics: Topics, how: Inference, device: torch.device) -> None:
        self.host, self.how, self.device = topics, how, device
        self.excess_vk = torch.from_numpy(topics.excess[:, : topics.topics].copy()).to(device)
        self.column_k = torch.from_numpy(topics.column[: topics.topics].copy()).to(device)
        self.alpha_k = torch.from_numpy(how.alpha.copy()).to(device)

    def rows(self, words_u: Tensor, scale: float) -> Tensor:
        """B of the given words, every row divided by its largest element."""
        sums_k = (self.host.prior * self.host.features + scale * self.column_k).to(torch.float32)
        lambda_uk = self.host.prior + scale * self.excess_vk[words_u]
        if self.how.collapsed:
            rows_uk = lambda_uk / sums_k
            return rows_uk / rows_uk.amax(dim=1, keepdim=True)
        logs_uk = torch.digamma(lambda_uk) - torch.digamma(sums_k)
        return torch.exp(logs_uk - logs_uk.amax(dim=1, keepdim=True))

    def powers(self, gamma_bk: Tensor) -> Tensor:
        return gamma_bk if self.how.collapsed else torch.exp(torch.digamma(gamma_bk))

    def infer(self, index_bn: Tensor, count_bn: Tensor, rows_uk: Tensor) -> tuple[Tensor, int]:
        """γ of one group of documents, and the iterations they took together."""
        documents, topics = len(index_bn), self.host.topics
        result_bk = torch.ones(documents, topics, device=self.device)
        moving = torch.arange(documents, device=self.device)
        rows_bnk, count, gamma_bk, spent = rows_uk[index_bn], count_bn, result_bk.clone(), 0
        active = torch.ones(documents, dtype=torch.bool, device=self.device)
        for number in range(self.how.max_iter):
            spent += len(moving)
            e_bk = self.powers(gamma_bk)
            share_bn = count / (torch.bmm(rows_bnk, e_bk[:, :, None])[:, :, 0] + FLOOR)
            new_bk = self.alpha_k + e_bk * torch.bmm(share_bn[:, None, :], rows_bnk)[:, 0, :]
            change_b = (new_bk - gamma_bk).abs().mean(dim=1)
            gamma_bk = torch.where(active[:, None], new_bk, gamma_bk)
            active &= change_b >= self.how.tol
            if (number + 1) % LOOK == 0:
                result_bk[moving] = gamma_bk
                kept = active.nonzero()[:, 0]
                if not len(kept):
                    return result_bk, spent
                moving, rows_bnk, count, gamma_bk = moving[kept], rows_bnk[kept], count[kept], gamma_bk[kept]
                active = active[kept]
        result_bk[moving] = gamma_bk
        return result_bk, spent

    def statistics(self, index_bn: Tensor, count_bn: Tensor, gamma_bk: Tensor, rows_uk: Tensor) -> Tensor:
        """Σ over documents of count × responsibility, one row per row of ``rows_uk``."""
        rows_bnk, e_bk = rows_uk[index_bn], self.powers(gamma_bk)
        share_bn = count_bn / (torch.bmm(rows_bnk, e_bk[:, :, None])[:, :, 0] + FLOOR)
        parts = (share_bn[:, :, None] * rows_bnk * e_bk[:, None, :]).reshape(-1, self.host.topics)
        return torch.zeros_like(rows_uk).index_add_(0, index_bn.reshape(-1), parts)

    def groups(
        self, corpus: Corpus, run: Run
    ) -> tuple[Tensor, Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]]:
        """The distinct words of a run, and its documents in padded groups: (numbers, words, counts)."""
        first, last = run
        part = corpus.part(first, last)
        words, local = np.unique(part.indices, return_inverse=True)
        lengths = np.diff(part.indptr)
        order = np.argsort(lengths, kind="stable")

        def made() -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
            start = 0
            while start < len(order):
                stop = start + 1
                while stop < len(order) and _fits(stop + 1 - start, lengths[order[stop]], self.host.topics):
                    stop += 1
                group = order[start:stop]
                index = np.zeros((len(group), max(1, lengths[group[-1]])), dtype=np.int64)
                count = np.zeros(index.shape, dtype=np.float32)
                for row, document in enumerate(group):
                    lo, hi = part.indptr[document], part.indptr[document + 1]
                    index[row, : hi - lo], count[row, : hi - lo] = local[lo:hi], part.counts[lo:hi]
                yield group, torch.from_numpy(index).to(self.device), torch.from_numpy(count).to(self.device)
                start = stop

        return torch.from_numpy(words.astype(np.int64)).to(self.device), made()


def _fits(documents: int, longest: int, topics: int) -> bool:
    return documents * int(longest) * topics <= GROUP_NUMBERS


def run_steps_on(
    device: str,
    topics: Topics,
    corpus: Corpus,
    runs: Sequence[Run],
    how: Inference,
    rate: Rate,
    first: int,
    total: float,
) -> Tally:
    """`local.run_steps` on a device; the topics are copied there and back once per call."""
    tally = Tally()
    for steps in plan_rounds(runs, rate, first, topics.scale):
        there = DeviceTopics(topics, how, torch_device(device))
        for step in steps:
            words_u, groups = there.groups(corpus, step.run)
            rows_uk = there.rows(words_u, step.before) if len(words_u) else there.excess_vk[:0]
            stats_uk = torch.zeros_like(rows_uk)
            for _, index_bn, count_bn in groups if len(words_u) else ():
                gamma_bk, spent = there.infer(index_bn, count_bn, rows_uk)
                stats_uk += there.statistics(index_bn, count_bn, gamma_bk, rows_uk)
                tally.iterations += spent
            documents = step.run[1] - step.run[0]
            stats_uk *= step.weight / step.after * total / documents
            there.excess_vk.index_add_(0, words_u, stats_uk)
            there.column_k += stats_uk.sum(dim=0, dtype=torch.float64)
            tally.documents += documents
            tally.steps += 1
        topics.excess[:, : topics.topics] = there.excess_vk.cpu().numpy()
        topics.scale = steps[-1].after
        topics.recount()
        check_finite(topics)
        if topics.scale < SMALLEST_SCALE:
            topics.rebase()
    return tally


def infer_all_on(device: str, topics: Topics, corpus: Corpus, how: Inference) -> NDArray[np.float32]:
    """`estep.infer_all` on a device, without scikit-learn's constant for words that no topic has seen."""
    there = DeviceTopics(topics, how, torch_device(device))
    gammas = np.tile(how.alpha, (len(corpus), 1))
    for first, last in runs_of(len(corpus), 4096):
        words_u, groups = there.groups(corpus, (first, last))
        if not len(words_u):
            continue
        rows_uk = there.rows(words_u, topics.scale)
        for group, index_bn, count_bn in groups:
            gammas[first + group] = there.infer(index_bn, count_bn, rows_uk)[0].cpu().numpy()
    return gammas
