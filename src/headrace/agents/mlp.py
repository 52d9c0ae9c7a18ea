"""A multilayer perceptron for policy and value, written out by hand in NumPy: for small networks on the CPU.

A 64-unit layer on eight observations is two microseconds of arithmetic; in a framework, dispatch and autograd around
it cost twenty times that. Here a forward pass is one `matmul` and one activation per layer into memory that was
allocated once, and a backward pass is as short.

Layout. All parameters lie in one flat float32 vector ``theta``, all gradients in ``grad``, both owned here.
Policy and value are two *branches* of the same widths (one, when they share layers) and run as one batched product.
Biases are the last row of each weight, and activations carry a last column of ones that nothing overwrites, so
there is no separate bias arithmetic. Shapes: B branches, m rows (steps × environments), d inputs, h units.

The activations of acting are kept: as long as the parameters did not change since, learning needs no second
forward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Activations:
    """What a forward pass leaves behind, for ``rows`` rows."""

    def __init__(self, net: Mlp, rows: int) -> None:
        self.x = np.ones((1, rows, net.width + 1), np.float32)
        self.layers = [np.ones((net.branches, rows, h + 1), np.float32) for h in net.hidden]
        self.out = np.zeros((rows, net.n_out), np.float32)
        self.values = np.zeros((rows, 1), np.float32)

    def rows(self, start: int, stop: int) -> Activations:
        """The same memory, seen as these rows only."""
        part = object.__new__(Activations)
        part.x = self.x[:, start:stop]
        part.layers = [layer[:, start:stop] for layer in self.layers]
        part.out, part.values = self.out[start:stop], self.values[start:stop]
        return part


class Mlp:
    """Parameters, gradients, and the two passes."""

    def __init__(
        self, width: int, hidden: tuple[int, ...], n_out: int, n_extra: int, shared: bool, activation: str
    ) -> None:
        self.width, self.hidden, self.n_out = width, hidden, n_out
        self.branches = 1 if shared else 2
        self.activation = activation
        inputs = (width, *hidden[:-1])
        shapes: list[tuple[int, ...]] = [
            (self.branches, i + 1, h) for i, h in zip(inputs, hidden, strict=True)
        ]
        shapes += [(hidden[-1] + 1, n_out), (hidden[-1] + 1, 1), (n_extra,)]
        total = sum(int(np.prod(shape)) for shape in shapes)
        self.theta = np.zeros(total, np.float32)
        self.grad = np.zeros(total, np.float32)
        *self.weights, self.w_out, self.w_value, self.extra = _views(self.theta, shapes)
        *self.g_weights, self.g_out, self.g_value, self.g_extra = _views(self.grad, shapes)
        self._act = np.tanh if activation == "tanh" else _relu

    def start(self, generator: torch.Generator) -> None:
        """Orthogonal weights, zero biases; the policy's last layer small, so that it starts undecided."""
        gain = 2.0**0.5
        for weight in self.weights:
            for branch in weight:
                branch[:-1] = _orthogonal(branch[:-1], gain, generator)
        self.w_out[:-1] = _orthogonal(self.w_out[:-1], 0.01, generator)
        self.w_value[:-1] = _orthogonal(self.w_value[:-1], 1.0, generator)

    def plan(self, acts: Activations) -> list[tuple[Array, Array, Array, Array]]:
        """The views that `forward` needs, made once for a part of memory that is used again and again."""
        steps, x = [], acts.x
        for weight, layer in zip(self.weights, acts.layers, strict=True):
            steps.append((x, weight, layer[..., :-1], layer))
            x = layer
        return steps

    def forward(self, acts: Activations, plan: list[tuple[Array, Array, Array, Array]] | None = None) -> None:
        """Fill in everything after ``acts.x``."""
        top = acts.x
        for x, weight, inner, top in plan or self.plan(acts):  # noqa: B007
            np.matmul(x, weight, out=inner)
            self._act(inner, out=inner)
        np.matmul(top[0], self.w_out, out=acts.out)
        np.matmul(top[-1], self.w_value, out=acts.values)

    def backward(self, acts: Activations, d_out: Array, d_values: Array) -> None:
        """Gradients of a loss whose derivatives with respect to ``out`` and ``values`` are given, into ``grad``.

        ``g_extra`` is left to the caller.
        """
        top = acts.layers[-1]
        np.matmul(top[0].T, d_out, out=self.g_out)
        np.matmul(top[-1].T, d_values, out=self.g_value)
        from_out = d_out @ self.w_out[:-1].T
        from_value = d_values @ self.w_value[:-1].T
        d = (from_out + from_value)[None] if self.branches == 1 else np.stack((from_out, from_value))
        for i in range(len(self.hidden) - 1, -1, -1):
            inner = acts.layers[i][..., :-1]
            d *= (1.0 - inner * inner) if self.activation == "tanh" else (inner > 0)
            below = acts.layers[i - 1] if i else acts.x
            np.matmul(below.transpose(0, 2, 1), d, out=self.g_weights[i])
            if i:
                d = np.matmul(d, self.weights[i][:, :-1].transpose(0, 2, 1))

    def to_named(self) -> dict[str, Array]:
        """Copies of the parameters under the names and in the layout of the torch network of the same shape."""
        named: dict[str, Array] = {}
        branches = ("body",) if self.branches == 1 else ("policy_body", "value_body")
        for i, weight in enumerate(self.weights):
            for name, block in zip(branches, weight, strict=True):
                _put(named, f"{name}.{2 * i}", block)
        _put(named, "policy_head", self.w_out)
        _put(named, "value_head", self.w_value)
        if self.extra.size:
            named["log_std"] = self.extra.copy()
        return named

    def from_named(self, named: dict[str, Array]) -> None:
        """Take over parameters that `to_named` gave."""
        branches = ("body",) if self.branches == 1 else ("policy_body", "value_body")
        for i, weight in enumerate(self.weights):
            for name, block in zip(branches, weight, strict=True):
                _take(named, f"{name}.{2 * i}", block)
        _take(named, "policy_head", self.w_out)
        _take(named, "value_head", self.w_value)
        if self.extra.size:
            self.extra[:] = named["log_std"]


def _relu(x: Array, out: Array) -> Array:
    return np.maximum(x, 0.0, out=out)


def _views(flat: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    views, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        views.append(flat[start : start + size].reshape(shape))
        start += size
    return views


def _orthogonal(like: Array, gain: float, generator: torch.Generator) -> Array:
    rows, columns = like.shape
    weight = torch.empty(columns, rows)
    torch.nn.init.orthogonal_(weight, gain, generator=generator)
    transposed: Array = weight.numpy().T
    return transposed


def _put(named: dict[str, Array], name: str, block: Array) -> None:
    named[f"{name}.weight"] = np.array(block[:-1].T, order="C")
    named[f"{name}.bias"] = block[-1].copy()


def _take(named: dict[str, Array], name: str, block: Array) -> None:
    block[:-1] = named[f"{name}.weight"].T
    block[-1] = named[f"{name}.bias"]
