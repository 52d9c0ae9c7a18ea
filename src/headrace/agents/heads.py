"""The policy's distribution and the derivatives of the policy loss, by hand in NumPy.

The loss of one row is ``-weight · log π(a) - entropy_weight · H(π)``: the caller folds the advantage, the mean and the
mask into the two weights. Shapes: m rows, k parts of an action, a categories or dimensions.
Sampling is one addition and one argmax: Gumbel noise for a whole rollout is drawn ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.agents.spaces import Actions

Array = NDArray[Any]
_NEVER = np.float32(-1e9)  # a logit that is never chosen; infinity would give NaN in p·log p
_LOG_2PI = float(np.log(2 * np.pi))


class CategoricalHead:
    """One or more categorical parts; parts of unequal size are padded with logits that are never chosen."""

    raw_dtype = np.int64
    n_extra = 0

    def __init__(self, actions: Actions) -> None:
        self.n_out = actions.width
        self.parts, self.most = len(actions.sizes), max(actions.sizes)
        self._valid = np.arange(self.most) < np.array(actions.sizes)[:, None]
        self._even = bool(self._valid.all())
        self.noise_shape: tuple[int, ...] = (self.parts, self.most)

    def noise(self, rng: np.random.Generator, rows: int) -> Array:
        """What `sample` needs for ``rows`` rows."""
        uniform = rng.random((rows, self.parts, self.most), dtype=np.float32)
        # -log(-log(u)) with u kept away from 0, where the logarithm is infinite.
        noise: Array = -np.log(-np.log(np.maximum(uniform, np.float32(1e-30))))
        return noise

    def pad(self, out: Array) -> Array:
        """Logits (m, n_out) as (m, k, a)."""
        if self._even:
            return out.reshape(len(out), self.parts, self.most)
        padded = np.full((len(out), self.parts, self.most), _NEVER)
        padded[:, self._valid] = out
        return padded

    def sample(self, out: Array, extra: Array, noise: Array, raw: Array) -> None:
        """Write actions (m, k) into ``raw``."""
        (self.pad(out) + noise).argmax(2, out=raw)

    def best(self, out: Array, extra: Array) -> Array:
        """The most probable actions."""
        best: Array = self.pad(out).argmax(2)
        return best

    def log_probs(self, out: Array) -> Array:
        logits = self.pad(out)
        shifted: Array = logits - logits.max(2, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(2, keepdims=True))
        return shifted

    def log_prob(self, out: Array, extra: Array, raw: Array) -> Array:
        """Log probability of each row's action, (m,)."""
        chosen = np.take_along_axis(self.log_probs(out), raw[..., None], 2)
        log_p: Array = chosen.sum((1, 2))
        return log_p

    def entropy(self, out: Array, extra: Array) -> Array:
        log_p = self.log_probs(out)
        entropy: Array = -(np.exp(log_p) * log_p).sum((1, 2))
        return entropy

    def backward(
        self, out: Array, extra: Array, raw: Array, weight_m: Array, entropy_m: Array | None, g_extra: Array
    ) -> Array:
        """The loss's derivative with respect to ``out``."""
        log_p = self.log_probs(out)
        p = np.exp(log_p)
        d = p * weight_m[:, None, None]
        if self.parts == 1:
            d[np.arange(len(d)), 0, raw[:, 0]] -= weight_m
        else:
            at = np.take_along_axis(d, raw[..., None], 2) - weight_m[:, None, None]
            np.put_along_axis(d, raw[..., None], at, 2)
        if entropy_m is not None:
            negative_entropy = (p * log_p).sum(2, keepdims=True)
            d += entropy_m[:, None, None] * p * (log_p - negative_entropy)
        return d.reshape(len(d), -1) if self._even else d[:, self._valid]


class GaussianHead:
    """Independent Gaussians whose log standard deviations do not depend on the observation.

    Squashing through tanh happens on the way to the environment. It multiplies the density by a factor that does not
    depend on the parameters, so the derivatives here hold with and without it; the entropy is the Gaussian's own.
    """

    raw_dtype = np.float32

    def __init__(self, actions: Actions) -> None:
        self.n_out = self.n_extra = self.parts = actions.width
        self.noise_shape: tuple[int, ...] = (self.parts,)

    def noise(self, rng: np.random.Generator, rows: int) -> Array:
        return rng.standard_normal((rows, self.parts), dtype=np.float32)

    def sample(self, out: Array, extra: Array, noise: Array, raw: Array) -> None:
        np.multiply(noise, np.exp(extra), out=raw)
        raw += out

    def best(self, out: Array, extra: Array) -> Array:
        return out.copy()

    def log_prob(self, out: Array, extra: Array, raw: Array) -> Array:
        z = (raw - out) * np.exp(-extra)
        log_p: Array = -0.5 * (z * z).sum(1) - extra.sum() - 0.5 * self.parts * _LOG_2PI
        return log_p

    def entropy(self, out: Array, extra: Array) -> Array:
        return np.full(len(out), extra.sum() + 0.5 * self.parts * (1.0 + _LOG_2PI), np.float32)

    def backward(
        self, out: Array, extra: Array, raw: Array, weight_m: Array, entropy_m: Array | None, g_extra: Array
    ) -> Array:
        inverse = np.exp(-extra)
        z = (raw - out) * inverse
        g_extra[:] = -(weight_m[:, None] * (z * z - 1.0)).sum(0)
        if entropy_m is not None:
            g_extra -= entropy_m.sum()
        d: Array = -weight_m[:, None] * z * inverse
        return d


Head = CategoricalHead | GaussianHead


def make_head(actions: Actions) -> Head:
    """The head for an action space."""
    return GaussianHead(actions) if actions.continuous else CategoricalHead(actions)
