"""The drift H of an epoch, measured while it runs.

H = max_t ‖Σ_{τ≤t} (g_τ − ḡ)‖ is what a balanced order keeps small. The mean ḡ is known only at the end, so the epoch
is cut into at most ``SLOTS`` stretches whose sums are kept; the prefix sums at the stretches' ends follow. Memory:
SLOTS · k numbers, whatever n is. H is thus measured at up to 64 points of the epoch, a lower bound that is tight
for orders whose drift lasts longer than a stretch.

The ratio H / √(Σ‖g − ḡ‖²) does not depend on the size of the gradients: a random order gives about 0.5 to 0.9, a
balanced one less; it falls over the first epochs and then stays. That is what is watched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.types import State

SLOTS = 64  # a guess: at 64 points the maximum of a random walk is 5 to 10 % below the true one
STRIDE = 16  # rows that a CPU sums before it looks for their stretch; moves a stretch's end by fewer


class DriftMeter:
    """Sums of an epoch's stretches, on the device of the gradients."""

    def __init__(self, n: int, dim: int, device: torch.device | str = "cpu") -> None:
        self.n = n
        self.sums = torch.zeros(SLOTS, dim, device=device)
        self.counts = torch.zeros(SLOTS, 1, device=device)
        self.energy = torch.zeros((), device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def update(self, vectors_bk: Tensor) -> None:
        vectors = vectors_bk.to(self.sums.dtype)
        count = len(vectors)
        if vectors.device.type == "cpu" and count > STRIDE:
            # Sums of whole strides are one pass along memory, whichever way it is laid out.
            whole = count - count % STRIDE
            self._add(vectors[:whole].unflatten(0, (-1, STRIDE)).sum(1), STRIDE)
            vectors = vectors[whole:]
        if len(vectors):
            self._add(vectors, 1)
        # Sketches come with the examples last in memory: their transpose is the flat one.
        flat = (vectors_bk if vectors_bk.is_contiguous() else vectors_bk.T).to(self.sums.dtype).reshape(-1)
        self.energy.add_(flat @ flat)

    def _add(self, sums: Tensor, stride: int) -> None:
        """Sums of ``stride`` rows each; a sum that straddles two stretches goes to the one where it begins."""
        rows = torch.arange(0, len(sums) * stride, stride, device=sums.device) + self.position
        slots = (rows * SLOTS).div_(max(self.n, 1), rounding_mode="floor").clamp_(max=SLOTS - 1)
        self.sums.index_add_(0, slots, sums)
        self.counts.index_add_(0, slots, self.counts.new_full((len(sums), 1), stride))
        self.position.add_(len(sums) * stride)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(H, H / √energy) as tensors, without waiting for the device; begins anew."""
        total, count = self.sums.sum(0), self.counts.sum().clamp(min=1)
        prefix = self.sums.cumsum(0) - self.counts.cumsum(0) * (total / count)
        drift = prefix.norm(dim=1).max()
        energy = (self.energy - total @ total / count).clamp(min=1e-30)
        result = drift, drift / energy.sqrt()
        for tensor in (self.sums, self.counts, self.energy, self.position):
            tensor.zero_()
        return result

    def state_dict(self) -> State:
        return {
            "sums": self.sums.clone(),
            "counts": self.counts.clone(),
            "energy": self.energy.clone(),
            "position": self.position.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)


def fails_to_fall(ratios: list[float], epochs: int = 3, margin: float = 0.9) -> bool:
    """True when the last ``epochs`` ratios all stayed above ``margin`` of the first, which was that of a shuffle."""
    recent = ratios[1:][-epochs:]
    return len(recent) == epochs and all(not ratio < margin * ratios[0] for ratio in recent)
