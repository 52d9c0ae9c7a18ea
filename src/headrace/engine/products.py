"""The matrix products of a chain of layers: torch's own, or oneDNN's where those are faster on this machine.

torch computes float32 products on a CPU with MKL, which on AMD's processors stays with half-wide vectors. oneDNN,
which torch brings along for convolutions, uses their whole width: 512 × 512 weights and 64 rows took 300 µs
with MKL and 155 with oneDNN on one core of a Zen 5. It takes about 12 µs more to begin, and it cannot add into
a matrix, so small products and updates from few rows stay with torch.

Which one is faster is tried once a process, on one product, and not at all in deterministic runs: their
rounding must not follow a clock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

TRIAL_ROWS, TRIAL_WIDTH, TRIAL_TURNS = 64, 512, 7  # 2 × 7 × 0.3 ms; the best of each counts, noise only slows
WORTH = 1.2  # smaller gains are left alone: they could be noise
# Measured on one and on two cores for widths 2 to 784 and 2 to 1024 rows: below these numbers oneDNN's
# beginning costs more than its kernels save.
LEAST_WIDTH = 32
LEAST_OPERATIONS = 4e6
LEAST_OPERATIONS_UPDATE = 8e6
LEAST_ROWS_UPDATE = 32  # the update passes over the weights once more


class Products:
    """What a chain multiplies with. ``wide``: oneDNN takes the products that are large enough for it."""

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide

    def outputs(self, z_bd: Tensor, weight_oi: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``out`` = z · weightᵀ + bias."""
        if self._pays(z_bd, weight_oi):
            out.copy_(onednn(z_bd, weight_oi, bias))
        elif bias is None:
            torch.mm(z_bd, weight_oi.t(), out=out)
        else:
            torch.addmm(bias, z_bd, weight_oi.t(), out=out)

    def inputs(self, delta_bo: Tensor, weight_oi: Tensor, out: Tensor) -> None:
        """``out`` = delta · weight: the derivative carried to the layer's input."""
        if self._pays(delta_bo, weight_oi):
            out.copy_(onednn(delta_bo, weight_oi.t(), None))
        else:
            torch.mm(delta_bo, weight_oi, out=out)

    def update(
        self, weight_oi: Tensor, delta_ob: Tensor, taken_bi: Tensor, keep: float, alpha: float
    ) -> None:
        """weight = keep · weight + alpha · delta · taken, in place."""
        if not (
            len(taken_bi) >= LEAST_ROWS_UPDATE and self._pays(taken_bi, weight_oi, LEAST_OPERATIONS_UPDATE)
        ):
            weight_oi.addmm_(delta_ob, taken_bi, beta=keep, alpha=alpha)
            return
        if keep != 1.0:
            weight_oi.mul_(keep)
        weight_oi.add_(onednn(delta_ob, taken_bi.t(), None), alpha=alpha)

    def gradient(self, into_oi: Tensor, delta_ob: Tensor, taken_bi: Tensor, alpha: float) -> None:
        """``into`` = alpha · delta · taken, whatever stood there."""
        if self._pays(taken_bi, into_oi, LEAST_OPERATIONS_UPDATE):
            torch.mul(onednn(delta_ob, taken_bi.t(), None), alpha, out=into_oi)
        else:
            torch.addmm(into_oi, delta_ob, taken_bi, beta=0, alpha=alpha, out=into_oi)

    def _pays(self, rows: Tensor, weight: Tensor, least: float = LEAST_OPERATIONS) -> bool:
        return self.wide and min(weight.shape) >= LEAST_WIDTH and 2.0 * len(rows) * weight.numel() >= least


def onednn(x_bd: Tensor, weight_od: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias by oneDNN; any strides."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_bd, weight_od, bias, "none", [], "")
    return found


def products_for(like: Tensor) -> tuple[Products, str]:
    """The products for weights such as this one, and a sentence about them."""
    if like.device.type != "cpu" or like.dtype != torch.float32:
        return Products(), "torch's own products"
    if torch.are_deterministic_algorithms_enabled():
        return Products(), "torch's own products: a deterministic run tries no others"
    gain = onednn_gain()
    if gain < WORTH:
        return Products(), f"torch's own products; oneDNN's take {1 / max(gain, 1e-3):.2g} times as long here"
    return Products(wide=True), f"large products by oneDNN, {gain:.1f} times as fast as torch's own here"


@functools.cache
def onednn_gain() -> float:
    """How many times faster oneDNN is at one product of middling size on one thread; 0 where it cannot be had."""
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers are left alone
    x = torch.randn(TRIAL_ROWS, TRIAL_WIDTH, generator=generator)
    weight = torch.randn(TRIAL_WIDTH, TRIAL_WIDTH, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = x @ weight.t()
        if not torch.allclose(onednn(x, weight, None), expected, rtol=1e-3, atol=1e-2):
            return 0.0
        own, other = [], []
        for _ in range(TRIAL_TURNS):
            own.append(_seconds(lambda: torch.mm(x, weight.t(), out=expected)))
            other.append(_seconds(lambda: onednn(x, weight, None)))
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return 0.0
    finally:
        torch.set_num_threads(threads)
    return min(own) / min(other)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
