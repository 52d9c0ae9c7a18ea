"""Topics that are learned on a device: they stay there, and so do documents that are read again.

A step is four launches (B of all words, the documents of the mini-batch, the words of the mini-batch, the sums of
the topics) and the host waits for none of them; it looks at the result once per call of `steps`. On CUDA the
launches are Triton's (`launches.py`), elsewhere and without Triton torch's (`batched.py`); which of the two is said
on stderr when it is not the first.

The host's `Topics` are the caller's again after `home`. One mini-batch follows another: no lock-free threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaln

from headrace.errors import DeviceError
from headrace.topics import batched
from headrace.topics.corpus import Corpus
from headrace.topics.estep import EPS, Inference, Run, runs_of
from headrace.topics.local import Rate, Tally, check_finite, plan_rounds
from headrace.topics.priors import BATCH_WEIGHT
from headrace.topics.resident import Part, Resident
from headrace.topics.state import SMALLEST_SCALE, Topics

DOCUMENTS_AT_ONCE = 65_536
"""Documents inferred by one launch where no mini-batch decides: their γ are D × K × 4 bytes."""


def torch_device(name: str) -> torch.device:
    """``"torch"`` is torch on the CPU; anything else is a torch device, which must be there."""
    if name == "torch":
        return torch.device("cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(f"device={name!r} was asked for and torch sees no CUDA device; use device='cpu'")
    return torch.device(name)


def operations(device: torch.device) -> Any:
    """The module whose functions do the work on this device."""
    if device.type != "cuda":
        return batched
    try:
        from headrace.topics import launches
    except ImportError:
        print(  # noqa: T201 - what was chosen for the user is said
            "headrace: Triton is not installed; topics are inferred by torch operations, which is slower",
            file=sys.stderr,
        )
        return batched
    return launches


class DeviceTopics:
    """One set of topics on a device, and the corpus that was used last."""

    def __init__(self, topics: Topics, device: torch.device, made_by: Any = None) -> None:
        self.topics, self.device = topics, device
        self.made_by = operations(device) if made_by is None else made_by
        self.scale = topics.scale
        self.excess_vw = torch.from_numpy(topics.excess).to(device, copy=True)
        self.column_w = self._column()
        self._jumps = batched.jumps(topics.topics, device)
        self._beginning: batched.Beginning | None = None
        self.alpha: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        """The documents' prior that was used last, or learned since."""
        self._held: Resident | None = None
        self.away = False
        """Whether the host's topics are older than these."""

    def _column(self) -> torch.Tensor:
        return self.excess_vw.sum(dim=0, dtype=torch.float64)

    def resident(self, corpus: Corpus) -> Resident:
        """The corpus on the device; copied only when another one was used last."""
        if self._held is None or self._held.corpus is not corpus:
            self._held = None  # its memory is free before the next one is copied
            self._held = Resident(corpus, self.device)
        return self._held

    def _begin(self, alpha: NDArray[np.float32]) -> batched.Beginning:
        """Where documents with this prior begin; copied only when another one was used last."""
        if self._beginning is None or self.alpha is not alpha:
            self._beginning = batched.Beginning(self._jumps, torch.from_numpy(alpha.copy()).to(self.device))
            self.alpha = alpha
        return self._beginning

    def _learned(self, beginning: batched.Beginning) -> None:
        """Keep the prior that was learned on the device."""
        self._beginning, self.alpha = beginning, beginning.alpha_k.cpu().numpy()

    def steps(
        self,
        corpus: Corpus,
        runs: Sequence[Run],
        how: Inference,
        rate: Rate,
        first: int,
        total: float,
        learn_priors: bool = False,
    ) -> Tally:
        """`local.run_steps` on the device; with ``learn_priors`` the new prior is in `alpha`."""
        tally, rounds_b = Tally(), []
        resident, beginning = self.resident(corpus), self._begin(how.alpha)
        parts = dict(zip(runs, resident.divide(runs), strict=True))
        self.away = True
        for steps in plan_rounds(runs, rate, first, self.scale):
            for step in steps:
                part = parts[step.run]
                given = self._tables(step.before, how.collapsed, 0.0)
                noise = how.noise_at(step.number)
                done = self.made_by.infer(resident, part, given, how, noise, beginning)
                factor = step.weight / step.after * total / part.documents
                self.made_by.add(self.excess_vw, resident, part, given, done, factor)
                self.column_w = self._column()
                if learn_priors:
                    alpha_k = batched.improved(beginning.alpha_k, done.gammas_bk, step.weight)
                    beginning = replace(beginning, alpha_k=alpha_k)
                rounds_b.append(done.rounds_b.sum())
                tally.documents += part.documents
                tally.steps += 1
            self.scale = steps[-1].after
            if self.scale < SMALLEST_SCALE:
                self.excess_vw *= self.scale
                self.scale, self.column_w = 1.0, self._column()
        tally.iterations = int(torch.stack(rounds_b).sum())
        self._check()
        if learn_priors:
            self._learned(beginning)
        return tally

    def batch(
        self,
        chunks: Iterator[tuple[Corpus, Sequence[Run]]],
        how: Inference,
        step: int,
        learn_priors: bool = False,
    ) -> Tally:
        """`local.batch_pass` on the device: λ ← prior + the statistics of all documents."""
        fresh_vw, tally, rounds_b = torch.zeros_like(self.excess_vw), Tally(), []
        given, before = self._tables(self.scale, how.collapsed, 0.0), self._begin(how.alpha)
        after = before
        for corpus, runs in chunks:
            resident = self.resident(corpus)
            for part in resident.divide(runs):
                noise = how.noise_at(step + part.first)
                done = self.made_by.infer(resident, part, given, how, noise, before)
                self.made_by.add(fresh_vw, resident, part, given, done, 1.0)
                if learn_priors:
                    alpha_k = batched.improved(after.alpha_k, done.gammas_bk, BATCH_WEIGHT)
                    after = replace(after, alpha_k=alpha_k)
                rounds_b.append(done.rounds_b.sum())
                tally.documents += part.documents
        if rounds_b:
            tally.iterations = int(torch.stack(rounds_b).sum())
        self.excess_vw, self.scale, self.away = fresh_vw, 1.0, True
        self.column_w = self._column()
        self._check()
        if learn_priors:
            self._learned(after)
        return tally

    def _tables(self, scale: float, collapsed: bool, eps: float) -> batched.Tables:
        topics = self.topics
        made: batched.Tables = self.made_by.tables(
            self.excess_vw, self.column_w, topics.topics, topics.prior, scale, collapsed, eps
        )
        return made

    def _check(self) -> None:
        self.topics.column = self.column_w.cpu().numpy()
        check_finite(self.topics)

    def home(self) -> Topics:
        """Bring the topics back to the host."""
        if self.away:
            self.topics.excess[:] = self.excess_vw.cpu().numpy()
            self.topics.scale = self.scale
            self.topics.recount()
            self.away = False
        return self.topics

    def infer(self, corpus: Corpus, how: Inference, eps: float = EPS) -> NDArray[np.float32]:
        """γ of every document, each started at one."""
        gammas = np.empty((len(corpus), self.topics.topics), dtype=np.float32)
        given, beginning = self._tables(self.scale, how.collapsed, eps), self._begin(how.alpha)
        for resident, part in self._parts(corpus):
            done = self.made_by.infer(resident, part, given, how, 0, beginning)
            gammas[part.first : part.first + part.documents] = done.gammas_bk.cpu().numpy()
        return gammas

    def word_sum(self, corpus: Corpus, powers: NDArray[Any], *, collapsed: bool) -> float:
        """`bound.word_sum` on the device."""
        given, value = self._tables(self.scale, collapsed, 0.0), 0.0
        for resident, part in self._parts(corpus):
            powers_bw = torch.zeros(part.documents, self.topics.width, device=self.device)
            mine = np.ascontiguousarray(powers[part.first : part.first + part.documents], dtype=np.float32)
            powers_bw[:, : self.topics.topics] = torch.from_numpy(mine).to(self.device)
            value += float(self.made_by.word_sum(resident, part, given, powers_bw))
        return value

    def document_bound(self, corpus: Corpus, how: Inference, eps: float = EPS) -> float:
        """`infer` and `bound.document_bound` without a word to the host in between."""
        given = self._tables(self.scale, how.collapsed, eps)
        plain = self._tables(self.scale, False, 0.0) if how.collapsed else given
        beginning = self._begin(how.alpha)
        value = torch.zeros((), dtype=torch.float64, device=self.device)
        for resident, part in self._parts(corpus):
            done = self.made_by.infer(resident, part, given, how, 0, beginning)
            terms, powers_bw = batched.document_terms(
                beginning.alpha_k, done.gammas_bk, self.excess_vw.shape[1]
            )
            value += terms + self.made_by.word_sum(resident, part, plain, powers_bw)
        alpha = how.alpha.astype(np.float64)
        return float(value) + len(corpus) * float(gammaln(alpha.sum()) - np.sum(gammaln(alpha)))

    def topic_bound(self) -> float:
        """`bound.topic_bound` on the device."""
        topics, prior = self.topics, self.topics.prior
        mass = prior * topics.features
        sums_k = (mass + self.scale * self.column_w[: topics.topics]).clamp(min=1e-3 * mass)
        value = batched.topic_terms(self.excess_vw, sums_k, prior, self.scale) - torch.lgamma(sums_k).sum()
        constants = topics.topics * float(gammaln(mass)) - topics.features * topics.topics * float(
            gammaln(prior)
        )
        return float(value) + constants

    def _parts(self, corpus: Corpus) -> Iterator[tuple[Resident, Part]]:
        resident = self.resident(corpus)
        for part in resident.parts(runs_of(len(corpus), DOCUMENTS_AT_ONCE)):
            yield resident, part
