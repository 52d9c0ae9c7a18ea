"""Register tiles of matrix products as numba intrinsics, over memory given by addresses.

One tile is ``rows × 16·vectors`` numbers of float32 that stay in registers while ``count`` products of a column
of A with a row of B are added. A is broadcast number by number and read with any two strides, so one layout of
the weights serves all three products of a layer; B and C are read by vectors of sixteen. numba leaves
vectorising to LLVM, which does not keep such a block in registers; written as LLVM vectors it does. Where
registers are narrower LLVM splits each operation.

Addresses and strides are in bytes. Nothing is checked: the caller pads its memory and keeps it alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

WIDTH = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_LONG = ir.IntType(64)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, WIDTH), [0] * WIDTH))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    # fmuladd and not fma: on a processor without the instruction, fma would be a library call per lane.
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32"), (a, b, c)
    )


def _row(builder: Any, base: Any, stride: Any, row: int) -> Any:
    """``base + row · stride``; a constant stride becomes part of the instruction."""
    if isinstance(stride, int):
        return builder.add(base, _LONG(row * stride))
    return base if row == 0 else builder.add(base, builder.mul(stride, _LONG(row)))


def _loop(builder: Any, count: Any, carried: list[Any], body: Any) -> list[Any]:
    """``carried = body(carried)`` for ``count`` ≥ 1 times, in registers."""
    before = builder.basic_block
    head = builder.append_basic_block("tile")
    after = builder.append_basic_block("tiled")
    builder.branch(head)
    builder.position_at_end(head)
    phis = [builder.phi(value.type) for value in (_LONG(0), *carried)]
    for phi, value in zip(phis, (_LONG(0), *carried), strict=True):
        phi.add_incoming(value, before)
    moved = [builder.add(phis[0], _LONG(1)), *body(phis[1:])]
    for phi, value in zip(phis, moved, strict=True):
        phi.add_incoming(value, head)
    builder.cbranch(builder.icmp_signed("<", moved[0], count), head, after)
    builder.position_at_end(after)
    return moved[1:]


def make_tile(rows: int, vectors: int, *, bias: bool, a_row_bytes: int | None = None) -> Any:
    """A tile function ``(a, a_row, a_step, b, b_step, c, c_row, count, keep, first)``.

    With ``bias``, C = first[row] + A·B, where ``first`` is the address of one number per row; else
    C = keep · C + A·B. ``a_row_bytes`` fixes ``a_row``.
    """

    @intrinsic
    def tile(
        typing: Any,
        a: Any,
        a_row: Any,
        a_step: Any,
        b: Any,
        b_step: Any,
        c: Any,
        c_row: Any,
        count: Any,
        keep: Any,
        first: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_row, a_step, b, b_step, c, c_row, count, keep, first = args
            stride = a_row if a_row_bytes is None else a_row_bytes
            places = [
                [builder.add(_row(builder, c, c_row, r), _LONG(64 * v)) for v in range(vectors)]
                for r in range(rows)
            ]
            if bias:
                begins = [
                    [_splat(builder, _load(builder, _row(builder, first, 4, r), _FLOAT))] * vectors
                    for r in range(rows)
                ]
            else:
                kept = _splat(builder, keep)
                begins = [
                    [builder.fmul(kept, _load(builder, place, _VECTOR)) for place in line] for line in places
                ]

            def body(carried: list[Any]) -> list[Any]:
                at_a, at_b, *sums = carried
                columns = [_load(builder, builder.add(at_b, _LONG(64 * v)), _VECTOR) for v in range(vectors)]
                new = []
                for r in range(rows):
                    one = _splat(builder, _load(builder, _row(builder, at_a, stride, r), _FLOAT))
                    new += [_fma(builder, one, columns[v], sums[r * vectors + v]) for v in range(vectors)]
                return [builder.add(at_a, a_step), builder.add(at_b, b_step), *new]

            flat = [value for line in begins for value in line]
            _, _, *sums = _loop(builder, count, [a, b, *flat], body)
            for place, value in zip([p for line in places for p in line], sums, strict=True):
                _store(builder, value, place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, types.float32, types.intp), codegen

    return tile


def make_dots(rows: int) -> Any:
    """``(a, a_row, x, out, count)``: ``out[row]`` = the sum over ``16 · count`` numbers of row · x."""

    @intrinsic
    def dots(typing: Any, a: Any, a_row: Any, x: Any, out: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_row, x, out, count = args
            zero = ir.Constant(_VECTOR, [ir.Constant(_FLOAT, 0.0)] * WIDTH)

            def body(carried: list[Any]) -> list[Any]:
                at_a, at_x, *sums = carried
                column = _load(builder, at_x, _VECTOR)
                new = [
                    _fma(builder, _load(builder, _row(builder, at_a, a_row, r), _VECTOR), column, sums[r])
                    for r in range(rows)
                ]
                return [builder.add(at_a, _LONG(64)), builder.add(at_x, _LONG(64)), *new]

            _, _, *sums = _loop(builder, count, [a, x, *[zero] * rows], body)
            for r, value in enumerate(sums):
                for step in (8, 4, 2, 1):
                    lanes = [ir.Constant(_INT, (lane + step) % WIDTH) for lane in range(WIDTH)]
                    turned = builder.shuffle_vector(
                        value, value, ir.Constant(ir.VectorType(_INT, WIDTH), lanes)
                    )
                    value = builder.fadd(value, turned)
                total = builder.extract_element(value, ir.Constant(_INT, 0))
                _store(builder, total, _row(builder, out, 4, r))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return dots


@intrinsic
def outer4(
    typing: Any, w0: Any, w1: Any, w2: Any, w3: Any, d0: Any, d1: Any, d2: Any, d3: Any,
    x: Any, below: Any, count: Any, keep: Any,
) -> Any:  # fmt: skip
    """For four rows of weights: ``below += d · w``, then ``w = keep · w + d · x``, in one pass."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ws, x, below, count = list(args[:4]), args[8], args[9], args[10]
        ds = [_splat(builder, d) for d in args[4:8]]
        kept = _splat(builder, args[11])

        def body(carried: list[Any]) -> list[Any]:
            *at_w, at_x, at_below = carried
            column, total = _load(builder, at_x, _VECTOR), _load(builder, at_below, _VECTOR)
            for at, d in zip(at_w, ds, strict=True):
                w = _load(builder, at, _VECTOR)
                total = _fma(builder, d, w, total)
                _store(builder, _fma(builder, d, column, builder.fmul(kept, w)), at)
            _store(builder, total, at_below)
            return [builder.add(at, _LONG(64)) for at in carried]

        _loop(builder, count, [*ws, x, below], body)
        return context.get_dummy_value()

    i, f = types.intp, types.float32
    return types.void(i, i, i, i, f, f, f, f, i, i, i, f), codegen


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Where the elements of an array lie, as a number. Whoever uses it keeps the array alive."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


@intrinsic
def number_at(typing: Any, base: Any, index: Any) -> Any:
    """Element ``index`` of float32 numbers at the address ``base``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # An address computed by numba as a number would hide from LLVM that a loop walks through memory.
        return builder.load(builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]]), align=4)

    return types.float32(types.intp, types.intp), codegen


@intrinsic
def put_number(typing: Any, base: Any, index: Any, value: Any) -> Any:
    """Write element ``index`` of float32 numbers at the address ``base``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]])
        builder.store(args[2], at, align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), codegen


@intrinsic
def whole_at(typing: Any, base: Any, index: Any) -> Any:
    """Element ``index`` of int64 numbers at the address ``base``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(args[0], _LONG.as_pointer()), [args[1]]), align=8)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def fresh(typing: Any, base: Any, index: Any) -> Any:
    """Element ``index`` of int64 numbers that other threads write: read from memory at every call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.gep(builder.inttoptr(args[0], _LONG.as_pointer()), [args[1]])
        return builder.load_atomic(at, "monotonic", 8)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def power_of_two(typing: Any, n: Any) -> Any:
    """2ⁿ for a whole n from −126 to 127."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.add(args[0], _INT(127)), _INT(23))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(types.int32), codegen
