"""The tables and workspaces that `chain_kernel` works on, for one chain in one thread.

`Steps.of` says whether a chain fits: float32 in contiguous CPU memory, all parameters trained, at most one of
ReLU, LeakyReLU, Sigmoid and Tanh behind each Linear, and cross_entropy on labels, mse or bce.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.chain_losses import BCE, CROSS_ENTROPY, MSE, Loss
from headrace.engine.chain_ops import Elementwise, Linear, Operation

SCRATCH = 8192
"""Numbers of memory for odd ends: the widest layer a single row's first derivative is dropped into."""


class Steps:
    """One chain's steps through compiled code; belongs to one thread."""

    def __init__(
        self,
        kernel: Any,
        linears: list[Linear],
        activations: list[tuple[int, float]],
        loss: int,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.kernel = kernel
        self._linears = linears
        self._parameters = dict(parameters)
        self.loss = loss
        self.sparse = by_feature(parameters[linears[0].weight])
        """Whether the first layer takes CSR rows: its weights lie feature by feature."""
        self.slopes = np.array([slope for _, slope in activations], np.float32)
        self.layers = np.zeros((len(linears), kernel.LAYER_COLUMNS), np.int64)
        self._memory: list[NDArray[np.float32]] = []
        self._capacity = 0
        sizes = [size for op in linears for size in (op.features_in, op.features_out)]
        self.scratch = self._room(max(SCRATCH, *sizes))
        zeros = self._room(max(op.features_out for op in linears))
        for row, op, (kind, _) in zip(self.layers, linears, activations, strict=True):
            bias = self._parameters[op.bias].data_ptr() if op.bias is not None else zeros
            row[kernel.IN], row[kernel.OUT] = op.features_in, op.features_out
            row[kernel.WEIGHT], row[kernel.BIAS] = self._parameters[op.weight].data_ptr(), bias
            row[kernel.ACTIVATION], row[kernel.TRAINED] = kind, op.bias is not None
        self._fixed = list(self._memory)

    @classmethod
    def of(
        cls, ops: Sequence[Operation], loss: Loss, trained: bool, parameters: Mapping[str, Tensor]
    ) -> tuple[Steps | None, str]:
        """The steps with a sentence about them, or None and why not."""
        found = _layers(ops)
        kinds = {CROSS_ENTROPY: 0, MSE: 1, BCE: 2}
        if found is None:
            return (
                None,
                "not compiled: its layers are not Linear with at most one ReLU, LeakyReLU, Sigmoid or Tanh",
            )
        if loss not in kinds:
            return None, f"not compiled: {loss.name} is none of cross_entropy, mse and bce"
        if not trained or not all(
            t.device.type == "cpu" and t.dtype == torch.float32 and (t.is_contiguous() or by_feature(t))
            for t in parameters.values()
        ):
            return None, "not compiled: this takes trained float32 parameters in contiguous CPU memory"
        try:
            from headrace.engine import chain_kernel
        except ImportError:
            return None, "not compiled: numba is not installed (pip install headrace[topics])"
        linears, activations = found
        if any(by_feature(parameters[op.weight]) for op in linears[1:]):
            return None, "not compiled: only the first layer's weights may lie feature by feature"
        return cls(chain_kernel, linears, activations, kinds[loss], parameters), "compiled steps"

    def takes(self, x: Tensor, y: Tensor) -> bool:
        """Whether columns (or batches) can be read as they lie."""
        plain = x.layout == y.layout == torch.strided and x.is_contiguous() and y.is_contiguous()
        if (
            self.sparse
            or not plain
            or x.dtype != torch.float32
            or x.device.type != "cpu"
            or len(x) != len(y)
            or not len(x)
        ):
            return False
        return x.numel() // len(x) == self._linears[0].features_in and self._takes_target(y)

    def takes_csr(self, values: Tensor, width: int, y: Tensor) -> bool:
        """Whether a CSR column's parts, and this target, can be read as they lie."""
        fits = values.dtype == torch.float32 and values.is_contiguous() and y.is_contiguous()
        return self.sparse and fits and width == self._linears[0].features_in and self._takes_target(y)

    def _takes_target(self, y: Tensor) -> bool:
        if self.loss == 0:
            return y.dtype == torch.int64 and y.dim() == 1
        return y.dtype == torch.float32 and y.shape == (len(y), self._linears[-1].features_out)

    def reserve(self, batch: int) -> None:
        """Make room for batches of so many rows."""
        if batch <= self._capacity:
            return
        self._capacity, self._memory = batch, list(self._fixed)
        k, pad, layers = self.kernel, -(-batch // 16) * 16, self.layers
        first = 1 if self.sparse else 0  # CSR rows are never made dense
        if not self.sparse:
            layers[0, k.TAKEN] = self._room(self._linears[0].features_in * pad)
        for n, op in enumerate(self._linears):
            if n >= first:
                layers[n, k.PANELS] = self._room(-(-op.features_in // k.PANEL) * k.PANEL * pad)
            layers[n, k.GIVEN] = layers[n, k.DELTA] = self._room(op.features_out * pad)
            if n + 1 < len(layers):
                layers[n + 1, k.TAKEN] = layers[n, k.GIVEN]
                layers[n, k.DELTA] = self._room(op.features_out * pad)

    def step(self, x: Tensor, y: Tensor, lr: float, keep: float) -> Tensor | None:
        """One step on a batch; None when a label is out of range and nothing was changed."""
        self.reserve(len(x))
        loss = self.kernel.step(
            self.layers,
            self.slopes,
            self.loss,
            self.scratch,
            *(0, 0, x.data_ptr(), y.data_ptr(), 0, 0, len(x)),
            *(float(lr), np.float32(keep)),
        )
        return None if self.loss == 0 and loss == -1.0 else torch.tensor(loss, dtype=torch.float32)

    def _room(self, numbers: int) -> int:
        """The address of so many zeros, at the start of a cache line."""
        memory = np.zeros(numbers + 32, np.float32)
        self._memory.append(memory)
        return memory.ctypes.data + (-memory.ctypes.data) % 64


def by_feature(weight: Tensor) -> bool:
    """Whether a matrix of weights lies in memory input by input instead of output by output."""
    return weight.dim() == 2 and weight.t().is_contiguous() and not weight.is_contiguous()


def _layers(ops: Sequence[Operation]) -> tuple[list[Linear], list[tuple[int, float]]] | None:
    """Linear layers, and for each the activation behind it: its number in the kernel, and a slope."""
    linears: list[Linear] = []
    activations: list[tuple[int, float]] = []
    numbers = {"relu": 1, "sigmoid": 2, "tanh": 3, "leaky_relu": 4}
    for before, op in itertools.pairwise([None, *ops]):
        if isinstance(op, Linear):
            linears.append(op)
            activations.append((0, 0.0))
        elif isinstance(op, Elementwise) and op.name in numbers and isinstance(before, Linear):
            if op.keeps_input:
                return None
            activations[-1] = (numbers[op.name], op.slope)
        else:
            return None
    return linears, activations
