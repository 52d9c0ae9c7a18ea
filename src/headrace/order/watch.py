"""Hooks that read example gradients off the user's ordinary forward and backward pass.

`Watcher(model, collect, finish)` puts a forward hook on every layer that `headrace.order.layers` knows. Each forward
pass of the model opens a `Record`; every layer's output gets a tensor hook that counts in the record; when the last
of them has fired in the backward pass, the record is finished, still inside ``backward()``. Nothing is returned to
autograd, so gradients, optimiser, accumulation, AMP and DDP are untouched. The hooks do nothing when gradients are
off (validation), and nothing inside the recomputation of checkpointed blocks.

Which rows a record stands for is settled when it finishes, in the order of the forward passes. A forward pass that
never saw a backward pass is dropped when a later one has.

Under ``torch.compile`` the hooks stay outside the compiled pieces: one graph break for each layer.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.order.graph import WeightNode, attention_nodes
from headrace.order.layers import Layout, Maker, NotPerExample, is_approximate, maker_for, own_parameters
from headrace.order.pieces import Piece
from headrace.order.sketch import SketchSum


class Record:
    """One forward pass and what its backward pass told so far."""

    __slots__ = ("fired", "indices", "layout", "pending", "pieces", "ready", "second", "sketch")

    def __init__(self, layout: Layout, indices: Tensor | None) -> None:
        self.layout = layout
        self.indices = indices
        self.pending = 0
        self.fired = 0
        self.ready = False
        self.pieces: list[Piece] = []
        self.sketch: SketchSum | None = None
        self.second: int | None = None
        """The second dimension of the model's input: the batch, if it is not the first."""


CollectLinear = Callable[[Record, Tensor, Tensor], None]
"""Takes a record, and input and output gradient of one linear layer."""


class Watcher:
    """The hooks on one model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        collect: Callable[[Record, list[Piece]], None],
        linear_collector: Callable[[nn.Linear], CollectLinear] | None,
        finish: Callable[[Record], None],
        next_indices: Callable[[], Tensor | None],
        batch_dim: int = 0,
        tap_layers: bool = True,
        check_output: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        self.model = model
        self.collect = collect
        self.linear_collector = linear_collector
        self.finish = finish
        self.next_indices = next_indices
        self.check_output = check_output
        self.batch_dim = batch_dim
        self.left_out: dict[str, tuple[str, int]] = {}
        """Layer or parameter → (why it is left out, how many parameters it has)."""
        self.approximate: list[str] = []
        self._open: Record | None = None
        self._layout: Layout | None = None
        self._inside = False
        self._queue: deque[Record] = deque()
        self._handles: list[Any] = [
            # Plain functions: copy.deepcopy(model) would copy a bound method's whole watcher with it.
            model.register_forward_pre_hook(lambda m, a, k: self._begin(m, a, k), with_kwargs=True),
            model.register_forward_hook(lambda m, a, o: self._end(m, a, o), always_call=True),
        ]
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        if tap_layers:
            self._tap_layers()

    def _tap_layers(self) -> None:
        covered: set[int] = set()
        inner: set[nn.Module] = set()
        for module in self.model.modules():
            maker = maker_for(module) if module not in inner else None
            if maker is None:
                continue
            if isinstance(module, nn.MultiheadAttention):
                inner.add(module.out_proj)
                if module.dropout:
                    self._handles.append(module.register_forward_pre_hook(_remember_random, with_kwargs=True))
            covered.update(id(p) for p in own_parameters(module))
            if is_approximate(module):
                self.approximate.append(self._names[module])
            tap = self._make_tap(maker)
            if type(module) is nn.Linear and self.linear_collector is not None:
                tap = self._make_linear_tap(module, tap, self.linear_collector(module))
            self._handles.append(module.register_forward_hook(tap, with_kwargs=True))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in covered:
                self.left_out[name] = ("no known layer holds it", parameter.numel())

    def share(self) -> float:
        """The share of the trained parameters whose gradients the signs see."""
        total = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return 1.0 - sum(count for _, count in self.left_out.values()) / max(total, 1)

    def coverage(self) -> str:
        """What the signs see, in a sentence for the user."""
        parts = [f"the signs see {100 * self.share():.4g} % of the trained parameters"]
        if self.left_out:
            parts.append("left out: " + "; ".join(f"{n} ({why})" for n, (why, _) in self.left_out.items()))
        if self.approximate:
            parts.append(
                f"approximately {', '.join(self.approximate)}: batch statistics are taken as given, "
                "though every example moves them"
            )
        return "; ".join(parts)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.drop()

    def drop(self) -> None:
        """Forget passes that are not finished."""
        self._queue.clear()
        self._open = None
        self._inside = False

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.model or not torch.is_grad_enabled():
            return
        if self._queue:
            if self._in_backward():
                return
            self.settle()
        self._open = self._new_record((args, kwargs))
        self._inside = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.model:
            return
        if (
            self._inside
            and self.check_output is not None
            and isinstance(output, Tensor)
            and output.requires_grad
        ):
            check, self.check_output = self.check_output, None
            batch = self._open.layout.batch if self._open is not None else 0
            output.register_hook(lambda delta: check(delta, batch))
        self._inside = False

    def _in_backward(self) -> bool:
        return any(record.fired and record.pending for record in self._queue)

    def _new_record(self, inputs: Any) -> Record:
        indices = self.next_indices()
        args = inputs[0]
        second: int | None
        if self.batch_dim == 0 and args and type(args[0]) is Tensor and args[0].dim() > 1:
            # What nearly every model is called with, without walking through its arguments.
            shape = args[0].shape
            size, second = shape[0], shape[1]
        else:
            size = _batch_size(inputs, self.batch_dim) if indices is None else 0
            second = next((x.shape[1] for x in _tensors(inputs) if x.dim() > 1), None)
        if indices is not None:
            size = len(indices)
        if self._layout is None or self._layout.batch != size:
            self._layout = Layout(size, self.batch_dim)
        record = Record(self._layout, indices)
        record.second = second
        self._queue.append(record)
        return record

    def _record_for(self, inputs: Any) -> Record | None:
        """The record a layer's output belongs to; None inside a recomputation."""
        if self._inside:
            return self._open
        if self._in_backward():
            return None
        if self._open is None or self._open.fired or self._open.ready:
            # A part of the model was called by itself, as a LightningModule's training_step does.
            self._open = self._new_record(inputs)
        return self._open

    def _make_tap(self, maker: Maker) -> Callable[..., Any]:
        def tap(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not torch.is_grad_enabled() or module in self._silent or module not in self._names:
                return None  # the last: a copy of the model, which took the hooks along
            record = self._record_for((args, kwargs))
            if record is None:
                return None
            first = output if isinstance(output, Tensor) else output[0]
            if not first.requires_grad:
                return None
            record.pending += 1
            if isinstance(module, nn.MultiheadAttention) and module.dropout:
                kwargs = {**kwargs, "_random_state": _RANDOM_STATES.pop(module, None)}

            def fire(*deltas: Tensor | None) -> None:
                self._fire(record, module, maker, args, kwargs, list(deltas))

            if isinstance(module, nn.RNNBase):
                return _join(fire, output)
            nodes = attention_nodes(module, first, args, kwargs, record.layout.batch)
            if nodes is not None:
                self._tap_nodes(record, module, nodes)
                return None
            first.register_hook(fire)
            return None

        return _uncompiled(tap)

    def _make_linear_tap(
        self, owner: nn.Linear, general: Callable[..., Any], collect: CollectLinear
    ) -> Callable[..., Any]:
        """The tap of the commonest layer without the detours, which cost as much as its arithmetic."""

        def fire(record: Record, x: Tensor, delta: Tensor) -> None:
            if record.ready:
                return
            record.fired += 1
            if torch.is_grad_enabled():  # only a backward pass with create_graph=True
                with torch.no_grad():
                    collect(record, x, delta)
            else:
                collect(record, x, delta)
            record.pending -= 1
            if record.pending == 0:
                self.complete(record)

        def tap(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            record = self._open
            if (
                not self._inside
                or record is None
                or module is not owner
                or not torch.is_grad_enabled()
                or not _is_plain(owner, args, output, record.layout.batch)
                or owner in self._silent
            ):
                return general(module, args, kwargs, output)
            record.pending += 1
            output.register_hook(partial(fire, record, args[0]))
            return None

        return _uncompiled(tap)

    def _tap_nodes(self, record: Record, module: nn.Module, nodes: list[WeightNode]) -> None:
        """Hooks on the autograd nodes that use a layer's weights, where they could be found."""
        record.pending += len(nodes) - 1
        for node in nodes:

            def fire(gradients: tuple[Tensor, ...], node: WeightNode = node) -> None:
                def maker(
                    _m: Any, _a: Any, _k: Any, deltas: list[Tensor | None], layout: Layout
                ) -> list[Piece]:
                    return node.pieces(deltas, layout.batch)

                self._fire(record, module, maker, (), {}, list(gradients))
                node.node = None  # it holds this hook, which would hold it and the whole graph below it

            node.node.register_prehook(fire)

    _silent: frozenset[nn.Module] = frozenset()

    def _fire(
        self,
        record: Record,
        module: nn.Module,
        maker: Maker,
        args: Any,
        kwargs: Any,
        deltas: list[Tensor | None],
    ) -> None:
        if record.ready:
            return  # a second backward pass over the same graph tells nothing new
        record.fired += 1
        try:
            with torch.no_grad():
                self.collect(record, maker(module, args, kwargs, deltas, record.layout))
        except NotPerExample as reason:
            self._leave_out(module, str(reason), (args, kwargs), record)
        record.pending -= 1
        if record.pending == 0:
            self.complete(record)

    def complete(self, record: Record) -> None:
        """Mark a record as complete; finish it and those before it, oldest first."""
        record.ready = True
        with torch.no_grad():
            while self._queue and self._queue[0].ready:
                self.finish(self._queue.popleft())

    def settle(self) -> None:
        """Finish what a backward pass left incomplete (unused outputs) and drop passes that had none."""
        if not any(record.fired or record.ready for record in self._queue):
            if len(self._queue) > 16:
                self._queue.popleft()
            return
        waiting, self._queue = self._queue, deque()
        last = max(i for i, record in enumerate(waiting) if record.fired or record.ready)
        for number, record in enumerate(waiting):
            if record.fired or record.ready:
                with torch.no_grad():
                    self.finish(record)
            elif number > last:
                self._queue.append(record)

    def _leave_out(self, module: nn.Module, why: str, inputs: Any, record: Record) -> None:
        name = self._names[module]
        for x in _tensors(inputs):
            if self.batch_dim or x.dim() < 2 or x.shape[0] == record.layout.batch:
                continue
            # The last layer of the model, which fires first, surely has one row per example.
            swapped = record.fired == 1 and x.shape[0] == record.second
            if x.shape[1] == record.layout.batch or swapped:
                raise ModelError(
                    f"the model's batch is not the first dimension: layer {name!r} got an input of shape "
                    f"{tuple(x.shape)} in a batch of {record.layout.batch} examples; "
                    "say watch(model, batch_dim=1)"
                )
        count = sum(p.numel() for p in own_parameters(module) if p.requires_grad)
        self.left_out[name] = (why, count)
        self._silent = self._silent | {module}
        warnings.warn(f"order: {self.coverage()}", stacklevel=2)


def _uncompiled(tap: Callable[..., Any]) -> Callable[..., Any]:
    # Compiled code must not trace into a tap: it keeps Python state. This is the mark that torch.compiler.disable
    # leaves; calling that would import the whole compiler, seconds for those who do not compile.
    tap._torchdynamo_disable = True  # type: ignore[attr-defined]
    return tap


def _is_plain(module: nn.Linear, args: Any, output: Any, batch: int) -> bool:
    """A linear layer that is trained, on one vector per example, without autocast."""
    if not args or type(output) is not Tensor:
        return False
    x: Tensor = args[0]
    shape = x.shape
    if len(shape) != 2 or shape[0] != batch or x.dtype is not output.dtype:
        return False
    held = module._parameters  # a dict; module.weight takes ten times as long
    weight, bias = held["weight"], held["bias"]
    return weight is not None and weight.requires_grad and (bias is None or bias.requires_grad)


_RANDOM_STATES: dict[nn.Module, Tensor] = {}


def _remember_random(module: nn.Module, args: Any, kwargs: Any) -> None:
    if module.training and torch.is_grad_enabled() and not torch.cuda.is_available():
        _RANDOM_STATES[module] = torch.get_rng_state()


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors inside nested tuples, lists and dicts, in order."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, tuple | list):
        for value in nested:
            yield from _tensors(value)
    elif hasattr(nested, "items"):  # BatchEncoding and its like
        yield from _tensors(dict(nested.items()))


def _batch_size(inputs: Any, batch_dim: int) -> int:
    for x in _tensors(inputs):
        if x.dim() > batch_dim:
            return x.shape[batch_dim]
        if x.dim():
            return x.shape[0]
    raise ModelError(
        "the watched model was called without any tensor, so the size of the batch is unknown; "
        "name the rows with begin_batch(indices) before the forward pass"
    )


class _Join(torch.autograd.Function):
    """An identity over several tensors whose backward pass sees all their gradients at once."""

    @staticmethod
    def forward(ctx: Any, fire: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.fire = fire
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> Any:
        ctx.fire(*deltas)
        return (None, *deltas)


def _apply_join(fire: Callable[..., None], *tensors: Tensor) -> Any:
    return _Join.apply(fire, *tensors)  # type: ignore[no-untyped-call]


def _join(fire: Callable[..., None], output: Any) -> Any:
    """A recurrent layer's output, with ``fire`` called once for all of it."""
    out, state = output
    if isinstance(state, Tensor):
        return tuple(_apply_join(fire, out, state))
    out, *rest = _apply_join(fire, out, *state)
    return out, tuple(rest)
