"""The policy's distribution in torch: the same mathematics as `heads`, differentiated by autograd."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headrace.agents.spaces import Actions


class TorchCategorical:
    """One or more categorical parts, padded to one size."""

    n_extra = 0
    raw_dtype = torch.int64

    def __init__(self, actions: Actions, device: torch.device) -> None:
        self.n_out, self.parts, self.most = actions.width, len(actions.sizes), max(actions.sizes)
        valid = np.arange(self.most) < np.array(actions.sizes)[:, None]
        # Padded positions read column n_out, which `log_probs` appends and which is never chosen.
        places = np.full(valid.shape, actions.width)
        places[valid] = np.arange(actions.width)
        self._even = bool(valid.all())
        self._places = torch.from_numpy(places).to(device)

    def pad(self, out: Tensor) -> Tensor:
        """Logits (m, n_out) as (m, k, a)."""
        if self._even:
            return out.view(len(out), self.parts, self.most)
        return torch.nn.functional.pad(out, (0, 1), value=-1e9)[:, self._places]

    def log_probs(self, out: Tensor) -> Tensor:
        """(m, k, a)."""
        return torch.log_softmax(self.pad(out), 2)

    def sample(self, out: Tensor, log_std: Tensor | None, generator: torch.Generator) -> Tensor:
        # The largest logit less the logarithm of exponential noise: what all logits have in common does not count.
        logits = self.pad(out)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return logits.sub(noise.log_()).argmax(2)

    def best(self, out: Tensor) -> Tensor:
        return self.pad(out).argmax(2)

    def measure(self, out: Tensor, log_std: Tensor | None, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log probability of each row's action, and the entropy, both (m,)."""
        log_p = self.log_probs(out)
        chosen = log_p.gather(2, raw.unsqueeze(2)).sum((1, 2))
        return chosen, -(log_p.exp() * log_p).sum((1, 2))


class TorchGaussian:
    """Independent Gaussians; see `heads.GaussianHead` for what squashing does and does not change."""

    raw_dtype = torch.float32

    def __init__(self, actions: Actions, device: torch.device) -> None:
        self.n_out = self.n_extra = self.parts = actions.width

    def sample(self, out: Tensor, log_std: Tensor | None, generator: torch.Generator) -> Tensor:
        assert log_std is not None
        noise = torch.empty_like(out).normal_(generator=generator)
        return out + noise * log_std.exp()

    def best(self, out: Tensor) -> Tensor:
        return out

    def measure(self, out: Tensor, log_std: Tensor | None, raw: Tensor) -> tuple[Tensor, Tensor]:
        assert log_std is not None
        z = (raw - out) * torch.exp(-log_std)
        half_log_2pi = 0.5 * math.log(2 * math.pi)
        log_p = (-0.5 * z * z - log_std - half_log_2pi).sum(1)
        entropy = (log_std + 0.5 + half_log_2pi).sum()
        return log_p, entropy.expand(len(out))


TorchHead = TorchCategorical | TorchGaussian


def make_torch_head(actions: Actions, device: torch.device) -> TorchHead:
    """The head for an action space."""
    return TorchGaussian(actions, device) if actions.continuous else TorchCategorical(actions, device)
