"""A convolution with its bias and its ReLU as one Triton kernel, and its way back as two.

For the few images of a rollout cuDNN picks kernels that take 10 to 140 µs a layer, half of them on the plain cores, and
moves every tensor between layouts. Here images lie as rows, channels last, all the way: ``x`` is (n, h, w, c), ``w`` is
(o, k, k, c) as it lies in the learner's flat parameters, and ``y`` is (n, h', w', o). No padding.

Every kernel multiplies tiles: (rows of the output, channels) times (channels, filters), once for each of the k·k places
of a filter (a *tap*). The weight's gradient is summed in parts over the rows, in an order that is always the same,
so equal inputs give equal bits. The input's gradient takes pixels of one remainder by the stride at a time, so that
every tap of a program counts. Channels and filters are powers of two from 16 to 128, and the side
of a filter is a multiple of the stride (`networks.ImageEncoder.can_fuse`).

Precision. float32 is multiplied as PyTorch multiplies convolutions: in TensorFloat-32 unless
``torch.backends.cudnn.allow_tf32`` is off.
"""

# triton's functions are compiled, not called: they have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256  # what a device of some 130 processors is well filled with; half of it is enough for one wave
_ROWS = 64  # rows of a tile in the weight's gradient


@triton.jit
def _forward_kernel(
    x, w, bias, y, rows, h, width, out_h, out_w,
    FILTERS: tl.constexpr, CHANNELS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    image, place = row // (out_h * out_w), row % (out_h * out_w)
    corner = ((image * h + place // out_w * STRIDE) * width + place % out_w * STRIDE) * CHANNELS
    c, o = tl.arange(0, CHANNELS), tl.arange(0, FILTERS)
    total = tl.zeros((ROWS, FILTERS), dtype=tl.float32)
    for tap in range(K * K):
        at = ((tap // K) * width + tap % K) * CHANNELS
        x_rc = tl.load(x + corner[:, None] + at + c[None, :], mask=inside[:, None], other=0.0)
        w_co = tl.load(w + o[None, :] * (K * K * CHANNELS) + tap * CHANNELS + c[:, None])
        total = tl.dot(x_rc, w_co, total, input_precision=PRECISION)
    total = tl.maximum(total + tl.load(bias + o)[None, :].to(tl.float32), 0.0)
    tl.store(y + row[:, None] * FILTERS + o[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _weight_kernel(
    x, y, d, for_w, for_bias, rows, chunk, h, width, out_h, out_w,
    FILTERS: tl.constexpr, CHANNELS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tap, part = tl.program_id(0), tl.program_id(1)
    first = part * chunk
    stop = tl.minimum(first + chunk, rows)
    c, o = tl.arange(0, CHANNELS), tl.arange(0, FILTERS)
    at = ((tap // K) * width + tap % K) * CHANNELS
    total = tl.zeros((FILTERS, CHANNELS), dtype=tl.float32)
    bias = tl.zeros((FILTERS,), dtype=tl.float32)
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < stop
        image, place = row // (out_h * out_w), row % (out_h * out_w)
        corner = ((image * h + place // out_w * STRIDE) * width + place % out_w * STRIDE) * CHANNELS
        there = row[:, None] * FILTERS + o[None, :]
        kept = tl.load(y + there, mask=inside[:, None], other=0.0)
        d_ro = tl.load(d + there, mask=inside[:, None], other=0.0)
        d_ro = tl.where(kept > 0, d_ro, 0.0).to(d.dtype.element_ty)
        x_rc = tl.load(x + corner[:, None] + at + c[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(tl.trans(d_ro), x_rc, total, input_precision=PRECISION)
        bias += tl.sum(d_ro.to(tl.float32), axis=0)
    tl.store(for_w + (part * FILTERS + o[:, None]) * (K * K * CHANNELS) + tap * CHANNELS + c[None, :], total)
    if tap == 0:
        tl.store(for_bias + part * FILTERS + o, bias)


@triton.jit
def _input_kernel(
    y, d, w, for_x, rows, h, width, out_h, out_w, some_h, some_w,
    FILTERS: tl.constexpr, CHANNELS: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, rest = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    over, along = rest // STRIDE, rest % STRIDE
    image, place = row // (some_h * some_w), row % (some_h * some_w)
    a, b = place // some_w, place % some_w
    i, j = a * STRIDE + over, b * STRIDE + along
    inside = (row < rows) & (i < h) & (j < width)
    c, o = tl.arange(0, CHANNELS), tl.arange(0, FILTERS)
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for tap in range((K // STRIDE) * (K // STRIDE)):
        down, right = tap // (K // STRIDE), tap % (K // STRIDE)
        u, v = a - down, b - right
        there = inside & (u >= 0) & (u < out_h) & (v >= 0) & (v < out_w)
        at = (((image * out_h + u) * out_w + v) * FILTERS)[:, None] + o[None, :]
        kept = tl.load(y + at, mask=there[:, None], other=0.0)
        d_ro = tl.load(d + at, mask=there[:, None], other=0.0)
        d_ro = tl.where(kept > 0, d_ro, 0.0).to(d.dtype.element_ty)
        where = (over + STRIDE * down) * K + along + STRIDE * right
        w_oc = tl.load(w + o[:, None] * (K * K * CHANNELS) + where * CHANNELS + c[None, :])
        total = tl.dot(d_ro, w_oc, total, input_precision=PRECISION)
    at = ((image * h + i) * width + j) * CHANNELS
    tl.store(for_x + at[:, None] + c[None, :], total.to(for_x.dtype.element_ty), mask=inside[:, None])


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"


def _tile(rows: int, others: int = 1) -> int:
    """Rows of a tile: as many as leave work for the whole device."""
    return next((size for size in (128, 64) if triton.cdiv(rows, size) * others >= _PROGRAMS // 2), 32)


def _parts(rows: int, k: int) -> tuple[int, int]:
    """Into how many parts of how many rows the weight's gradient is cut."""
    chunk = triton.cdiv(rows, max(1, _PROGRAMS // (k * k)))
    chunk = triton.cdiv(chunk, _ROWS) * _ROWS
    return triton.cdiv(rows, chunk), chunk


def _sizes(x: Tensor, w: Tensor, stride: int) -> tuple[int, int, int, int, int, int]:
    n, h, width, _ = x.shape
    k = w.shape[1]
    out_h, out_w = (h - k) // stride + 1, (width - k) // stride + 1
    return n, h, width, out_h, out_w, n * out_h * out_w


@torch.library.custom_op("headrace::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, bias: Tensor, stride: int) -> Tensor:
    """relu(x * w + bias) of images (n, h, w, c) and filters (o, k, k, c)."""
    x, w = x.contiguous(), w.contiguous()
    n, h, width, out_h, out_w, rows = _sizes(x, w, stride)
    filters, k, _, channels = w.shape
    y = torch.empty((n, out_h, out_w, filters), dtype=x.dtype, device=x.device)
    tile = _tile(rows)
    _forward_kernel[(triton.cdiv(rows, tile),)](
        x, w, bias, y, rows, h, width, out_h, out_w, FILTERS=filters, CHANNELS=channels, K=k, STRIDE=stride,
        ROWS=tile, PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


@convolve.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, stride: int) -> Tensor:
    n, _, _, out_h, out_w, _ = _sizes(x, w, stride)
    return x.new_empty((n, out_h, out_w, len(w)))


@torch.library.custom_op("headrace::convolve_weight", mutates_args=())
def _weight_back(x: Tensor, w: Tensor, y: Tensor, d: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Gradients of the filters and the bias, in parts to be summed."""
    x, y, d = x.contiguous(), y.contiguous(), d.contiguous()
    _, h, width, out_h, out_w, rows = _sizes(x, w, stride)
    filters, k, _, channels = w.shape
    parts, chunk = _parts(rows, k)
    for_w = torch.empty((parts, *w.shape), dtype=torch.float32, device=x.device)
    for_bias = torch.empty((parts, filters), dtype=torch.float32, device=x.device)
    _weight_kernel[(k * k, parts)](
        x, y, d, for_w, for_bias, rows, chunk, h, width, out_h, out_w, FILTERS=filters, CHANNELS=channels, K=k,
        STRIDE=stride, ROWS=_ROWS, PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return for_w, for_bias


@_weight_back.register_fake
def _(x: Tensor, w: Tensor, y: Tensor, d: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    parts, _ = _parts(_sizes(x, w, stride)[-1], w.shape[1])
    return (
        x.new_empty((parts, *w.shape), dtype=torch.float32),
        x.new_empty((parts, len(w)), dtype=torch.float32),
    )


@torch.library.custom_op("headrace::convolve_input", mutates_args=())
def _input_back(x: Tensor, w: Tensor, y: Tensor, d: Tensor, stride: int) -> Tensor:
    """Gradient of the images."""
    y, d, w = y.contiguous(), d.contiguous(), w.contiguous()
    n, h, width, out_h, out_w, _ = _sizes(x, w, stride)
    filters, k, _, channels = w.shape
    some_h, some_w = triton.cdiv(h, stride), triton.cdiv(width, stride)
    rows, tile = n * some_h * some_w, _tile(n * some_h * some_w, stride * stride)
    for_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _input_kernel[(triton.cdiv(rows, tile), stride * stride)](
        y, d, w, for_x, rows, h, width, out_h, out_w, some_h, some_w, FILTERS=filters, CHANNELS=channels, K=k,
        STRIDE=stride, ROWS=tile, PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return for_x


@_input_back.register_fake
def _(x: Tensor, w: Tensor, y: Tensor, d: Tensor, stride: int) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    x, w, _, ctx.stride = inputs
    ctx.save_for_backward(x, w, output)


def _back(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
    x, w, y = ctx.saved_tensors
    for_w, for_bias = _weight_back(x, w, y, d, ctx.stride)
    for_x = _input_back(x, w, y, d, ctx.stride) if ctx.needs_input_grad[0] else None
    return for_x, for_w.sum(0).to(w.dtype), for_bias.sum(0), None


convolve.register_autograd(_back, setup_context=_keep)
