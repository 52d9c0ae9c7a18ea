"""Learning the prior of the topics of a document.

The prior that makes the documents' topic counts most likely satisfies, for every topic,
Σ_d [ψ(n_dk + α_k) − ψ(α_k)] α-weighted against Σ_d [ψ(n_d + Σα) − ψ(Σα)]; Minka's fixed point multiplies α_k
by the ratio of the two sums. For variational inference the same equation is the bound's stationary point,
with n_dk = γ_dk − α_k. Counts here are expectations under the current topics, so a prior learned early is a
prior for bad topics: every update is damped by the step's own weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import psi

LEAST = 1e-4
"""No topic's prior falls below this: at zero it could never return."""
BATCH_WEIGHT = 0.25
"""The weight of each run of documents in batch learning, whose steps have none of their own (a guess)."""


def improved(alpha: NDArray[np.float32], gammas: NDArray[np.float32], weight: float) -> NDArray[np.float32]:
    """α moved by ``weight`` towards its fixed point for documents with these γ, in logarithms."""
    old = alpha.astype(np.float64)
    gammas = np.maximum(gammas.astype(np.float64), old)
    sums = gammas.sum(axis=1)
    above = np.sum(psi(gammas) - psi(old), axis=0)
    below = np.sum(psi(sums) - psi(old.sum()))
    if below <= 0:
        # Every document is empty: they say nothing about the prior.
        return alpha
    ratio = np.maximum(above / below, 1e-3)
    new: NDArray[np.float32] = np.maximum(old * ratio**weight, LEAST).astype(np.float32)
    return new
