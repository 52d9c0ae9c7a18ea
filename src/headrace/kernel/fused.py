"""Triton kernels: distance → kernel value → product in one pass, with no block of K in memory.

Three of them. `fused_multiply` (few outputs): a program owns a tile of rows and walks over all centres,
computes the squared distances on the tensor cores, turns them into kernel values in registers and multiplies
by the weights. `kernel_block` (many outputs): writes a tile of kernel values, for the matrix library to
multiply. `half_multiply` reads a kernel matrix kept in float16 and multiplies it in float32 (TF32 on the
tensor cores).

Inputs are the operands of `operands.py`, whose last two columns carry the norms in float32; only the
features go through the tensor cores. Radial kernels only; the others take the torch path.

Tested against torch by Triton's interpreter on the CPU (tests/kernel/test_fused.py). Not yet run on a GPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernel.operands import Operands

TILE_M, TILE_N, TILE_D = 64, 64, 32
"""A guess for Hopper; benchmarks/bench_kernel_gpu.py sweeps them."""
MOST_OUTPUTS = 64


@triton.jit
def _kernel_value(t, CODE: tl.constexpr):
    t = tl.maximum(t, 0.0)
    if CODE == 0:
        value = tl.exp(-t)
    elif CODE == 1:
        value = tl.exp(-tl.sqrt(t))
    elif CODE == 2:
        value = 1.0 / (1.0 + t)
    elif CODE == 3:
        r = tl.sqrt(t)
        value = (1.0 + r) * tl.exp(-r)
    else:
        r = tl.sqrt(t)
        value = (1.0 + r + t * (1.0 / 3.0)) * tl.exp(-r)
    return value


@triton.jit
def _distances(
    left,
    right,
    rows_m,
    rows_n,
    M,
    N,
    D,
    stride_l,
    stride_r,
    PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # rows are int64: a row number times a stride may exceed 2^31
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for low in range(0, D, TILE_D):
        columns = low + tl.arange(0, TILE_D)
        a = tl.load(
            left + rows_m[:, None] * stride_l + columns[None, :],
            mask=(rows_m[:, None] < M) & (columns[None, :] < D),
            other=0.0,
        )
        b = tl.load(
            right + rows_n[None, :] * stride_r + columns[:, None],
            mask=(rows_n[None, :] < N) & (columns[:, None] < D),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    left_norm = tl.load(left + rows_m * stride_l + D + 1, mask=rows_m < M, other=0.0)
    right_norm = tl.load(right + rows_n * stride_r + D, mask=rows_n < N, other=0.0)
    return total + left_norm[:, None] + right_norm[None, :]


@triton.jit
def _multiply_kernel(
    left,
    right,
    weights,
    out,
    M,
    N,
    D,
    C,
    stride_l,
    stride_r,
    stride_w,
    stride_o,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_C: tl.constexpr,
    SPLITS: tl.constexpr,
):
    rows_m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    outputs = tl.arange(0, TILE_C)
    result = tl.zeros((TILE_M, TILE_C), dtype=tl.float32)
    for low in range(tl.program_id(1) * TILE_N, N, TILE_N * SPLITS):
        rows_n = tl.full((), low, tl.int64) + tl.arange(0, TILE_N)
        t = _distances(
            left, right, rows_m, rows_n, M, N, D, stride_l, stride_r, PRECISION, TILE_M, TILE_N, TILE_D
        )
        value = _kernel_value(t, CODE)
        w = tl.load(
            weights + rows_n[:, None] * stride_w + outputs[None, :],
            mask=(rows_n[:, None] < N) & (outputs[None, :] < C),
            other=0.0,
        )
        result = tl.dot(value, w, result, input_precision=PRECISION)
    mask = (rows_m[:, None] < M) & (outputs[None, :] < C)
    where = out + rows_m[:, None] * stride_o + outputs[None, :]
    # Several programs share a row tile when there are fewer row tiles than multiprocessors.
    tl.atomic_add(where, result, mask=mask)


@triton.jit
def _block_kernel(
    left,
    right,
    out,
    M,
    N,
    D,
    stride_l,
    stride_r,
    stride_o,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    rows_m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    rows_n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    t = _distances(
        left, right, rows_m, rows_n, M, N, D, stride_l, stride_r, PRECISION, TILE_M, TILE_N, TILE_D
    )
    value = _kernel_value(t, CODE)
    tl.store(
        out + rows_m[:, None] * stride_o + rows_n[None, :],
        value.to(out.dtype.element_ty),
        mask=(rows_m[:, None] < M) & (rows_n[None, :] < N),
    )


@triton.jit
def _half_kernel(
    matrix,
    weights,
    out,
    M,
    N,
    C,
    stride_m,
    stride_w,
    stride_o,
    PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_C: tl.constexpr,
    SPLITS: tl.constexpr,
):
    rows_m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    outputs = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    result = tl.zeros((TILE_M, TILE_C), dtype=tl.float32)
    for low in range(tl.program_id(1) * TILE_N, N, TILE_N * SPLITS):
        rows_n = tl.full((), low, tl.int64) + tl.arange(0, TILE_N)
        value = tl.load(
            matrix + rows_m[:, None] * stride_m + rows_n[None, :],
            mask=(rows_m[:, None] < M) & (rows_n[None, :] < N),
            other=0.0,
        ).to(tl.float32)
        w = tl.load(
            weights + rows_n[:, None] * stride_w + outputs[None, :],
            mask=(rows_n[:, None] < N) & (outputs[None, :] < C),
            other=0.0,
        )
        result = tl.dot(value, w, result, input_precision=PRECISION)
    mask = (rows_m[:, None] < M) & (outputs[None, :] < C)
    tl.atomic_add(out + rows_m[:, None] * stride_o + outputs[None, :], result, mask=mask)


def fused_multiply(
    operands: Operands, left_mk: Tensor, right_nk: Tensor, weights_nc: Tensor, into_mc: Tensor
) -> Tensor:
    """``into`` + K(left, right)·weights for at most 64 outputs; works in place on ``into``."""
    m, n, c = left_mk.shape[0], right_nk.shape[0], weights_nc.shape[1]
    left, weights = left_mk.contiguous(), weights_nc.contiguous()
    grid_m = triton.cdiv(m, TILE_M)
    splits = splits_for(grid_m, triton.cdiv(n, TILE_N), left.device)
    _multiply_kernel[(grid_m, splits)](
        left,
        right_nk,
        weights,
        into_mc,
        m,
        n,
        left.shape[1] - 2,
        c,
        left.stride(0),
        right_nk.stride(0),
        weights.stride(0),
        into_mc.stride(0),
        CODE=operands.kernel.code,
        PRECISION=precision_of(operands),
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_D=TILE_D,
        TILE_C=max(16, triton.next_power_of_2(c)),
        SPLITS=splits,
    )
    return into_mc


def kernel_block(operands: Operands, left_mk: Tensor, right_nk: Tensor, out_mn: Tensor) -> Tensor:
    """K(left, right) into ``out``, which may be a view of a larger block and of half precision."""
    m, n = left_mk.shape[0], right_nk.shape[0]
    left = left_mk.contiguous()
    _block_kernel[(triton.cdiv(m, TILE_M), triton.cdiv(n, TILE_N))](
        left,
        right_nk,
        out_mn,
        m,
        n,
        left.shape[1] - 2,
        left.stride(0),
        right_nk.stride(0),
        out_mn.stride(0),
        CODE=operands.kernel.code,
        PRECISION=precision_of(operands),
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_D=TILE_D,
    )
    return out_mn


def half_multiply(matrix_mn: Tensor, weights_nc: Tensor) -> Tensor:
    """A half-precision matrix times float32 weights, in float32."""
    m, n = matrix_mn.shape
    c = weights_nc.shape[1]
    weights = weights_nc.contiguous()
    out = torch.zeros(m, c, dtype=torch.float32, device=weights.device)
    grid_m, tile_c = triton.cdiv(m, TILE_M), min(64, max(16, triton.next_power_of_2(c)))
    splits = splits_for(grid_m, triton.cdiv(n, TILE_N), weights.device)
    _half_kernel[(grid_m, splits, triton.cdiv(c, tile_c))](
        matrix_mn,
        weights,
        out,
        m,
        n,
        c,
        matrix_mn.stride(0),
        weights.stride(0),
        out.stride(0),
        PRECISION="tf32",
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_C=tile_c,
        SPLITS=splits,
    )
    return out


def precision_of(operands: Operands) -> str:
    return "tf32" if operands.exact_norms else "ieee"


def splits_for(row_tiles: int, centre_tiles: int, device: torch.device) -> int:
    """Programs for each row tile, so that every multiprocessor has work."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(centre_tiles, 2 * processors // max(1, row_tiles)))
