"""What one update is: plain SGD through a chain in place, or any `torch.optim` step on autograd's gradients.

A stepper owns its copy of the module and its optimiser's state; the parameters are tensors that the
caller gives: shared memory, or a replica. Momentum and Adam's moments are therefore each worker's own,
fed by its own gradients only, and never shared: two writers of one running mean would mix decays that
belong to different batches. With one worker this is the sequential optimiser.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.chain_steps import Steps
from headrace.errors import OptionError, unknown

OPTIMISERS = ("sgd", "adam", "adamw")

SAMPLE_EVERY = 16
"""Staleness of direct updates is looked at in one of so many: reading all counters takes two microseconds."""


@dataclass(frozen=True, kw_only=True)
class OptimiserSpec:
    """Which optimiser, by name and numbers."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_norm: float | None = None
    """Largest norm of all gradients together; larger ones are scaled down to it."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            known = ", ".join(OPTIMISERS)
            raise unknown("optimiser for asynchronous workers", self.name, OPTIMISERS) from OptionError(known)
        if not self.lr > 0:
            raise OptionError(f"lr is {self.lr}; a step size must be above 0")

    @property
    def plain(self) -> bool:
        return self.name == "sgd" and not self.momentum and self.clip_norm is None

    def build(self, parameters: list[nn.Parameter], fused: bool = True) -> torch.optim.Optimizer:
        if self.name == "sgd":
            return torch.optim.SGD(
                parameters,
                self.lr,
                self.momentum,
                weight_decay=self.weight_decay,
                nesterov=self.nesterov,
                fused=fused,
            )
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        captured = parameters[0].is_cuda  # the step count must then be a tensor on the device
        return kind(
            parameters, self.lr, self.betas, self.eps, self.weight_decay, capturable=captured, fused=True
        )


class Stepper(Protocol):
    """One worker's way to make an update."""

    def step(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Update the parameters in place from one batch; returns the mean loss before the update."""
        ...


class ChainStepper:
    """Plain SGD, in place, without autograd."""

    def __init__(self, chain: Chain, spec: OptimiserSpec, parameters: dict[str, Tensor]) -> None:
        self._chain = chain.bind(parameters)
        self.decay = spec.weight_decay

    def fuse(self) -> str:
        return self._chain.fuse()

    @property
    def steps(self) -> Steps | None:
        """The chain's compiled steps, after `fuse`, where they fit."""
        return self._chain.steps

    def step(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        return self._chain.step(x, y, lr, self.decay)


class OptimiserStepper:
    """A `torch.optim` optimiser over gradients from a chain, or from autograd."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Tensor],
        chain: Chain | None,
        spec: OptimiserSpec,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        sparse_rows: bool = False,
    ) -> None:
        device = next(iter(parameters.values())).device
        self._module = copy.deepcopy(module).to(device)
        self._loss = loss
        self._chain = chain.bind(parameters) if chain is not None else None
        self._clip = spec.clip_norm
        own = dict(self._module.named_parameters())
        for name, parameter in own.items():
            parameter.data = parameters[name]
        for name, buffer in self._module.named_buffers():
            buffer.data = buffers[name]
        self._trained = [p for p in own.values() if p.requires_grad]
        self._grads: dict[str, Tensor] = {}
        if self._chain is not None:
            self._grads = {name: torch.zeros_like(p) for name, p in own.items() if p.requires_grad}
            for name, grad in self._grads.items():
                own[name].grad = grad
        self._sparse = chain is None and use_sparse_rows(self._module, spec, switch=sparse_rows)
        self._optimiser = spec.build(self._trained, fused=not self._sparse)
        self._lr = spec.lr

    def step(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        if lr != self._lr:
            self._lr = lr
            for group in self._optimiser.param_groups:
                group["lr"] = lr
        if self._chain is not None:
            loss = self._chain.gradient(x, y, self._grads)
        else:
            self._optimiser.zero_grad(set_to_none=self._sparse)
            loss = self._loss(self._module(x), y)
            loss.backward()
            loss = loss.detach()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._trained, self._clip)
        self._optimiser.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._optimiser.state_dict()


def make_stepper(
    module: nn.Module,
    loss: Callable[..., Tensor],
    spec: OptimiserSpec,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    use_chain: bool = True,
    sparse_rows: bool = False,
) -> Stepper:
    """The fastest stepper that can do it. ``sparse_rows``: updates of embeddings may touch looked-up rows alone."""
    chain = Chain.of(module, loss)[0] if use_chain else None
    if chain is not None and spec.plain:
        return ChainStepper(chain, spec, parameters)
    return OptimiserStepper(module, loss, chain, spec, parameters, buffers, sparse_rows)


def use_sparse_rows(module: nn.Module, spec: OptimiserSpec, *, switch: bool) -> bool:
    """Whether some embedding's gradient holds its looked-up rows only; ``switch`` makes it so where it can be.

    A dense gradient would make every update write the whole table, rows that nobody looked up included, and undo
    what others add meanwhile.
    """
    tables: list[nn.Embedding | nn.EmbeddingBag] = [
        part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    plain = spec.plain and not spec.weight_decay
    for table in tables:
        if switch and plain and not table.scale_grad_by_freq and getattr(table, "mode", "") != "max":
            table.sparse = True
    sparse = [table for table in tables if table.sparse]
    if sparse and not plain:
        raise OptionError(
            f"{type(sparse[0]).__name__}(sparse=True) goes with plain SGD only: no momentum, weight decay or clipping, "
            "no Adam; use sparse=False with these"
        )
    return bool(sparse)
