"""Numbers below float32's smallest normal one, 1.2e-38, are zero inside a kernel.

Intel's cores leave their usual path for every operation that reads or makes such a number, for some 150 cycles; a Zen 5
hardly does. `flush_denormals` sets the processor's two bits for it (denormal results become zero, denormal operands
count as zero) and returns what was set before; `restore` puts that back. The mode belongs to the thread: a kernel that
left it changed would change the arithmetic of its caller.

On processors other than x86-64 both do nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BOTH = 0x8040
"""Flush to zero is bit 15 of MXCSR, denormals are zero bit 6."""
_INT = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def _has_the_mode(builder: Any) -> bool:
    return str(builder.module.triple).startswith(("x86_64", "amd64"))


def _control(builder: Any, name: str, place: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTES])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
    builder.call(function, [builder.bitcast(place, _BYTES)])


@intrinsic
def flush_denormals(typing: Any) -> Any:
    """Let denormals be zero on this thread; returns the mode for `restore`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not _has_the_mode(builder):
            return _INT(0)
        place = cgutils.alloca_once(builder, _INT)
        _control(builder, "stmxcsr", place)
        before = builder.load(place)
        builder.store(builder.or_(before, _INT(_BOTH)), place)
        _control(builder, "ldmxcsr", place)
        return before

    return types.int32(), codegen


@intrinsic
def restore(typing: Any, before: Any) -> Any:
    """The mode as it was before `flush_denormals`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _has_the_mode(builder):
            place = cgutils.alloca_once(builder, _INT)
            # Exceptions noted meanwhile belong to the kernel; the caller's flags come back with its mode.
            builder.store(args[0], place)
            _control(builder, "ldmxcsr", place)
        return context.get_dummy_value()

    return types.void(types.int32), codegen
