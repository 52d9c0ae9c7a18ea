"""One step of stochastic gradient descent through a chain of layers, written by hand and in place.

A `Chain` is a module made of Linear layers and activations that ends in a known loss. Its backward pass is a
few matrix products, so autograd's bookkeeping, its gradient buffers and the optimiser's passes over the
parameters can be left out: ``W.addmm_(deltaᵀ, input, alpha=-lr / b)`` is gradient and update in one product.

What holds:

- An update equals autograd and `torch.optim.SGD` to float rounding; the derivative with respect to a layer's
  input is taken before its weights change.
- A step allocates nothing of the batch's or the model's size once a batch of that size or larger was seen,
  except inside oneDNN's products (`products`).
- A chain owns its workspaces and never its parameters: `bind` says which tensors are updated, the module's
  own or views of memory that other workers update too. A chain belongs to one thread; `clone` makes more.
- Outputs and losses are the caller's to keep, except the tensor that `forward` returns: it is valid until the
  next call.

Shortcomings: no second derivatives, no hooks, plain SGD with weight decay in `step`; every other optimiser
goes through `gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.engine.chain_losses import Loss, loss_of
from headrace.engine.chain_ops import Dropout, Elementwise, Linear, NotAChainError, Operation, operations
from headrace.engine.chain_steps import Steps
from headrace.engine.products import products_for
from headrace.errors import DataError, ModelError


class Listens(Protocol):
    """Who learns from a chain's steps, as a balanced order does."""

    def begin(self, indices: Tensor) -> None: ...

    def take(self, weight: str, delta_ob: Tensor, input_bi: Tensor) -> None: ...

    def end(self, scale: float) -> None: ...


class _Rows:
    """The views of the workspaces for one batch size; see `_Workspaces`."""

    __slots__ = ("arrays", "deltas", "masks", "ones", "outs", "transposed")

    def __init__(self, space: _Workspaces, b: int) -> None:
        self.outs = [space.outs[slot][:b] for slot in space.slots]
        self.deltas = [delta[:b] for delta in space.deltas]
        self.transposed = [delta.t() for delta in self.deltas]
        self.masks = [None if mask is None else mask[:b] for mask in space.masks]
        self.ones = space.ones[:b]
        self.arrays: tuple[list[Any], list[Any]] | None = None
        """Outputs and derivatives as numpy arrays over the same memory, for the compiled loops."""


class _Workspaces:
    """Memory for outputs and derivatives, for batches of up to ``capacity`` rows.

    An activation overwrites its input unless its own derivative or that of the operation before needs it.
    """

    def __init__(self, ops: list[Operation], like: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[int] = []
        self.outs: list[Tensor] = []
        self.masks: list[Tensor | None] = []
        self.deltas: list[Tensor] = []
        width = next(op.features_in for op in ops if isinstance(op, Linear))
        for number, op in enumerate(ops):
            if isinstance(op, Linear):
                width = op.features_out
            if not (number > 0 and _may_overwrite(ops[number - 1], op)):
                self.outs.append(like.new_empty(capacity, width))
            self.slots.append(len(self.outs) - 1)
            self.masks.append(like.new_empty(capacity, width) if isinstance(op, Dropout) else None)
            if isinstance(op, Linear):  # the operations after it change this derivative in place
                self.deltas.append(like.new_empty(capacity, width))
        self.ones = like.new_ones(capacity)
        self._rows: dict[int, _Rows] = {}

    def rows(self, b: int) -> _Rows:
        found = self._rows.get(b)
        if found is None:
            if len(self._rows) > 64:  # batch sizes that adapt would otherwise leave views behind for ever
                self._rows.clear()
            found = self._rows[b] = _Rows(self, b)
        return found


def _may_overwrite(before: Operation, op: Operation) -> bool:
    if isinstance(op, Linear) or (isinstance(op, Elementwise) and op.keeps_input):
        return False
    return not isinstance(before, Elementwise) or before.keeps_input


class Chain:
    """Linear layers, activations and a loss, stepped without autograd."""

    def __init__(self, module: nn.Module, ops: list[Operation], flattens: bool, loss: Loss) -> None:
        self._module = module
        self._ops = ops
        self._flattens = flattens
        self._loss = loss
        self._linears = [op for op in ops if isinstance(op, Linear)]
        self._trains = {name: p.requires_grad for name, p in module.named_parameters()}
        self._space: _Workspaces | None = None
        self._captured: list[_Workspaces] = []
        self._small: ModuleType | None = None
        self._compiled = False
        self.listener: Listens | None = None
        """Told every layer's input and its output's derivative; compiled steps and loops keep these to themselves."""
        self.steps: Steps | None = None
        """Compiled steps, after `fuse`, where they fit."""
        self.parameters: dict[str, Tensor] = {}
        self.bind()

    @classmethod
    def of(cls, module: nn.Module, loss: object) -> tuple[Chain | None, str]:
        """The chain for a module and a loss with a sentence about it; None, and why, when they are none."""
        try:
            ops, flattens = operations(module)
            chain = cls(module, ops, flattens, loss_of(loss))
        except NotAChainError as error:
            return None, f"autograd computes the gradients: {error}"
        return (
            chain,
            f"{len(chain._linears)} Linear layers and {chain._loss.name}, stepped in place without autograd",
        )

    def clone(self) -> Chain:
        """Another chain over the same parameters with workspaces of its own, for another thread."""
        other = Chain(self._module, self._ops, self._flattens, self._loss)
        other._small, other._compiled = self._small, self._compiled
        return other.bind(self.parameters)

    def bind(self, parameters: Mapping[str, Tensor] | None = None) -> Chain:
        """Name the tensors that hold the weights: the module's own, or others of the same shapes."""
        own = {name: p.detach() for name, p in self._module.named_parameters()}
        chosen = own if parameters is None else {name: parameters[name].detach() for name in own}
        for name, tensor in chosen.items():
            if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                raise ModelError(
                    f"the tensor bound as {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                    f"and the module's is {own[name].dtype} of shape {tuple(own[name].shape)}"
                )
        self.parameters = chosen
        self.products, self.why_products = products_for(next(iter(chosen.values())))
        self._space = None
        self._arrays = self._numpy() if self._small is not None else []
        self.steps = self._steps()[0] if self._compiled else None
        return self

    @property
    def first_weight(self) -> str:
        """The name of the first layer's weights."""
        return self._linears[0].weight

    def fits_compiled(self) -> tuple[bool, str]:
        """Whether `fuse` would compile whole steps, and a sentence about it."""
        steps, why = self._steps()
        return steps is not None, why

    def _steps(self) -> tuple[Steps | None, str]:
        return Steps.of(self._ops, self._loss, all(self._trains.values()), self.parameters)

    def fuse(self) -> str:
        """Compile plain steps where that can be done; a sentence about what was.

        Whole steps of float32 chains with common activations and losses; else loops for one or two rows. Compiling
        takes some seconds on a machine that never did it, so the caller decides whether the run is long
        enough. Sums are rounded in another order than the matrix products'.
        """
        self.steps, why = self._steps()
        if self.steps is not None:
            self._compiled = True
            return why
        plain = all(
            op.bias is not None and self._trains[op.weight] and self._trains[op.bias] for op in self._linears
        )
        tensors = self.parameters.values()
        if not plain or not all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
            return "no compiled loops for one or two rows: they need trained biases in CPU memory"
        try:
            from headrace.engine import chain_small
        except ImportError:
            return "no compiled loops for one or two rows: numba is not installed"
        chain_small.compile_for(str(next(iter(tensors)).dtype).removeprefix("torch."))
        self._small, self._arrays = chain_small, self._numpy()
        return "steps on one or two rows use compiled loops"

    def intra_op_threads(self, batch: int, cores: int) -> int:
        """How many threads one step is worth: all cores for large products, one below.

        On two cores a second thread brought 1.4 × at 2e8 operations a step, 1.05 × at 5e7 and nothing at 1e7.
        """
        operations = 6.0 * batch * sum(op.features_in * op.features_out for op in self._linears)
        return cores if operations >= 1.5e8 else 1

    def forward(self, x: Tensor) -> Tensor:
        """The module's outputs, valid until the next call."""
        x_bd, rows = self._prepare(x)
        return self._forward(x_bd, rows)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss as a 0-dim tensor."""
        return self._loss.value(self.forward(x), y)

    def step(self, x: Tensor, y: Tensor, lr: float, weight_decay: float = 0.0) -> Tensor:
        """One step of plain SGD on one batch, in place; returns the mean loss before it (0-dim tensor)."""
        if self.steps is not None and self.listener is None and self.steps.takes(x, y):
            loss = self.steps.step(x, y, lr, 1.0 - lr * weight_decay)
            if loss is not None:
                return loss
        x_bd, rows = self._prepare(x)
        small = self._small is not None and self.listener is None and not weight_decay
        if small and len(x_bd) <= self._small.ROWS:  # type: ignore[union-attr]
            return self._step_small(x_bd, y, rows, lr)
        z_bc = self._forward(x_bd, rows)
        loss = self._loss.derive(z_bc, y, rows.deltas[-1])
        keep, alpha = 1.0 - lr * weight_decay, -lr * self._loss.scale(z_bc)
        for op, delta_cb, taken in self._backward(x_bd, rows):
            if self.listener is not None:
                self.listener.take(op.weight, delta_cb, taken)
            if self._trains[op.weight]:
                self.products.update(self.parameters[op.weight], delta_cb, taken, keep, alpha)
            if op.bias is not None and self._trains[op.bias]:
                self.parameters[op.bias].addmv_(delta_cb, rows.ones, beta=keep, alpha=alpha)
        if self.listener is not None:
            self.listener.end(self._loss.scale(z_bc))
        return loss

    def gradient(self, x: Tensor, y: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
        """Write the gradient of the mean loss into ``grads``, by parameter name; returns the mean loss."""
        x_bd, rows = self._prepare(x)
        z_bc = self._forward(x_bd, rows)
        loss = self._loss.derive(z_bc, y, rows.deltas[-1])
        alpha = self._loss.scale(z_bc)
        for op, delta_cb, taken in self._backward(x_bd, rows):
            if self.listener is not None:
                self.listener.take(op.weight, delta_cb, taken)
            if self._trains[op.weight]:
                self.products.gradient(grads[op.weight], delta_cb, taken, alpha)
            if op.bias is not None and self._trains[op.bias]:
                into = grads[op.bias]
                torch.addmv(into, delta_cb, rows.ones, beta=0, alpha=alpha, out=into)
        if self.listener is not None:
            self.listener.end(alpha)
        return loss

    def _prepare(self, x: Tensor) -> tuple[Tensor, _Rows]:
        """The batch as a matrix, and workspaces for it."""
        x_bd = x.reshape(x.shape[0], -1) if self._flattens else x
        first = self._linears[0]
        weight = self.parameters[first.weight]
        if x_bd.dim() != 2 or x_bd.shape[1] != first.features_in or not len(x_bd):
            raise DataError(
                f"the batch has shape {tuple(x.shape)}, "
                f"and {first.weight} takes rows of {first.features_in} numbers"
            )
        if x_bd.dtype != weight.dtype:
            raise DataError(
                f"the batch is {x_bd.dtype} and the module's parameters are {weight.dtype}; "
                f"convert the batch with .to({weight.dtype})"
            )
        b = len(x_bd)
        if self._space is None or self._space.capacity < b:
            if self._space is not None and weight.is_cuda:
                self._captured.append(self._space)  # a CUDA graph may still write there
            self._space = _Workspaces(self._ops, weight, b)
        return x_bd, self._space.rows(b)

    def _forward(self, x_bd: Tensor, rows: _Rows) -> Tensor:
        z = x_bd
        for op, out, mask in zip(self._ops, rows.outs, rows.masks, strict=True):
            if isinstance(op, Linear):
                bias = None if op.bias is None else self.parameters[op.bias]
                self.products.outputs(z, self.parameters[op.weight], bias, out)
            else:
                self._apply(op, z, out, mask)
            z = out
        return z

    def _apply(self, op: Operation, z: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """The elementwise operation ``op`` on ``z``, into ``out``, which may be ``z``."""
        if isinstance(op, Elementwise):
            op.forward(z, out)
        elif isinstance(op, Dropout) and op.active:
            assert mask is not None
            op.draw(mask)
            torch.mul(z, mask, out=out)
        elif out.data_ptr() != z.data_ptr():
            out.copy_(z)

    def _backward(self, x_bd: Tensor, rows: _Rows) -> Iterator[tuple[Linear, Tensor, Tensor]]:
        """Each Linear from the last to the first, with its output's derivative (transposed) and its input.

        The derivative is carried to the layer below before the caller, who may update the weights, gets the
        layer: the other order would differentiate through weights that have already moved.
        """
        layer = len(self._linears) - 1
        for number in range(len(self._ops) - 1, -1, -1):
            op = self._ops[number]
            if not isinstance(op, Linear):
                self._derive(number, op, rows.deltas[layer], x_bd, rows)
                continue
            if layer > 0:  # nobody asks for the derivative with respect to the batch
                self.products.inputs(rows.deltas[layer], self.parameters[op.weight], rows.deltas[layer - 1])
            yield op, rows.transposed[layer], rows.outs[number - 1] if number else x_bd
            if layer == 0:
                return
            layer -= 1

    def _derive(self, number: int, op: Operation, delta: Tensor, x_bd: Tensor, rows: _Rows) -> None:
        """Multiply ``delta`` by the derivative of the elementwise operation ``number``."""
        if isinstance(op, Elementwise):
            taken = rows.outs[number - 1] if number else x_bd
            op.backward(delta, taken if op.keeps_input else rows.outs[number])
        elif isinstance(op, Dropout) and op.active:
            mask = rows.masks[number]
            assert mask is not None
            delta.mul_(mask)

    def _numpy(self) -> list[tuple[Any, Any]]:
        """Weights and biases of the Linear layers as numpy arrays over the same memory."""
        pairs = [(self.parameters[op.weight], self.parameters[op.bias or ""]) for op in self._linears]
        return [(weight.numpy(), bias.numpy()) for weight, bias in pairs]

    def _step_small(self, x_bd: Tensor, y: Tensor, rows: _Rows, lr: float) -> Tensor:
        """`step` through the compiled loops of `chain_small`."""
        assert self._small is not None
        if rows.arrays is None:
            rows.arrays = [out.numpy() for out in rows.outs], [delta.numpy() for delta in rows.deltas]
        outs, deltas = rows.arrays
        x = x_bd.contiguous().numpy()
        z_bc = self._forward_small(x_bd, x, outs, rows)
        loss = self._loss.derive(z_bc, y, rows.deltas[-1])
        alpha = x.dtype.type(-lr * self._loss.scale(z_bc))
        backward = self._small.backward_and_update_one if len(x) == 1 else self._small.backward_and_update
        layer = len(self._linears) - 1
        for number in range(len(self._ops) - 1, -1, -1):
            op = self._ops[number]
            if not isinstance(op, Linear):
                self._derive(number, op, rows.deltas[layer], x_bd, rows)
                continue
            weight, bias = self._arrays[layer]
            taken = outs[number - 1] if number else x
            if layer == 0:
                self._small.update(weight, bias, deltas[0], taken, alpha)
                break
            backward(weight, bias, deltas[layer], taken, deltas[layer - 1], alpha)
            layer -= 1
        return loss

    def _forward_small(self, x_bd: Tensor, x: Any, outs: list[Any], rows: _Rows) -> Tensor:
        assert self._small is not None
        z, layer = x_bd, 0
        for number, op in enumerate(self._ops):
            if isinstance(op, Linear):
                self._small.forward(*self._arrays[layer], outs[number - 1] if number else x, outs[number])
                layer += 1
            else:
                self._apply(op, z, rows.outs[number], rows.masks[number])
            z = rows.outs[number]
        return z
