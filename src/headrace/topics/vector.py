"""Sixteen float32 lanes as a numba value, so that a kernel says which vector instructions it wants.

numba leaves vectorising to LLVM, which prefers 256-bit registers and cannot keep an array that lives across
a loop in registers. `Lanes` is a numba type whose value is one LLVM vector ``<16 x float>``; the functions
here load, combine and store such values and may be called only inside compiled code. On a processor with
narrower registers LLVM splits every operation, so nothing here depends on AVX-512.

Arrays are C-contiguous and addressed by element, ``flat[start : start + 16]``; ``flat`` is an array, or its address
from `headrace.engine.tiles`. Inner loops take addresses: numba counts references to every array that is passed from
function to function, which costs more than the work on a short document, and guards every index against being
negative. Nothing here is checked: the caller pads its arrays to multiples of 16 and keeps them alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np import arrayobj

WIDTH = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)


class Lanes(types.Type):
    """The numba type of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__("float32x16")


LANES = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _VECTOR)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [ir.Constant(_FLOAT, value)] * WIDTH)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any, to: Any) -> Any:
    """A pointer of type ``to`` to the four-byte element ``start``."""
    if isinstance(kind, types.Integer):
        data = array
    else:
        data = builder.ptrtoint(arrayobj.make_array(kind)(context, builder, array).data, start.type)
    return builder.inttoptr(builder.add(data, builder.shl(start, start.type(2))), to)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32"), args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    # fmuladd and not fma: on a processor without the instruction, fma would be a library call per lane.
    return _call(builder, "fmuladd", a, b, c)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT, len(lanes)), [ir.Constant(_INT, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def number_at(typing: Any, flat: Any, start: Any) -> Any:
    """Element ``start`` of float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(
            _pointer(context, builder, signature.args[0], args[0], args[1], _FLOAT.as_pointer())
        )

    return types.float32(flat, types.intp), codegen


@intrinsic
def put_number(typing: Any, flat: Any, start: Any, value: Any) -> Any:
    """Write element ``start`` of float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOAT.as_pointer())
        builder.store(args[2], pointer)
        return context.get_dummy_value()

    return types.void(flat, types.intp, types.float32), codegen


@intrinsic
def index_at(typing: Any, flat: Any, start: Any) -> Any:
    """Element ``start`` of int32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(
            _pointer(context, builder, signature.args[0], args[0], args[1], _INT.as_pointer())
        )
        return builder.sext(value, args[1].type)

    return types.intp(flat, types.intp), codegen


@intrinsic
def put_index(typing: Any, flat: Any, start: Any, value: Any) -> Any:
    """Write element ``start`` of int32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _INT.as_pointer())
        builder.store(builder.trunc(args[2], _INT), pointer)
        return context.get_dummy_value()

    return types.void(flat, types.intp, types.intp), codegen


@intrinsic
def load(typing: Any, flat: Any, start: Any) -> Any:
    """The sixteen elements of ``flat`` from ``start``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _VECTOR.as_pointer())
        return builder.load(pointer, align=4)

    return LANES(flat, types.intp), codegen


@intrinsic
def store(typing: Any, flat: Any, start: Any, value: Any) -> Any:
    """Write sixteen elements of ``flat`` from ``start``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _VECTOR.as_pointer())
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(flat, types.intp, LANES), codegen


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """Sixteen times the same number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), args[0], ir.Constant(_INT, 0))
        return _shuffle(builder, one, one, [0] * WIDTH)

    return LANES(types.float32), codegen


@intrinsic
def broadcast(typing: Any, flat: Any, start: Any) -> Any:
    """Sixteen times element ``start`` of float32 numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(
            _pointer(context, builder, signature.args[0], args[0], args[1], _FLOAT.as_pointer())
        )
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INT, 0))
        return _shuffle(builder, one, one, [0] * WIDTH)

    return LANES(flat, types.intp), codegen


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a × b + c."""
    return LANES(LANES, LANES, LANES), lambda context, builder, signature, args: _fma(builder, *args)


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def mul(typing: Any, a: Any, b: Any) -> Any:
    """a × b."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def div(typing: Any, a: Any, b: Any) -> Any:
    """a ÷ b."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def distance(typing: Any, a: Any, b: Any) -> Any:
    """|a − b|."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "fabs", builder.fsub(*args))

    return LANES(LANES, LANES), codegen


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of a and b, lane by lane."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: _call(builder, "maxnum", *args)


def _fold(builder: Any, value: Any, combine: Any) -> Any:
    """Combine all lanes in a tree; a fixed order, so that equal inputs give equal bits."""
    for step in (8, 4, 2, 1):
        lanes = [(lane + step) % WIDTH for lane in range(WIDTH)]
        value = combine(value, _shuffle(builder, value, value, lanes))
    return builder.extract_element(value, ir.Constant(_INT, 0))


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(LANES), codegen


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """The largest lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold(builder, args[0], lambda a, b: _call(builder, "maxnum", a, b))

    return types.float32(LANES), codegen


@intrinsic
def store_totals(typing: Any, flat: Any, start: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """``flat[start : start + 4]`` = the sums of the lanes of a, b, c and d."""

    def halve(builder: Any, x: Any, y: Any, size: int) -> Any:
        # Groups of `size` lanes: even groups of both sources, plus odd groups of both sources.
        groups = range(0, WIDTH, 2 * size)
        even = [lane + base for base in (0, WIDTH) for g in groups for lane in range(g, g + size)]
        odd = [lane + size for lane in even]
        return builder.fadd(_shuffle(builder, x, y, even), _shuffle(builder, x, y, odd))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = halve(builder, halve(builder, args[2], args[3], 1), halve(builder, args[4], args[5], 1), 1)
        # Now lanes 4i to 4i + 3 hold four partial sums of source i.
        for _ in range(2):
            width = x.type.count
            even = list(range(0, width, 2))
            x = builder.fadd(
                _shuffle(builder, x, x, even), _shuffle(builder, x, x, [lane + 1 for lane in even])
            )
        kind = ir.VectorType(_FLOAT, 4).as_pointer()
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], kind)
        builder.store(x, pointer, align=4)
        return context.get_dummy_value()

    return types.void(flat, types.intp, LANES, LANES, LANES, LANES), codegen


def _exp(builder: Any, x: Any) -> Any:
    """e^x for x in [−87, 0], to 2e-7 relative: 2^n times a polynomial on [−ln 2 / 2, ln 2 / 2]."""
    n = _call(builder, "rint", builder.fmul(x, _constant(1.4426950408889634)))
    r = _fma(builder, n, _constant(-0.693145751953125), x)
    r = _fma(builder, n, _constant(-1.428606765330187e-06), r)
    p = _constant(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = _fma(builder, p, r, _constant(coefficient))
    bits = builder.add(builder.fptosi(n, _INTS), ir.Constant(_INTS, [ir.Constant(_INT, 127)] * WIDTH))
    shifted = builder.shl(bits, ir.Constant(_INTS, [ir.Constant(_INT, 23)] * WIDTH))
    return builder.fmul(p, builder.bitcast(shifted, _VECTOR))


# exp(ψ(x)) without a logarithm: ψ(x) = ψ(x + 4) − 1/x − 1/(x+1) − 1/(x+2) − 1/(x+3), and for z = x + 3.5
# exp(ψ(x + 4)) = z + 1/(24 z) − 37/(5760 z³) + 10313/(2903040 z⁵) − …, whose next term is below 2e-7 of z.
# With p = x (x + 3) the four fractions are (2x + 3)(2p + 2) / (p (p + 2)), and one division by z p (p + 2)
# serves both lines.


def _digamma_parts(builder: Any, x: Any) -> tuple[Any, Any]:
    """(exp(ψ(x + 4)), ψ(x + 4) − ψ(x))."""
    # Above 1e6 the fractions stay at 4e-6, a step or two of float32; their product would leave its range.
    near = _call(builder, "minnum", _call(builder, "maxnum", x, _constant(1e-12)), _constant(1e6))
    z = builder.fadd(x, _constant(3.5))
    p = builder.fmul(near, builder.fadd(near, _constant(3.0)))
    below = builder.fmul(p, builder.fadd(p, _constant(2.0)))
    above = builder.fmul(
        _fma(builder, near, _constant(2.0), _constant(3.0)), _fma(builder, p, _constant(2.0), _constant(2.0))
    )
    inverse = builder.fdiv(_constant(1.0), builder.fmul(z, below))
    power = builder.fmul(builder.fmul(above, z), inverse)
    per_z = builder.fmul(below, inverse)
    w = builder.fmul(per_z, per_z)
    series = _fma(builder, w, _constant(10313 / 2903040), _constant(-37 / 5760))
    series = _fma(builder, series, w, _constant(1 / 24))
    return _fma(builder, series, per_z, z), power


@intrinsic
def exp_digamma(typing: Any, a: Any, shift: Any) -> Any:
    """exp(ψ(a) + shift), for shift ≤ ψ(a + 4) − ψ(a); what is below e^−87 stays there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, power = _digamma_parts(builder, args[0])
        exponent = _call(builder, "maxnum", builder.fsub(args[1], power), _constant(-87.0))
        return builder.fmul(base, _exp(builder, exponent))

    return LANES(LANES, LANES), codegen


@intrinsic
def digamma_power(typing: Any, a: Any) -> Any:
    """ψ(a + 4) − ψ(a)."""
    return LANES(LANES), lambda context, builder, signature, args: _digamma_parts(builder, args[0])[1]


@intrinsic
def transpose(
    typing: Any, table: Any, offsets: Any, first: Any, column: Any, out: Any, start: Any, stride: Any
) -> Any:
    """``out[start + i·stride + j] = table[offsets[first + j] + column + i]`` for i, j in 0..15.

    Sixteen rows are loaded, turned in registers by four rounds of interleaving, and stored as sixteen
    columns.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        t_table, t_offsets, _, _, t_out, _, _ = signature.args
        a_table, a_offsets, a_first, a_column, a_out, a_start, a_stride = args
        rows = []
        for j in range(WIDTH):
            number = builder.add(a_first, a_first.type(j))
            where = _pointer(context, builder, t_offsets, a_offsets, number, _INT.as_pointer())
            offset = builder.sext(builder.load(where), a_column.type)
            pointer = _pointer(
                context, builder, t_table, a_table, builder.add(offset, a_column), _VECTOR.as_pointer()
            )
            rows.append(builder.load(pointer, align=4))
        for size in (1, 2, 4, 8):
            low = [lane if not lane & size else lane - size + WIDTH for lane in range(WIDTH)]
            high = [lane + size if not lane & size else lane + WIDTH for lane in range(WIDTH)]
            for i in range(WIDTH):
                if not i & size:
                    a, b = rows[i], rows[i + size]
                    rows[i], rows[i + size] = (_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
        for i in range(WIDTH):
            at = builder.add(a_start, builder.mul(a_stride, a_stride.type(i)))
            builder.store(
                rows[i], _pointer(context, builder, t_out, a_out, at, _VECTOR.as_pointer()), align=4
            )
        return context.get_dummy_value()

    i = types.intp
    return types.void(table, offsets, i, i, out, i, i), codegen
