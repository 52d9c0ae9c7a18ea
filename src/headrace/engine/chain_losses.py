"""The losses a `Chain` can end in, each with its derivative written by hand.

A loss turns the outputs ``z_bc`` and the targets ``y`` into the mean loss and, in ``delta_bc``, into the
derivative *times* ``1 / scale``: the factor ``scale`` is left to the matrix product that uses the derivative,
which multiplies for nothing. All losses are means, as the functions of `torch.nn.functional` are by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.chain_ops import NotAChainError
from headrace.errors import ModelError


@dataclass(frozen=True)
class Loss:
    """``value(z, y)`` is the mean loss; ``derive(z, y, delta)`` also writes the unscaled derivative.

    ``derive`` checks the targets before it writes anything, so a bad target leaves the parameters untouched.
    ``delta`` may not be ``z``. ``per_number`` tells whether the mean runs over every output or over rows.
    """

    name: str
    value: Callable[[Tensor, Tensor], Tensor]
    derive: Callable[[Tensor, Tensor, Tensor], Tensor]
    per_number: bool
    factor: float = 1.0

    def scale(self, z_bc: Tensor) -> float:
        """What ``delta`` must be multiplied by to be the derivative of the mean loss."""
        return self.factor / (z_bc.numel() if self.per_number else z_bc.shape[0])


def _same_shape(z: Tensor, y: Tensor) -> None:
    if z.shape != y.shape:
        raise ModelError(
            f"the module's output has shape {tuple(z.shape)} and the target {tuple(y.shape)}; "
            "this loss compares them number by number, so give the target the output's shape"
        )


def _cross_entropy_value(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def _cross_entropy(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    torch._log_softmax(z, 1, False, out=delta)
    if y.dtype == torch.int64 and y.dim() == 1:
        loss = F.nll_loss(delta, y)  # raises on a label out of range
        delta.exp_()
        delta.scatter_add_(1, y.unsqueeze(1), delta.new_full((), -1.0).expand(len(y), 1))
        return loss
    if y.shape == z.shape and y.is_floating_point():
        loss = -(delta * y).sum() / len(y)
        delta.exp_().mul_(y.sum(1, keepdim=True)).sub_(y)
        return loss
    raise ModelError(
        f"cross_entropy got targets of dtype {y.dtype} and shape {tuple(y.shape)} for outputs of shape "
        f"{tuple(z.shape)}; give class numbers as int64 of shape ({len(z)},), or one probability per output"
    )


def _mse(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    _same_shape(z, y)
    torch.sub(z, y, out=delta)
    return F.mse_loss(z, y)


def _bce(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    _same_shape(z, y)
    loss = F.binary_cross_entropy_with_logits(z, y)
    torch.sigmoid(z, out=delta).sub_(y)
    return loss


def _l1(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
    _same_shape(z, y)
    torch.sub(z, y, out=delta).sign_()
    return F.l1_loss(z, y)


def _huber(limit: float) -> Loss:
    def derive(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
        _same_shape(z, y)
        torch.sub(z, y, out=delta).clamp_(-limit, limit)
        return F.huber_loss(z, y, delta=limit)

    return Loss("huber_loss", lambda z, y: F.huber_loss(z, y, delta=limit), derive, per_number=True)


def _smooth_l1(beta: float) -> Loss:
    def derive(z: Tensor, y: Tensor, delta: Tensor) -> Tensor:
        _same_shape(z, y)
        torch.sub(z, y, out=delta).clamp_(-beta, beta)
        return F.smooth_l1_loss(z, y, beta=beta)

    def value(z: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(z, y, beta=beta)

    return Loss("smooth_l1_loss", value, derive, per_number=True, factor=1.0 / beta)


CROSS_ENTROPY = Loss("cross_entropy", _cross_entropy_value, _cross_entropy, per_number=False)
MSE = Loss("mse_loss", F.mse_loss, _mse, per_number=True, factor=2.0)
BCE = Loss("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, _bce, per_number=True)
L1 = Loss("l1_loss", F.l1_loss, _l1, per_number=True)

_FUNCTIONS: dict[Any, Loss] = {
    F.cross_entropy: CROSS_ENTROPY,
    F.mse_loss: MSE,
    F.binary_cross_entropy_with_logits: BCE,
    F.l1_loss: L1,
    F.huber_loss: _huber(1.0),
    F.smooth_l1_loss: _smooth_l1(1.0),
}


def loss_of(loss: object) -> Loss:
    """The loss for a function of `torch.nn.functional` or a module of `torch.nn`; or `NotAChainError`."""
    if not isinstance(loss, nn.Module):
        known = _FUNCTIONS.get(loss) if callable(loss) else None
        if known is None:
            raise NotAChainError(f"the loss {getattr(loss, '__name__', loss)!r} is none of {_known()}")
        return known
    if getattr(loss, "reduction", "mean") != "mean":
        raise NotAChainError(f"the loss reduces by {loss.reduction!r}, not by 'mean'")
    return _of_module(loss)


def _of_module(loss: Any) -> Loss:
    kind = type(loss)
    if kind is nn.CrossEntropyLoss:
        if loss.weight is not None or loss.label_smoothing or loss.ignore_index != -100:
            raise NotAChainError(
                "the CrossEntropyLoss has class weights, label smoothing or an ignored label"
            )
        return CROSS_ENTROPY
    if kind is nn.BCEWithLogitsLoss:
        if loss.weight is not None or loss.pos_weight is not None:
            raise NotAChainError("the BCEWithLogitsLoss has weights")
        return BCE
    if kind is nn.MSELoss:
        return MSE
    if kind is nn.L1Loss:
        return L1
    if kind is nn.HuberLoss:
        return _huber(float(loss.delta))
    if kind is nn.SmoothL1Loss and loss.beta > 0:
        return _smooth_l1(float(loss.beta))
    raise NotAChainError(f"the loss is a {kind.__name__}, none of {_known()}")


def _known() -> str:
    return ", ".join(loss.name for loss in _FUNCTIONS.values())
