"""Kernel functions: what each one is, and how a block of products becomes a block of kernel values in place.

A radial kernel is a function of t = ‖x−z‖²/bandwidth². A dot-product kernel is a function of the inner
product of rows that were scaled by the bandwidth and given a constant feature. ``apply`` works in place on a
block of t (or of inner products) and may use ``scratch``, a second block of the same shape, when
``needs_scratch`` says so. Factors inside a kernel are moved into the rows (``row_scale``), so that ``apply``
passes over the block as seldom as it can.

All built-in kernels but ``polynomial`` have k(x, x) = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ModelError, OptionError, unknown
from headrace.kernel.memory import is_out_of_memory

Family = Literal["radial", "dot", "callable"]


@dataclass(frozen=True, kw_only=True)
class KernelFunction:
    """One kernel."""

    name: str
    family: Family
    apply: Callable[[Tensor, Tensor | None], Any] | None = None
    function: Callable[[Any, Any], Any] | None = None
    """The user's own function of two blocks of rows; only for the family ``callable``."""
    row_scale: float = 1.0
    normalised: bool = False
    """A dot-product kernel of unit vectors."""
    needs_scratch: bool = False
    code: int = -1
    """Its number inside the Triton kernels; −1 when they do not know it."""


def _gaussian(t: Tensor, scratch: Tensor | None) -> None:
    t.clamp_(min=0).neg_().exp_()


def _laplacian(t: Tensor, scratch: Tensor | None) -> None:
    t.clamp_(min=0).sqrt_().neg_().exp_()


def _cauchy(t: Tensor, scratch: Tensor | None) -> None:
    t.clamp_(min=0).add_(1).reciprocal_()


def _matern32(t: Tensor, scratch: Tensor | None) -> None:
    assert scratch is not None
    t.clamp_(min=0).sqrt_()
    torch.neg(t, out=scratch).exp_()
    t.add_(1).mul_(scratch)


def _matern52(t: Tensor, scratch: Tensor | None) -> None:
    # (1 + r + r²/3) e^{-r} with r = √t; the scratch holds r until it can hold e^{-r}.
    assert scratch is not None
    t.clamp_(min=0)
    torch.sqrt(t, out=scratch)
    t.mul_(1 / 3).add_(scratch).add_(1)
    scratch.neg_().exp_()
    t.mul_(scratch)


def _ntk(u: Tensor, scratch: Tensor | None) -> None:
    # (u·κ₀ + κ₁)/2 = (2u(π − arccos u) + √(1−u²)) / 2π, the neural tangent kernel of one hidden ReLU layer.
    # Rounding leaves the cosine of a row with itself just under 1, where arccos is steep: stretch, then
    # clamp.
    assert scratch is not None
    u.mul_(1 + 8 * torch.finfo(u.dtype).eps).clamp_(-1, 1)
    torch.acos(u, out=scratch)
    scratch.neg_().add_(math.pi).mul_(u).mul_(2)
    u.square_().neg_().add_(1).sqrt_().add_(scratch).mul_(1 / (2 * math.pi))


def _polynomial(p: Tensor, scratch: Tensor | None) -> None:
    p.pow_(3)


KERNELS: dict[str, KernelFunction] = {
    k.name: k
    for k in (
        KernelFunction(name="gaussian", family="radial", apply=_gaussian, row_scale=math.sqrt(0.5), code=0),
        KernelFunction(name="laplacian", family="radial", apply=_laplacian, code=1),
        KernelFunction(name="cauchy", family="radial", apply=_cauchy, code=2),
        KernelFunction(
            name="matern32",
            family="radial",
            apply=_matern32,
            row_scale=math.sqrt(3),
            needs_scratch=True,
            code=3,
        ),
        KernelFunction(
            name="matern52",
            family="radial",
            apply=_matern52,
            row_scale=math.sqrt(5),
            needs_scratch=True,
            code=4,
        ),
        KernelFunction(name="ntk", family="dot", apply=_ntk, normalised=True, needs_scratch=True),
        KernelFunction(name="polynomial", family="dot", apply=_polynomial),
    )
}

ALIASES = {"rbf": "gaussian", "laplace": "laplacian", "dot-product": "polynomial", "matern": "matern52"}


def find_kernel(kernel: object) -> KernelFunction:
    """The kernel of that name, or the user's own function wrapped."""
    if isinstance(kernel, str):
        name = ALIASES.get(kernel, kernel)
        if name not in KERNELS:
            raise unknown("kernel", kernel, [*KERNELS, *ALIASES])
        return KERNELS[name]
    if callable(kernel):
        return KernelFunction(
            name=getattr(kernel, "__name__", type(kernel).__name__), family="callable", function=kernel
        )
    raise OptionError(
        f"kernel must be a name or a function of two blocks of rows, not {kernel!r}; "
        f"known names are {', '.join(sorted(KERNELS))}"
    )


def call_user_kernel(kernel: KernelFunction, left_md: Tensor, right_nd: Tensor) -> Tensor:
    """The user's kernel on two blocks of rows, with its answer checked."""
    assert kernel.function is not None
    try:
        answer = kernel.function(left_md, right_nd)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # a smaller block may do
        raise ModelError(
            f"kernel {kernel.name} raised {type(error).__name__} on two tensors of the shapes "
            f"{tuple(left_md.shape)} and {tuple(right_nd.shape)} ({left_md.dtype}, on {left_md.device}): {error}; "
            "it is given rows and must return the matrix of their kernel values"
        ) from error
    if isinstance(answer, np.ndarray):
        answer = torch.from_numpy(answer)
    if not isinstance(answer, Tensor):
        raise ModelError(
            f"kernel {kernel.name} returned {type(answer).__name__}; it must return a tensor or an array"
        )
    wanted = (left_md.shape[0], right_nd.shape[0])
    if tuple(answer.shape) != wanted:
        raise ModelError(
            f"kernel {kernel.name} was given {wanted[0]} and {wanted[1]} rows and returned the shape "
            f"{tuple(answer.shape)}; it must return one value for each pair, {wanted}"
        )
    if not bool(torch.isfinite(answer).all()):
        raise ModelError(
            f"kernel {kernel.name} returned NaN or infinity; check it on the rows that were passed to fit"
        )
    return answer.to(dtype=left_md.dtype, device=left_md.device)
