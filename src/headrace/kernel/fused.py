"""Triton kernels: distance → kernel value → product in one pass, with no block of K in memory.

`fused_multiply` (at most 64 outputs): a program owns a tile of rows and walks over centres, computes squared
distances on the tensor cores, turns them into kernel values in registers and multiplies by the weights.
`kernel_block` (more outputs, and the cached matrix) writes tiles of kernel values, in float32 or float16.
`half_multiply` multiplies rows of a kernel matrix kept in float16, and `half_head` takes their first columns. Which
rows is read from the device, so that a CUDA graph can hold the launch.

Precision. Features are float16 (`Packed`); `operands.py` rounded the rows to what float16 holds and took the
norms of the rounded rows, so these products are exact but for float32 accumulation: the kernel is that of data
rounded at 2^-11, and k(x, x) stays 1. A kernel value enters a product in float16, like TF32 11 bits. Weights are
split into two float16 numbers after scaling by a power of two, 22 bits; with 8 training stalls.

Layout. Feature rows are padded with zeros to `WIDTH` columns, so loads are 16 bytes wide and need no mask; row
numbers beyond the end are clamped, and what they yield meets weights of zero or is not stored.

Tested against torch by Triton's interpreter on the CPU (tests/kernel/test_fused.py).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernel.tiles import Tiles

WIDTH = 64
"""Feature columns are a multiple of this: the depth of one step on the tensor cores."""
HALF_M, HALF_N, HALF_WARPS, HALF_STAGES = 64, 128, 4, 4
HEAD_TILE = 1024
GROUP = 8
"""Row tiles that run beside one another in `kernel_block`, to share centres in the second-level cache."""
WIDE = 64
SCALED_BITS = 10
"""The largest weight is scaled to about 2 to this power, far from float16's ends."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows for the tensor cores."""

    features: Tensor
    """n × a multiple of `WIDTH`, float16."""
    norms: Tensor
    """Squared lengths, float32."""

    def __len__(self) -> int:
        return int(self.norms.shape[0])

    def part(self, start: int, stop: int) -> Packed:
        return Packed(features=self.features[start:stop], norms=self.norms[start:stop])


def packed_bytes(rows: int, features: int) -> int:
    return rows * (2 * (-(-features // WIDTH) * WIDTH) + 4)


def pack_right(right_nk: Tensor) -> Packed:
    """From a right operand [v, |v|², 1]."""
    d = right_nk.shape[1] - 2
    return Packed(features=_padded(right_nk[:, :d]), norms=right_nk[:, d].contiguous())


def pack_left(left_mk: Tensor) -> Packed:
    """From a left operand [−2v, 1, |v|²]."""
    d = left_mk.shape[1] - 2
    return Packed(features=_padded(left_mk[:, :d] * -0.5), norms=left_mk[:, d + 1].contiguous())


def _padded(values_nd: Tensor) -> Tensor:
    n, d = values_nd.shape
    out = torch.zeros(n, triton.cdiv(d, WIDTH) * WIDTH, dtype=torch.float16, device=values_nd.device)
    out[:, :d] = values_nd
    return out


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
def _inner_products(
    left,
    right,
    rows_m,
    rows_n,
    width,
    stride_l,
    stride_r,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # rows are int64: a row number times a stride may exceed 2^31
    columns = tl.arange(0, TILE_D)
    a_at = left + rows_m[:, None] * stride_l + columns[None, :]
    b_at = right + rows_n[None, :] * stride_r + columns[:, None]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for _ in range(0, width, TILE_D):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total)
        a_at += TILE_D
        b_at += TILE_D
    return total


@triton.jit
def _exponent(top):
    # of the power of two that weights are divided by; the clamp keeps 2 to its negative finite
    return tl.floor(tl.log2(tl.maximum(top, 1e-30)))


@triton.jit
def _split_kernel(
    weights,
    top,
    out,
    N,
    C,
    stride_w,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    outputs = tl.arange(0, TILE_C)
    inside = rows[:, None] < N
    w = tl.load(
        weights + rows[:, None] * stride_w + outputs[None, :], mask=inside & (outputs[None, :] < C), other=0.0
    )
    scaled = w * tl.exp2(BITS - _exponent(tl.load(top)))
    high = scaled.to(tl.float16)
    low = (scaled - high.to(tl.float32)).to(tl.float16)
    at = out + rows[:, None] * (2 * TILE_C) + outputs[None, :]
    tl.store(at, high, mask=inside)
    tl.store(at + TILE_C, low, mask=inside)


@triton.jit
def _add_halves(result, top, out, rows_m, M, C, stride_o, BITS: tl.constexpr, TILE_C: tl.constexpr):
    # Columns hold the products with the weights' high parts, then with their low parts; both belong to one
    # output. Several programs share a row tile when there are fewer row tiles than multiprocessors.
    outputs = tl.arange(0, 2 * TILE_C) % TILE_C
    result *= tl.exp2(_exponent(tl.load(top)) - BITS)
    mask = (rows_m[:, None] < M) & (outputs[None, :] < C)
    tl.atomic_add(out + rows_m[:, None] * stride_o + outputs[None, :], result, mask=mask)


@triton.jit
def _multiply_kernel(
    left,
    left_norms,
    right,
    right_norms,
    weights,
    top,
    out,
    M,
    N,
    C,
    width,
    stride_l,
    stride_r,
    stride_o,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_C: tl.constexpr,
    SPLITS: tl.constexpr,
):
    rows_m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    within_m = tl.minimum(rows_m, M - 1)
    norms_m = tl.load(left_norms + within_m)
    columns = tl.arange(0, 2 * TILE_C)
    result = tl.zeros((TILE_M, 2 * TILE_C), dtype=tl.float32)
    for low in range(tl.program_id(1) * TILE_N, N, TILE_N * SPLITS):
        rows_n = tl.full((), low, tl.int64) + tl.arange(0, TILE_N)
        within_n = tl.minimum(rows_n, N - 1)
        # Before the long product, which hides the time they take.
        norms_n = tl.load(right_norms + within_n)
        w = tl.load(
            weights + rows_n[:, None] * (2 * TILE_C) + columns[None, :], mask=rows_n[:, None] < N, other=0.0
        )
        inner = _inner_products(
            left, right, within_m, within_n, width, stride_l, stride_r, TILE_M, TILE_N, TILE_D
        )
        value = _kernel_value(norms_m[:, None] + norms_n[None, :] - 2.0 * inner, CODE)
        result = tl.dot(value.to(tl.float16), w, result)
    _add_halves(result, top, out, rows_m, M, C, stride_o, BITS, TILE_C)


@triton.jit
def _block_kernel(
    left,
    left_norms,
    right,
    right_norms,
    out,
    M,
    N,
    width,
    stride_l,
    stride_r,
    stride_o,
    CODE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    number = tl.program_id(0)
    first = number // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + number % (GROUP * tiles_n) % height
    tile_n = number % (GROUP * tiles_n) // height
    rows_m = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    rows_n = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    within_m, within_n = tl.minimum(rows_m, M - 1), tl.minimum(rows_n, N - 1)
    inner = _inner_products(
        left, right, within_m, within_n, width, stride_l, stride_r, TILE_M, TILE_N, TILE_D
    )
    norms_m, norms_n = tl.load(left_norms + within_m), tl.load(right_norms + within_n)
    value = _kernel_value(norms_m[:, None] + norms_n[None, :] - 2.0 * inner, CODE)
    tl.store(
        out + rows_m[:, None] * stride_o + rows_n[None, :],
        value.to(out.dtype.element_ty),
        mask=(rows_m[:, None] < M) & (rows_n[None, :] < N),
    )


@triton.jit
def _half_kernel(
    matrix,
    rows,
    weights,
    top,
    out,
    M,
    N,
    W,
    C,
    stride_m,
    stride_w,
    stride_o,
    BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_C: tl.constexpr,
    SPLITS: tl.constexpr,
):
    rows_m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    at = matrix + tl.load(rows + tl.minimum(rows_m, M - 1))[:, None] * stride_m
    columns = tl.arange(0, 2 * TILE_C)
    result = tl.zeros((TILE_M, 2 * TILE_C), dtype=tl.float32)
    for low in range(tl.program_id(1) * TILE_N, N, TILE_N * SPLITS):
        across = low + tl.arange(0, TILE_N)
        value = tl.load(at + across[None, :], mask=across[None, :] < N, other=0.0)
        w = tl.load(
            weights + across[:, None].to(tl.int64) * stride_w + columns[None, :],
            mask=across[:, None] < W,
            other=0.0,
        )
        result = tl.dot(value, w, result)
    _add_halves(result, top, out, rows_m, M, C, stride_o, BITS, TILE_C)


@triton.jit
def _head_kernel(matrix, rows, out, S, stride_m, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < S
    values = tl.load(matrix + tl.load(rows + row) * stride_m + columns, mask=inside, other=0.0)
    tl.store(out + row * S + columns, values.to(tl.float32), mask=inside)


def split_weights(weights_nc: Tensor) -> tuple[Tensor, Tensor]:
    """(high and low halves side by side in float16, the largest weight on the device)."""
    n, c = weights_nc.shape
    weights = weights_nc.contiguous()
    top = torch.linalg.vector_norm(weights, ord=float("inf"))
    tile_c = outputs_tile(c)
    out = torch.empty(n, 2 * tile_c, dtype=torch.float16, device=weights.device)
    _split_kernel[(triton.cdiv(n, 128),)](
        weights, top, out, n, c, weights.stride(0), BITS=SCALED_BITS, TILE=128, TILE_C=tile_c
    )
    return out, top


def outputs_tile(outputs: int) -> int:
    return max(16, int(triton.next_power_of_2(outputs)))


def fused_multiply(
    code: int, left: Packed, right: Packed, weights_nc: Tensor, into_mc: Tensor, tiles: Tiles
) -> Tensor:
    """``into`` + K(left, right)·weights for at most 64 outputs; works in place on ``into``."""
    m, n = len(left), len(right)
    halves, top = split_weights(weights_nc)
    if halves.shape[1] > WIDE:
        tiles = replace(
            tiles, n=min(tiles.n, 128)
        )  # measured with few outputs; many take registers and memory
    grid_m = triton.cdiv(m, tiles.m)
    splits = splits_for(grid_m, triton.cdiv(n, tiles.n), into_mc.device)
    _multiply_kernel[(grid_m, splits)](
        left.features,
        left.norms,
        right.features,
        right.norms,
        halves,
        top,
        into_mc,
        m,
        n,
        weights_nc.shape[1],
        left.features.shape[1],
        left.features.stride(0),
        right.features.stride(0),
        into_mc.stride(0),
        CODE=code,
        BITS=SCALED_BITS,
        TILE_M=tiles.m,
        TILE_N=tiles.n,
        TILE_D=WIDTH,
        TILE_C=halves.shape[1] // 2,
        SPLITS=splits,
        **tiles.launch,
    )
    return into_mc


def kernel_block(code: int, left: Packed, right: Packed, out_mn: Tensor, tiles: Tiles) -> Tensor:
    """K(left, right) into ``out``, which may be a view of a larger block and of half precision."""
    m, n = len(left), len(right)
    _block_kernel[(triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n),)](
        left.features,
        left.norms,
        right.features,
        right.norms,
        out_mn,
        m,
        n,
        left.features.shape[1],
        left.features.stride(0),
        right.features.stride(0),
        out_mn.stride(0),
        CODE=code,
        TILE_M=tiles.m,
        TILE_N=tiles.n,
        TILE_D=WIDTH,
        GROUP=GROUP,
        **tiles.launch,
    )
    return out_mn


def half_multiply(matrix_nn: Tensor, rows_m: Tensor, weights_nc: Tensor) -> Tensor:
    """The rows with those numbers of a half-precision matrix times float32 weights, in float32.

    The matrix may be wider than there are weights, if what is beyond is finite.
    """
    m, n, (w, c) = len(rows_m), matrix_nn.shape[1], weights_nc.shape
    halves, top = split_weights(weights_nc)
    out = torch.zeros(m, c, dtype=torch.float32, device=halves.device)
    grid_m = triton.cdiv(m, HALF_M)
    splits = splits_for(grid_m, triton.cdiv(n, HALF_N), halves.device)
    _half_kernel[(grid_m, splits)](
        matrix_nn,
        rows_m,
        halves,
        top,
        out,
        m,
        n,
        w,
        c,
        matrix_nn.stride(0),
        halves.stride(0),
        out.stride(0),
        BITS=SCALED_BITS,
        TILE_M=HALF_M,
        TILE_N=HALF_N,
        TILE_C=halves.shape[1] // 2,
        SPLITS=splits,
        num_warps=HALF_WARPS,
        num_stages=HALF_STAGES,
    )
    return out


def half_head(matrix_nn: Tensor, rows_m: Tensor, samples: int) -> Tensor:
    """The first columns of the rows with those numbers, in float32; one launch where torch needs one for each 2 GB."""
    out = torch.empty(len(rows_m), samples, dtype=torch.float32, device=matrix_nn.device)
    grid = (len(rows_m), triton.cdiv(samples, HEAD_TILE))
    _head_kernel[grid](matrix_nn, rows_m, out, samples, matrix_nn.stride(0), TILE=HEAD_TILE)
    return out


def splits_for(row_tiles: int, centre_tiles: int, device: torch.device) -> int:
    """Programs for each row tile, so that every multiprocessor has two."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(centre_tiles, 2 * processors // max(1, row_tiles)))
