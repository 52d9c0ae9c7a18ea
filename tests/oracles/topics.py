"""Latent Dirichlet allocation by variational inference, in the plainest float64 loops.

Hoffman, Blei and Bach 2010: γ_k = α_k + e^ψ(γ_k) Σ_w n_w B_wk / Σ_j e^ψ(γ_j) B_wj with B = exp(E[log β]),
λ ← (1 − ρ) λ + ρ (η + D/|S| · statistics). `collapsed` puts x in the place of exp(ψ(x)), for γ and for λ.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, psi


def link(x, collapsed):
    return x if collapsed else np.exp(psi(x))


def topic_rows(components, collapsed=False):
    """B, K × V."""
    return link(components, collapsed) / link(components.sum(axis=1, keepdims=True), collapsed)


def infer(words, counts, rows, alpha, *, tol=1e-3, max_iter=100, start=1.0, eps=0.0, collapsed=False):
    """γ of one document and its statistics, K × words."""
    k_topics = len(alpha)
    gamma = np.full(k_topics, start, dtype=np.float64)
    b = rows[:, words]
    for _ in range(max_iter):
        last = gamma
        e = link(gamma, collapsed) / link(gamma.sum(), collapsed)
        share = counts / (e @ b + eps)
        gamma = np.array(
            [alpha[k] + e[k] * sum(share[w] * b[k, w] for w in range(len(words))) for k in range(k_topics)]
        )
        if np.abs(gamma - last).mean() < tol:
            break
    e = link(gamma, collapsed) / link(gamma.sum(), collapsed)
    share = counts / (e @ b + eps)
    return gamma, e[:, None] * share[None, :] * b


def e_step(documents, components, alpha, **options):
    """γ of all documents (D × K) and their statistics (K × V); documents are (words, counts) pairs."""
    rows = topic_rows(components, options.get("collapsed", False))
    statistics = np.zeros_like(components, dtype=np.float64)
    gammas = []
    for words, counts in documents:
        gamma, part = infer(words, counts, rows, alpha, **options)
        gammas.append(gamma)
        for column, word in enumerate(words):
            statistics[:, word] += part[:, column]
    return np.array(gammas), statistics


def online_step(components, statistics, eta, rho, ratio):
    """One step of λ."""
    return (1 - rho) * components + rho * (eta + ratio * statistics)


def bound(documents, components, gammas, alpha, eta):
    """The evidence lower bound, from its definition."""

    def dirichlet(prior, distribution, expectation):
        return (
            np.sum((prior - distribution) * expectation)
            + np.sum(gammaln(distribution))
            - np.sum(gammaln(prior))
            + gammaln(np.sum(prior))
            - gammaln(distribution.sum())
        )

    alpha = np.asarray(alpha, dtype=np.float64)
    e_theta = psi(gammas) - psi(gammas.sum(axis=1, keepdims=True))
    e_beta = psi(components) - psi(components.sum(axis=1, keepdims=True))
    value = 0.0
    for (words, counts), log_theta in zip(documents, e_theta, strict=True):
        for word, count in zip(words, counts, strict=True):
            value += count * np.log(np.sum(np.exp(log_theta + e_beta[:, word])))
    for gamma, log_theta in zip(gammas, e_theta, strict=True):
        value += dirichlet(alpha, gamma, log_theta)
    for topic, log_beta in zip(components, e_beta, strict=True):
        value += dirichlet(np.full(topic.shape, eta), topic, log_beta)
    return value
