"""A training step through a chain, compiled, without the interpreter lock.

`step` is one step: gather, forward, loss, backward, update. Workers call it from compiled loops over many batches
(`hogbatch.grant_kernel`), so that a thread holds the interpreter lock once for all of them.

Memory, all float32 and given by addresses in the table ``layers`` (columns below): activations lie
feature by feature, ``[d, pad]`` with the batch padded to sixteen, which makes both products with the weights
run along the batch. For the update a copy lies row by row, in panels of 64 features. The derivative carries
the factor ``-lr / b`` from the loss on, so that an update is one product added to the weights. Backward and
update go through the weights once together, block by block.

One row goes through loops of its own: a step then moves weights rather than multiplies them.

Shortcomings: float32 on a CPU, labels or targets of the losses below; `chain_steps` says what fits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import binding
from numba import njit

from headrace.engine.tiles import (
    make_dots,
    make_tile,
    number_at,
    outer4,
    power_of_two,
    put_number,
    whole_at,
)

IN, OUT, WEIGHT, BIAS, ACTIVATION, TAKEN, PANELS, GIVEN = range(8)
"""Columns of ``layers``; TAKEN and GIVEN are the input and output, feature by feature, DELTA the derivative
of the output (for the last layer the output itself)."""
DELTA, TRAINED = 8, 9
LAYER_COLUMNS = 10

NONE, RELU, SIGMOID, TANH, LEAKY = range(5)
CROSS_ENTROPY, SQUARES, LOGITS = range(3)

PANEL = 64
BLOCK = 36
"""Rows of weights that go through backward and update together: 72 kB of 512 columns, in the second cache."""

_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
TALL = 12 if _WIDE else 6
"""Rows of a tile one vector wide: 12 sums hide the latency of two multiply-add units."""

_across2 = make_tile(12, 2, bias=True)
_across1 = make_tile(TALL, 1, bias=True)
_across1_few = make_tile(4, 1, bias=True)
_across1_one = make_tile(1, 1, bias=True)
_down2 = make_tile(8, 2, bias=False, a_row_bytes=4)
_down1 = make_tile(8, 1, bias=False, a_row_bytes=4)
_down1_one = make_tile(1, 1, bias=False, a_row_bytes=4)
_update4 = make_tile(6, 4, bias=False)
_update1 = make_tile(6, 1, bias=False)
_update1_one = make_tile(1, 1, bias=False)
_dots8 = make_dots(8)
_dots1 = make_dots(1)

_compiled: Any = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True, cache=True)


F = np.float32


@_compiled
def exp(x: Any) -> Any:
    """e^x in float32, to 2e-7 relative, between −87 and 87; a form that LLVM vectorises."""
    x = F(-87.0) if x < F(-87.0) else (F(87.0) if x > F(87.0) else x)  # NaN stays
    n = math.floor(x * F(1.4426950408889634) + F(0.5))
    r = x - F(n) * F(0.693145751953125) - F(n) * F(1.428606765330187e-06)
    p = F(1 / 720)
    p = p * r + F(1 / 120)
    p = p * r + F(1 / 24)
    p = p * r + F(1 / 6)
    p = p * r + F(0.5)
    p = p * r + F(1.0)
    p = p * r + F(1.0)
    return p * power_of_two(np.int32(n))


@_compiled
def _activate(kind: Any, slope: Any, z: Any, count: Any) -> None:
    if kind == RELU:
        for i in range(count):
            v = number_at(z, i)
            put_number(z, i, F(0.0) if v <= F(0.0) else v)  # NaN stays, as in torch
    elif kind == LEAKY:
        for i in range(count):
            v = number_at(z, i)
            put_number(z, i, v if v > F(0.0) else v * slope)
    elif kind == SIGMOID:
        for i in range(count):
            put_number(z, i, F(1.0) / (F(1.0) + exp(-number_at(z, i))))
    elif kind == TANH:
        for i in range(count):
            v = number_at(z, i)
            far = F(1.0) - F(2.0) / (F(1.0) + exp(v + v))
            w = v * v  # near zero the quotient loses what tells v from nothing
            near = v * (F(1.0) + w * (F(-1 / 3) + w * (F(2 / 15) + w * F(-17 / 315))))
            put_number(z, i, near if w < F(0.04) else far)


@_compiled
def _derive(kind: Any, slope: Any, delta: Any, out: Any, count: Any) -> None:
    """Multiply ``delta`` by the activation's derivative, known from its output."""
    if kind == RELU:
        for i in range(count):
            put_number(delta, i, F(0.0) if number_at(out, i) <= F(0.0) else number_at(delta, i))
    elif kind == LEAKY:
        for i in range(count):
            d = number_at(delta, i)
            put_number(delta, i, d if number_at(out, i) > F(0.0) else d * slope)
    elif kind == SIGMOID:
        for i in range(count):
            o = number_at(out, i)
            put_number(delta, i, number_at(delta, i) * o * (F(1.0) - o))
    elif kind == TANH:
        for i in range(count):
            o = number_at(out, i)
            put_number(delta, i, number_at(delta, i) * (F(1.0) - o * o))


@_compiled
def _row(order: Any, at: Any) -> Any:
    return at if order == 0 else whole_at(order, at)


@_compiled
def _gather(layer: Any, x: Any, order: Any, at: Any, rows: Any, pad: Any) -> None:
    """The batch, feature by feature and in panels."""
    d, taken, panels = layer[IN], layer[TAKEN], layer[PANELS]
    for i in range(rows):
        source = x + _row(order, at + i) * d * 4
        for start in range(0, d, PANEL):
            into = panels + ((start // PANEL) * pad + i) * PANEL * 4
            for j in range(min(PANEL, d - start)):
                put_number(into, j, number_at(source + start * 4, j))
        for j in range(d):
            put_number(taken, j * pad + i, number_at(source, j))
    for i in range(rows, pad):
        for j in range(d):
            put_number(taken, j * pad + i, F(0.0))


@_compiled
def _to_panels(layer: Any, rows: Any, pad: Any) -> None:
    d, taken, panels = layer[IN], layer[TAKEN], layer[PANELS]
    for start in range(0, d, PANEL):
        width = min(PANEL, d - start)
        for i in range(rows):
            into = panels + ((start // PANEL) * pad + i) * PANEL * 4
            source = taken + (start * pad + i) * 4
            for j in range(width):
                put_number(into, j, number_at(source, j * pad))


@_compiled
def _forward(layer: Any, pad: Any) -> None:
    """``given = weight · taken + bias``, tile by tile."""
    d, c = layer[IN], layer[OUT]
    ld, line = d * 4, pad * 4
    b, out, w, bias = layer[TAKEN], layer[GIVEN], layer[WEIGHT], layer[BIAS]
    zero = F(0.0)
    pairs = (pad // 32) * 32 if _WIDE else 0
    at = 0
    while at + 12 <= c and pairs:
        for j in range(0, pairs, 32):
            _across2(
                w + at * ld, ld, 4, b + j * 4, line, out + at * line + j * 4, line, d, zero, bias + at * 4
            )
        for j in range(pairs, pad, 16):
            _across1(
                w + at * ld, ld, 4, b + j * 4, line, out + at * line + j * 4, line, d, zero, bias + at * 4
            )
        at += 12
    while at + TALL <= c:
        for j in range(0, pad, 16):
            _across1(
                w + at * ld, ld, 4, b + j * 4, line, out + at * line + j * 4, line, d, zero, bias + at * 4
            )
        at += TALL
    while at + 4 <= c:
        for j in range(0, pad, 16):
            _across1_few(
                w + at * ld, ld, 4, b + j * 4, line, out + at * line + j * 4, line, d, zero, bias + at * 4
            )
        at += 4
    while at < c:
        for j in range(0, pad, 16):
            _across1_one(
                w + at * ld, ld, 4, b + j * 4, line, out + at * line + j * 4, line, d, zero, bias + at * 4
            )
        at += 1


@_compiled
def _down(layer: Any, below: Any, first: Any, last: Any, pad: Any) -> None:
    """``below += weightᵀ · delta`` over the weights' rows ``first`` to ``last``."""
    d, line = layer[IN], pad * 4
    ld, count = d * 4, last - first
    w, delta = layer[WEIGHT] + first * ld, layer[DELTA] + first * line
    one = F(1.0)
    pairs = (pad // 32) * 32 if _WIDE else 0
    at = 0
    while at + 8 <= d:
        for j in range(0, pairs, 32):
            _down2(w + at * 4, 4, ld, delta + j * 4, line, below + at * line + j * 4, line, count, one, delta)
        for j in range(pairs, pad, 16):
            _down1(w + at * 4, 4, ld, delta + j * 4, line, below + at * line + j * 4, line, count, one, delta)
        at += 8
    while at < d:
        for j in range(0, pad, 16):
            _down1_one(
                w + at * 4, 4, ld, delta + j * 4, line, below + at * line + j * 4, line, count, one, delta
            )
        at += 1


@_compiled
def _update(layer: Any, first: Any, last: Any, rows: Any, pad: Any, keep: Any, scratch: Any) -> None:
    """``weight = keep · weight + deltaᵀ · taken`` over the weights' rows ``first`` to ``last``."""
    d, line = layer[IN], pad * 4
    ld = d * 4
    for start in range(0, d, PANEL):
        panel = layer[PANELS] + (start // PANEL) * pad * PANEL * 4
        width = min(PANEL, d - start)
        at = first
        while at < last:
            tall = 6 if at + 6 <= last else 1
            a, w = layer[DELTA] + at * line, layer[WEIGHT] + at * ld + start * 4
            v = 0
            if width == PANEL and tall == 6 and _WIDE:
                _update4(a, line, 4, panel, PANEL * 4, w, ld, rows, keep, a)
                v = PANEL
            while v + 16 <= width:
                if tall == 6:
                    _update1(a, line, 4, panel + v * 4, PANEL * 4, w + v * 4, ld, rows, keep, a)
                else:
                    _update1_one(a, line, 4, panel + v * 4, PANEL * 4, w + v * 4, ld, rows, keep, a)
                v += 16
            if v < width:
                for r in range(tall):
                    for j in range(width - v):
                        put_number(scratch, r * 16 + j, number_at(w + r * ld + v * 4, j))
                if tall == 6:
                    _update1(a, line, 4, panel + v * 4, PANEL * 4, scratch, 64, rows, keep, a)
                else:
                    _update1_one(a, line, 4, panel + v * 4, PANEL * 4, scratch, 64, rows, keep, a)
                for r in range(tall):
                    for j in range(width - v):
                        put_number(w + r * ld + v * 4, j, number_at(scratch, r * 16 + j))
            at += tall


@_compiled
def _backward(layer: Any, below: Any, rows: Any, pad: Any, keep: Any, scratch: Any) -> None:
    """The derivative of the input into ``below`` (unless 0), and the update; a block is read before it moves."""
    d, c, line = layer[IN], layer[OUT], pad * 4
    if below != 0:
        for i in range(d * pad):
            put_number(below, i, F(0.0))
    for first in range(0, c, BLOCK):
        last = min(first + BLOCK, c)
        if below != 0:
            _down(layer, below, first, last, pad)
        _update(layer, first, last, rows, pad, keep, scratch)
    if layer[TRAINED] != 0:
        for i in range(c):
            total = F(0.0)
            for j in range(rows):
                total += number_at(layer[DELTA] + i * line, j)
            put_number(layer[BIAS], i, keep * number_at(layer[BIAS], i) + total)


@_compiled
def _forward_one(layer: Any) -> None:
    d, c = layer[IN], layer[OUT]
    ld, whole = d * 4, d // 16
    x, out, w, bias = layer[TAKEN], layer[GIVEN], layer[WEIGHT], layer[BIAS]
    if whole:
        for i in range(0, c - 7, 8):
            _dots8(w + i * ld, ld, x, out + i * 4, whole)
        for i in range(c - c % 8, c):
            _dots1(w + i * ld, ld, x, out + i * 4, whole)
    for i in range(c):
        total = number_at(bias, i) + (number_at(out, i) if whole else F(0.0))
        for j in range(16 * whole, d):
            total += number_at(w + i * ld, j) * number_at(x, j)
        put_number(out, i, total)


@_compiled
def _backward_one(layer: Any, below: Any, keep: Any, scratch: Any) -> None:
    """As `_backward` for one row: rows of weights whose derivative is zero are left out."""
    d, c = layer[IN], layer[OUT]
    ld, whole = d * 4, d // 16
    x, delta, w, bias = layer[TAKEN], layer[DELTA], layer[WEIGHT], layer[BIAS]
    into = below if below != 0 else scratch
    for j in range(d):
        put_number(into, j, F(0.0))
    rows = np.empty(4, np.int64)
    found = 0
    for i in range(c):
        v = number_at(delta, i)
        if v == F(0.0) and keep == F(1.0):
            continue
        for j in range(16 * whole, d):
            at = w + i * ld
            old = number_at(at, j)
            put_number(into, j, number_at(into, j) + v * old)
            put_number(at, j, keep * old + v * number_at(x, j))
        if layer[TRAINED] != 0:
            put_number(bias, i, keep * number_at(bias, i) + v)
        rows[found] = i
        found += 1
        if found == 4:
            if whole:
                _outer(w, delta, x, into, rows, whole, ld, keep)
            found = 0
    for k in range(found if whole else 0):
        i = rows[k]
        v = number_at(delta, i)
        for j in range(16 * whole):
            old = number_at(w + i * ld, j)
            put_number(into, j, number_at(into, j) + v * old)
            put_number(w + i * ld, j, keep * old + v * number_at(x, j))


@_compiled
def _outer(w: Any, delta: Any, x: Any, into: Any, rows: Any, whole: Any, ld: Any, keep: Any) -> None:
    i, j, k, m = rows[0], rows[1], rows[2], rows[3]
    outer4(
        w + i * ld, w + j * ld, w + k * ld, w + m * ld,
        number_at(delta, i), number_at(delta, j), number_at(delta, k), number_at(delta, m),
        x, into, whole, keep,
    )  # fmt: skip


@_compiled
def _loss(kind: Any, z: Any, classes: Any, y: Any, order: Any, at: Any, rows: Any, pad: Any, lr: Any) -> Any:
    """The mean loss; the derivative times ``-lr`` replaces the outputs. −1 when a label is out of range."""
    total = 0.0
    if kind == CROSS_ENTROPY:
        scale = F(-lr / rows)
        for i in range(rows):
            label = whole_at(y, _row(order, at + i))
            if label < 0 or label >= classes:
                return -1.0
            top = number_at(z, i)
            for c in range(1, classes):
                top = max(top, number_at(z, c * pad + i))
            right = number_at(z, label * pad + i) - top
            norm = F(0.0)
            for c in range(classes):
                e = exp(number_at(z, c * pad + i) - top)
                put_number(z, c * pad + i, e)
                norm += e
            total += math.log(norm) - right
            for c in range(classes):
                put_number(z, c * pad + i, number_at(z, c * pad + i) / norm * scale)
            put_number(z, label * pad + i, number_at(z, label * pad + i) - scale)
        total /= rows
    else:
        scale = F(-lr / (rows * classes)) * (F(2.0) if kind == SQUARES else F(1.0))
        for i in range(rows):
            target = y + _row(order, at + i) * classes * 4
            for c in range(classes):
                v, t = number_at(z, c * pad + i), number_at(target, c)
                if kind == SQUARES:
                    total += (v - t) * (v - t)
                    put_number(z, c * pad + i, (v - t) * scale)
                else:
                    e = exp(-abs(v))
                    total += max(v, F(0.0)) - v * t + math.log1p(e)
                    share = F(1.0) / (F(1.0) + e)
                    put_number(z, c * pad + i, ((share if v >= F(0.0) else e * share) - t) * scale)
        total /= rows * classes
    for c in range(classes):
        for i in range(rows, pad):
            put_number(z, c * pad + i, F(0.0))
    return total


@_compiled
def _forward_sparse(
    layer: Any, crow: Any, col: Any, x: Any, order: Any, at: Any, rows: Any, pad: Any, scratch: Any
) -> None:
    """The first layer from rows of a CSR matrix: only the weights of features that occur are read."""
    c, w, out = layer[OUT], layer[WEIGHT], layer[GIVEN]
    for i in range(pad):
        for k in range(c):
            put_number(scratch, k, number_at(layer[BIAS], k))
        if i < rows:
            row = _row(order, at + i)
            for entry in range(whole_at(crow, row), whole_at(crow, row + 1)):
                v, line = number_at(x, entry), w + whole_at(col, entry) * c * 4
                for k in range(c):
                    put_number(scratch, k, number_at(scratch, k) + v * number_at(line, k))
        for k in range(c):
            put_number(out, k * pad + i, number_at(scratch, k))


@_compiled
def _update_sparse(
    layer: Any, crow: Any, col: Any, x: Any, order: Any, at: Any, rows: Any, pad: Any, scratch: Any
) -> None:
    """The first layer's update: only the weights of features that occur are written."""
    c, w, delta = layer[OUT], layer[WEIGHT], layer[DELTA]
    for i in range(rows):
        row = _row(order, at + i)
        for k in range(c):
            put_number(scratch, k, number_at(delta, k * pad + i))
            if layer[TRAINED] != 0:
                put_number(layer[BIAS], k, number_at(layer[BIAS], k) + number_at(scratch, k))
        for entry in range(whole_at(crow, row), whole_at(crow, row + 1)):
            v, line = number_at(x, entry), w + whole_at(col, entry) * c * 4
            for k in range(c):
                put_number(line, k, number_at(line, k) + v * number_at(scratch, k))


@_compiled
def step(
    layers: Any, slopes: Any, kind: Any, scratch: Any, crow: Any, col: Any,
    x: Any, y: Any, order: Any, at: Any, rows: Any, lr: Any, keep: Any,
) -> Any:  # fmt: skip
    """One step on rows ``at`` to ``at + rows`` of the order (0: of the data); returns the mean loss before it.

    ``crow`` and ``col`` are 0 for dense rows. For CSR rows ``x`` holds their values, the first layer's weights lie
    feature by feature (``[d, c]``), and ``keep`` must be 1.
    """
    pad = 1 if rows == 1 else (rows + 15) // 16 * 16
    last = len(layers) - 1
    if crow == 0:
        _gather(layers[0], x, order, at, rows, pad)
    for n in range(last + 1):
        if n == 0 and crow != 0:
            _forward_sparse(layers[0], crow, col, x, order, at, rows, pad, scratch)
        elif pad == 1:
            _forward_one(layers[n])
        else:
            if n > 0:
                _to_panels(layers[n], rows, pad)
            _forward(layers[n], pad)
        _activate(layers[n, ACTIVATION], slopes[n], layers[n, GIVEN], layers[n, OUT] * pad)
    loss = _loss(kind, layers[last, GIVEN], layers[last, OUT], y, order, at, rows, pad, lr)
    if kind == CROSS_ENTROPY and loss == -1.0:
        return loss
    for n in range(last, -1, -1):
        if layers[n, ACTIVATION] != NONE:
            _derive(
                layers[n, ACTIVATION], slopes[n], layers[n, DELTA], layers[n, GIVEN], layers[n, OUT] * pad
            )
        below = layers[n - 1, DELTA] if n > 0 else 0
        if n == 0 and crow != 0:
            _update_sparse(layers[0], crow, col, x, order, at, rows, pad, scratch)
        elif pad == 1:
            _backward_one(layers[n], below, keep, scratch)
        else:
            _backward(layers[n], below, rows, pad, keep, scratch)
    return loss
