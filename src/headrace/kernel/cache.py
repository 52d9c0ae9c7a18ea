"""The whole kernel matrix, kept when it fits: later epochs then cost one pass over memory.

It is symmetric, so only the blocks on and above the diagonal are computed; the others are their transposes.
Kept in half precision it is read as such and multiplied in float32: weights in half precision would stall
training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernel.operands import slice_rows, take_rows
from headrace.kernel.products import FUSED_OUTPUTS, KernelProduct, by_columns, times
from headrace.kernel.rows import Rows, numbers
from headrace.kernel.tiles import chosen

BUILD_ROWS = 512
PADDED = 64
MIRROR_WIDTH = 200
"""Operands at least so wide are mirrored. Measured on one core: transposing costs 4 ns a value, computing it
anew about 1 + 2·width/130 ns.
"""


class KernelCache:
    """K of the centres with themselves."""

    def __init__(self, product: KernelProduct, dtype: torch.dtype) -> None:
        n = product.rows
        self.product = product
        # The fused kernels load 16 bytes at once, so rows begin at multiples of that; what is beyond is zero.
        width = -(-n // PADDED) * PADDED if product.fused else n
        self.padded = torch.empty(n, width, dtype=dtype, device=product.operands.device)
        self.padded[:, n:] = 0
        self.matrix_nn = self.padded[:, :n]
        self._build()

    def _build(self) -> None:
        n, product, matrix = self.product.rows, self.product, self.matrix_nn
        if product.fused:
            from headrace.kernel.fused import kernel_block

            tiles, packed = chosen(matrix.device).block, product.packed()
            assert tiles is not None
            # Twice the operations that symmetry would need, and no pass over the matrix beside them.
            kernel_block(product.operands.kernel.code, packed, packed, matrix, tiles)
            return
        columns = max(1, product.block_values // BUILD_ROWS)
        mirrored = product.right_pk.shape[1] >= MIRROR_WIDTH
        for start in range(0, n, BUILD_ROWS):
            stop = min(n, start + BUILD_ROWS)
            left = product.operands.left(slice_rows(product.right_pk, start, stop))
            for low in range(start if mirrored else 0, n, columns):
                high = min(n, low + columns)
                # In a block that stays in the processor's cache; rows of the matrix lie far apart.
                block = product.evaluate(left, low, high, product.buffer("block", stop - start, high - low))
                matrix[start:stop, low:high] = block
                if mirrored and high > stop:
                    beyond = max(low, stop)
                    # While the block is still in the processor's cache.
                    matrix[beyond:high, start:stop] = block[:, beyond - low :].T

    def reads_rows(self, outputs: int) -> bool:
        """Whether products read rows by their numbers, with no copy of the block."""
        return self.product.fused and outputs <= FUSED_OUTPUTS and self.padded.dtype == torch.float16

    def values(self, rows: Rows, weights_nc: Tensor) -> Tensor:
        """K[rows, :]·weights."""
        if self.reads_rows(weights_nc.shape[1]):
            from headrace.kernel.fused import half_multiply

            return half_multiply(self.padded, numbers(rows, self.padded), weights_nc)
        block = self.matrix_nn[rows]
        if block.dtype == weights_nc.dtype:
            return times(block, weights_nc)
        result = torch.zeros(block.shape[0], weights_nc.shape[1], dtype=weights_nc.dtype, device=block.device)
        total = by_columns(result)
        step = max(1, self.product.block_values // max(1, block.shape[0]))
        for low in range(0, block.shape[1], step):
            piece = self.product.buffer("block", block.shape[0], min(step, block.shape[1] - low))
            total.addmm_(piece.copy_(block[:, low : low + step]), weights_nc[low : low + step])
        return result if total is result else result.add_(total)

    def head(self, rows: Rows, samples: int) -> Tensor:
        """K[rows, S], in the precision of the operands."""
        if self.product.fused and self.padded.dtype == torch.float16:
            from headrace.kernel.fused import half_head

            return half_head(self.padded, numbers(rows, self.padded), samples)
        return self.matrix_nn[rows, :samples].to(self.product.operands.dtype)


def left_rows(product: KernelProduct, rows: slice) -> Tensor:
    """The left operand of some of the product's own centres."""
    return product.operands.left(take_rows(product.right_pk, rows))
