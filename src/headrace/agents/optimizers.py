"""Optimisers over one flat parameter vector: five in-place operations instead of a loop over tensors.

The same code runs on a NumPy array's memory and on a CUDA tensor. The learning rate is a tensor of one element on the
parameters' device, so that a captured graph sees its changes, and clipping never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[], None]


class FlatOptimizer:
    """Steps ``theta`` along ``grad``, both flat and owned by the caller."""

    def __init__(
        self,
        kind: str | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        theta: Tensor,
        grad: Tensor,
        max_norm: float,
    ) -> None:
        self.theta, self.grad, self.max_norm = theta, grad, max_norm
        self.minus_lr = torch.zeros((), dtype=theta.dtype, device=theta.device)
        self.state: dict[str, Tensor] = {}
        self._own: torch.optim.Optimizer | None = None
        if callable(kind):
            parameter = torch.nn.Parameter(theta)
            parameter.grad = grad
            self._own = kind([parameter])
            self._step: Step = self._step_own
        else:
            one_pass = theta.device.type == "cpu" and kind != "sgd"
            self._step = self._fused if one_pass else {
                "rmsprop": self._rmsprop, "adam": self._adam, "sgd": self._sgd
            }[kind]  # fmt: skip
            names = {"rmsprop": ("squares",), "adam": ("means", "squares"), "sgd": ()}[kind]
            self.state = {name: torch.zeros_like(theta) for name in names}
            self._scratch = torch.zeros_like(theta)
        if kind == "adam":
            self.state["count"] = torch.zeros((), dtype=torch.float32, device=theta.device)
        self._kind = kind
        # RMSprop is Adam without a memory of the gradient, long after its start.
        self._long_after = torch.full((), 1e9)

    def step(self, lr: float | None = None) -> None:
        """Clip the gradient and take one step; ``lr=None`` keeps the rate that `minus_lr` holds."""
        if lr is not None:
            self.minus_lr.fill_(-lr)
        if self._step == self._fused:
            self._fused()
            return
        if self.max_norm > 0:
            norm = torch.linalg.vector_norm(self.grad)
            self.grad.mul_((self.max_norm / norm.add_(1e-6)).clamp_(max=1.0))
        self._step()

    def _fused(self) -> None:
        """Clipping and the step in one pass over memory by torch's own kernel for cores."""
        scale = None
        if self.max_norm > 0:
            scale = torch.linalg.vector_norm(self.grad).add_(1e-6).div_(self.max_norm).clamp_(min=1.0)
        if self._kind == "adam":
            means, count, keep, betas = self.state["means"], self.state["count"], 0.9, 0.999
            count += 1
        else:
            means, count, keep, betas = self._scratch, self._long_after, 0.0, 0.99
        torch._fused_adam_(
            [self.theta], [self.grad], [means], [self.state["squares"]], [], [count], lr=-self.minus_lr.item(),
            beta1=keep, beta2=betas, weight_decay=0.0, eps=1e-5, amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip

    def _sgd(self) -> None:
        self.theta.addcmul_(self.grad, self.minus_lr)

    def _rmsprop(self) -> None:
        # eps inside stable-baselines3's default is 1e-5; a smaller one lets the first steps explode.
        squares, scratch = self.state["squares"], self._scratch
        squares.mul_(0.99).addcmul_(self.grad, self.grad, value=0.01)
        torch.sqrt(squares, out=scratch)
        torch.div(self.grad, scratch.add_(1e-5), out=scratch)
        self.theta.addcmul_(scratch, self.minus_lr)

    def _adam(self) -> None:
        means, squares, count, scratch = (
            self.state["means"],
            self.state["squares"],
            self.state["count"],
            self._scratch,
        )
        count += 1
        means.lerp_(self.grad, 0.1)
        squares.mul_(0.999).addcmul_(self.grad, self.grad, value=0.001)
        torch.sqrt(squares / (1 - 0.999**count), out=scratch)
        torch.div(means / (1 - 0.9**count), scratch.add_(1e-5), out=scratch)
        self.theta.addcmul_(scratch, self.minus_lr)

    def _step_own(self) -> None:
        assert self._own is not None
        for group in self._own.param_groups:
            group["lr"] = -self.minus_lr if group.get("capturable") else -self.minus_lr.item()
        self._own.step()
