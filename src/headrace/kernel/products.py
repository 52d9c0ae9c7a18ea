"""Kernel products in blocks: f = K(B, Z)·A without ever holding more of K than a block.

A block is m × ``block_rows`` values, chosen to stay in the CPU's second-level cache, where the passes that
turn distances into kernel values cost little beside the product. On CUDA a fused Triton kernel does the same
in registers. Scratch memory is allocated once and reused by every block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernel.operands import Operands, slice_rows
from headrace.kernel.tiles import chosen

CPU_BLOCK_VALUES = 1 << 20
"""Values per block on the CPU: 4 MB in float32. Measured: 2^19 to 2^21 are alike, beyond it slows down."""
CUDA_BLOCK_VALUES = 1 << 27
FUSED_OUTPUTS = 64
"""Up to so many outputs the product is part of the fused kernel."""


def times(block_mn: Tensor, weights_nc: Tensor) -> Tensor:
    """block·weights. With 2 to 15 columns the CPU's library is 2 to 4 times as fast at the transpose."""
    if block_mn.device.type != "cpu":
        return torch.mm(block_mn, weights_nc)
    return torch.mm(weights_nc.T, block_mn.T).T.contiguous()


def by_columns(like_mc: Tensor) -> Tensor:
    """Where to add up such products: zeros that lie column by column on the CPU, ``like`` itself elsewhere."""
    if like_mc.device.type != "cpu":
        return like_mc
    return torch.zeros_like(like_mc.T, memory_format=torch.contiguous_format).T


class KernelProduct:
    """Products of one kernel with fixed centres on one device."""

    def __init__(
        self,
        operands: Operands,
        right_pk: Tensor,
        *,
        block_values: int | None = None,
        fused: bool = False,
        compiled: bool = False,
    ) -> None:
        self.operands = operands
        self.right_pk = right_pk
        on_cuda = operands.device.type == "cuda"
        self.block_values = block_values or (CUDA_BLOCK_VALUES if on_cuda else CPU_BLOCK_VALUES)
        self.fused = fused and right_pk.layout == torch.strided
        self.compiled = compiled
        """Kernel values in one compiled pass, where it fits."""
        self._buffers: dict[str, Tensor] = {}
        self._packed: tuple[Tensor, Any] | None = None

    @property
    def rows(self) -> int:
        return int(self.right_pk.shape[0])

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """A reusable block; what it held is lost."""
        need = rows * columns
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < need:
            self._buffers.pop(name, None)  # before the larger one is allocated, not after
            flat = torch.empty(need, dtype=self.operands.dtype, device=self.operands.device)
            self._buffers[name] = flat
        return flat[:need].view(rows, columns)

    def evaluate(self, left_mk: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """K(left, centres [start, stop)) into ``out``, block by block."""
        if self.fused:
            from headrace.kernel.fused import kernel_block, pack_left

            tiles = chosen(out.device).block
            assert tiles is not None
            right = self.packed().part(start, stop)
            return kernel_block(self.operands.kernel.code, pack_left(left_mk), right, out, tiles)
        m = left_mk.shape[0]
        step = max(1, min(stop - start, self.block_values // max(1, m)))
        for low in range(start, stop, step):
            high = min(stop, low + step)
            target = out[:, low - start : high - start]
            scratch = self._scratch(m, high - low)
            right = slice_rows(self.right_pk, low, high)
            self.operands.evaluate(left_mk, right, target, scratch, compiled=self.compiled)
        return out

    def packed(self) -> Any:
        """The centres as the fused kernels read them."""
        if self._packed is None or self._packed[0] is not self.right_pk:
            from headrace.kernel.fused import pack_right

            self._packed = None  # before the new one is allocated
            self._packed = (self.right_pk, pack_right(self.right_pk))
        return self._packed[1]

    def multiply(self, left_mk: Tensor, weights_pc: Tensor, keep_ms: Tensor | None = None) -> Tensor:
        """K(left, centres)·weights; the first columns of K are left in ``keep_ms`` when it is given."""
        m = left_mk.shape[0]
        kept = 0 if keep_ms is None else keep_ms.shape[1]
        if keep_ms is not None:
            self.evaluate(left_mk, 0, kept, keep_ms)
            result = times(keep_ms, weights_pc[:kept])
        else:
            result = torch.zeros(m, weights_pc.shape[1], dtype=weights_pc.dtype, device=weights_pc.device)
        if kept == self.rows:
            return result
        if self.fused and weights_pc.shape[1] <= FUSED_OUTPUTS:
            from headrace.kernel.fused import fused_multiply, pack_left

            tiles = chosen(result.device).multiply
            assert tiles is not None
            right = self.packed().part(kept, self.rows)
            return fused_multiply(
                self.operands.kernel.code, pack_left(left_mk), right, weights_pc[kept:], result, tiles
            )
        return self._accumulate(left_mk, weights_pc, kept, self.rows, result)

    def multiply_head(self, left_mk: Tensor, weights_sc: Tensor) -> Tensor:
        """K(left, first centres)·weights, for as many centres as there are weights."""
        m, (s, c) = left_mk.shape[0], weights_sc.shape
        result = torch.zeros(m, c, dtype=weights_sc.dtype, device=weights_sc.device)
        return self._accumulate(left_mk, weights_sc, 0, s, result)

    def _accumulate(
        self, left_mk: Tensor, weights_pc: Tensor, start: int, stop: int, result: Tensor
    ) -> Tensor:
        m = left_mk.shape[0]
        step = max(1, min(stop - start, self.block_values // max(1, m)))
        total = by_columns(result)
        for low in range(start, stop, step):
            high = min(stop, low + step)
            block = self.evaluate(left_mk, low, high, self.buffer("block", m, high - low))
            total.addmm_(block, weights_pc[low:high])
        return result if total is result else result.add_(total)

    def predict(self, rows: Any, weights_pc: Tensor, batch: int) -> Tensor:
        """f(rows) for any number of rows, ``batch`` at a time; the answer lies on the CPU."""
        n = rows.shape[0]
        out = torch.zeros(n, weights_pc.shape[1], dtype=weights_pc.dtype)
        for start in range(0, n, batch):
            right = self.operands.right(rows[start : start + batch])
            out[start : start + batch] = self.multiply(self.operands.left(right), weights_pc)
        return out

    def _scratch(self, m: int, columns: int) -> Tensor | None:
        if self.fused or not self.operands.kernel.needs_scratch:
            return None
        return self.buffer("scratch", m, columns)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {}, "_packed": None}
