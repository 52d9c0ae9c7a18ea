"""Whether a loss joins the examples of a batch by a sum, as far as its gradient tells."""

from __future__ import annotations

import math
import warnings

from torch import Tensor


def sum_hint(delta: Tensor, batch: int) -> bool:
    """True when the gradient at a softmax's input looks like that of a *summed* cross-entropy.

    Its rows sum to zero and hold p − 1 at the label: at most 1/batch in size under a mean, up to 1 under a sum.
    """
    if delta.dim() != 2 or batch < 4 or len(delta) != batch:
        return False
    rows = delta.double()
    size = float(rows.abs().max())
    balanced = float(rows.sum(1).abs().max()) <= 1e-4 * max(size, 1e-30)
    return balanced and size <= 1.0 + 1e-6 and size > 1.5 / math.sqrt(batch)


def warn_of_sum(delta: Tensor, batch: int) -> None:
    """Look at the first output's gradient, on a CPU, where looking costs nothing."""
    if delta.device.type == "cpu" and sum_hint(delta, batch):
        warnings.warn(
            "order: the loss looks like a sum over the batch, not a mean; if it is, say reduction='sum', or a "
            "short last batch weighs too little in the signs",
            stacklevel=2,
        )
