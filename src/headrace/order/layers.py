"""From a layer's input and output gradient to pieces of example gradients.

`taps_for` names, for each type of module, the function that makes its pieces from (module, inputs, output gradients).
Every function reads the examples from the batch dimension of the model (`Layout`); a layer whose input does not have
that dimension (a position embedding of shape (T,), say) raises `NotPerExample`, and the watcher leaves it out and
says so. BatchNorm is approximate: its statistics are taken as given, though every example moves them.

Shapes: b examples, p positions, f features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.order.pieces import Convolution, Dense, Factors, Normed, Piece, Tokens, patches
from headrace.order.replay import attention_pieces, recurrent_pieces

Maker = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], list[Tensor | None], "Layout"], list[Piece]]


class NotPerExample(Exception):
    """A layer whose gradient cannot be split by example; the text says why."""


@dataclass(frozen=True)
class Layout:
    """How many examples the batch holds, and along which dimension sequences carry them."""

    batch: int
    batch_dim: int = 0

    def rows(self, x: Tensor) -> Tensor:
        """x (features last) as b × p × f."""
        b, features = self.batch, x.shape[-1]
        if self.batch_dim == 1 and x.dim() >= 3 and x.shape[1] == b:
            return x.transpose(0, 1).reshape(b, -1, features)
        if x.dim() >= 2 and x.shape[0] == b:
            return x.reshape(b, -1, features)
        if x.dim() >= 2 and b and x.shape[0] % b == 0 and x.shape[0] > 0:
            # Batch and positions were flattened together; the batch varies slowest where it comes first.
            if self.batch_dim == 1:
                return x.reshape(-1, b, features).transpose(0, 1)
            return x.reshape(b, -1, features)
        raise self.misfit(x)

    def first(self, x: Tensor) -> Tensor:
        """x with the examples along its first dimension."""
        if x.dim() and x.shape[0] == self.batch:
            return x
        if self.batch_dim == 1 and x.dim() >= 2 and x.shape[1] == self.batch:
            return x.transpose(0, 1)
        if x.dim() and self.batch and x.shape[0] % self.batch == 0 and self.batch_dim == 0:
            return x.reshape(self.batch, -1, *x.shape[1:])
        raise self.misfit(x)

    def misfit(self, x: Tensor) -> NotPerExample:
        return NotPerExample(f"its input has shape {tuple(x.shape)}, the batch {self.batch} examples")


def _trained(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is not None and parameter.requires_grad else None


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor


def linear(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.Linear)
    left, right = layout.rows(_delta(deltas)), layout.rows(_input(args, kwargs))
    return [Factors(_trained(module.weight), _trained(module.bias), left, right.to(left.dtype))]


def _delta(deltas: list[Tensor | None]) -> Tensor:
    assert deltas[0] is not None
    return deltas[0]


def convolution(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    x, delta = _input(args, kwargs), _delta(deltas)
    if x.shape[0] != layout.batch:
        raise layout.misfit(x)
    weight, bias = _trained(module.weight), _trained(module.bias)
    if module.groups == 1:
        return [Convolution(module, weight, bias, x, delta)]
    groups, flat = module.groups, delta.flatten(2)
    pieces: list[Piece] = []
    if weight is not None:
        inputs = patches(module, x).to(delta.dtype).unflatten(2, (groups, -1))
        outputs = flat.unflatten(1, (groups, -1))
        gradients = torch.einsum("bgop,bpgi->bgoi", outputs, inputs)
        pieces.append(Dense(weight, gradients.reshape(len(x), *weight.shape)))
    if bias is not None:
        pieces.append(Dense(bias, flat.sum(2)))
    return pieces


def embedding(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.Embedding)
    ids, delta = _input(args, kwargs), _delta(deltas)
    ids = layout.rows(ids[..., None])[:, :, 0]
    delta = layout.rows(delta)
    if module.padding_idx is not None:
        delta = delta * (ids != module.padding_idx)[:, :, None]
    return [Tokens(module.weight, ids, delta)]


def _normed(
    module: nn.Module, normalise: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor, keep: tuple[int, ...]
) -> Normed:
    """A scale and a shift; ``keep`` are the dimensions (besides the first) that the parameters have."""
    weight, bias = _trained(getattr(module, "weight", None)), _trained(getattr(module, "bias", None))
    return Normed(weight, bias, normalise, x, delta, keep)


def layer_norm(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = module.normalized_shape
    x, delta = layout.first(_input(args, kwargs)), layout.first(_delta(deltas))
    keep = tuple(range(delta.dim() - len(shape), delta.dim()))
    if isinstance(module, nn.LayerNorm):
        eps = module.eps
        return [_normed(module, lambda v: F.layer_norm(v, shape, eps=eps), x, delta, keep)]
    return [_normed(module, lambda v: F.rms_norm(v, shape, eps=module.eps), x, delta, keep)]


def channel_norm(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    x, delta = _input(args, kwargs), _delta(deltas)
    if x.shape[0] != layout.batch:
        raise layout.misfit(x)
    if isinstance(module, nn.GroupNorm):
        groups, eps = module.num_groups, module.eps
        return [_normed(module, lambda v: F.group_norm(v, groups, eps=eps), x, delta, (1,))]
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        eps = module.eps
        return [_normed(module, lambda v: F.instance_norm(v, eps=eps), x, delta, (1,))]
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    use_batch = module.training or module.running_mean is None
    normal = F.batch_norm(
        x,
        None if use_batch else module.running_mean,
        None if use_batch else module.running_var,
        training=use_batch,
        eps=module.eps,
    )
    # At once and not later with other batches, whose statistics would come in.
    return [*_normed(module, lambda v: normal, x, delta, (1,)).dense()]


def recurrent(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.RNNBase)
    x = _input(args, kwargs)
    if not isinstance(x, Tensor):
        raise NotPerExample("packed sequences are not split by example")
    if x.dim() != 3 or x.shape[0 if module.batch_first else 1] != layout.batch:
        raise layout.misfit(x)
    if module.dropout and module.training and module.num_layers > 1:
        raise NotPerExample("its dropout between layers cannot be replayed")
    state = args[1] if len(args) > 1 else kwargs.get("hx")
    return recurrent_pieces(module, x, state, deltas)


def attention(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    assert isinstance(module, nn.MultiheadAttention)
    query = args[0] if args else kwargs["query"]
    if query.dim() != 3 or query.shape[0 if module.batch_first else 1] != layout.batch:
        raise layout.misfit(query)
    return attention_pieces(module, args, kwargs, _delta(deltas))


def functional(
    module: nn.Module, args: Any, kwargs: Any, deltas: list[Tensor | None], layout: Layout
) -> list[Piece]:
    """Any other layer without children: torch.func, one example at a time, vectorised."""
    x, delta = _input(args, kwargs), _delta(deltas)
    if x.shape[0] != layout.batch or delta.shape[0] != layout.batch:
        raise layout.misfit(x)
    trained = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}

    def gradients(example: Tensor, change: Tensor) -> dict[str, Tensor]:
        def run(values: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(module, values, (example[None],))
            return result[0]

        pulled: dict[str, Tensor] = torch.func.vjp(run, {n: p.detach() for n, p in trained.items()})[1](
            change
        )[0]
        return pulled

    with torch.enable_grad():
        found = torch.func.vmap(gradients)(x.detach(), delta)
    return [Dense(trained[name], value.detach()) for name, value in found.items()]


_MAKERS: list[tuple[tuple[type[nn.Module], ...], Maker]] = [
    ((nn.Linear,), linear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    ((nn.Embedding,), embedding),
    ((nn.LayerNorm, nn.RMSNorm), layer_norm),
    (
        (nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
        channel_norm,
    ),
    ((nn.RNNBase,), recurrent),
    ((nn.MultiheadAttention,), attention),
]


def maker_for(module: nn.Module) -> Maker | None:
    """How to make this module's pieces, or None when nothing here can."""
    if not any(p.requires_grad for p in own_parameters(module)):
        return None
    if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.sparse):
        return None
    if isinstance(module, nn.MultiheadAttention) and module.bias_k is not None:
        return None
    # A subclass with a forward of its own may do anything with its weight.
    for types, maker in _MAKERS:
        if isinstance(module, types):
            known = any(type(module).forward is t.forward for t in _ancestors(module, types))
            return maker if known else functional
    return functional if next(module.children(), None) is None else None


def _ancestors(module: nn.Module, types: tuple[type[nn.Module], ...]) -> list[type[nn.Module]]:
    return [t for t in type(module).__mro__ if t.__module__.startswith("torch.nn") and issubclass(t, types)]


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters a module's pieces stand for; attention holds its output projection as a child."""
    own = list(module.parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention):
        own = list(itertools.chain(own, module.out_proj.parameters(recurse=False)))
    return own


def is_approximate(module: nn.Module) -> bool:
    """True for layers whose examples are not independent of one another."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
