"""The compiled pass over a block of squared distances; `headrace.kernel.compiled` says when it is used.

Needs numba, and imports it at once: import this file where it is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

single = np.float32
# Not all of "fast": an infinite distance is a distance.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
}
LAST = single(87.0)
"""e to its negative is about the smallest normal number of float32; beyond it kernel values stay there."""


def _compiled(function: Any) -> Any:
    try:
        return njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no folder for a cache: compile in every process
        return njit(**OPTIONS)(function)


@njit(inline="always", **OPTIONS)
def _exponential(bits, t, i, r, factor):
    """t[i] = factor·e^(−r) for 0 ≤ r ≤ LAST, as 2^k·p(f) with |f| ≤ ½; p's coefficients are (ln 2)^i / i!."""
    y = r * single(-1.4426950408889634)
    k = np.floor(y + single(0.5))
    f = y - k
    p = single(1.5403530e-4)
    p = p * f + single(1.3333558e-3)
    p = p * f + single(9.6181291e-3)
    p = p * f + single(5.5504109e-2)
    p = p * f + single(2.4022651e-1)
    p = p * f + single(6.9314718e-1)
    t[i] = factor * (p * f + single(1))
    bits[i] += np.int32(k) << np.int32(23)


@_compiled
def kernel_values(t, code):
    """Squared distances into kernel values, in place; numbers of kernels as in `headrace.kernel.functions`."""
    bits = t.view(np.int32)
    one, square = single(1), LAST * LAST
    if code == 0:
        for i in range(t.size):
            _exponential(bits, t, i, min(max(t[i], single(0)), LAST), one)
    elif code == 1:
        for i in range(t.size):
            _exponential(bits, t, i, np.sqrt(min(max(t[i], single(0)), square)), one)
    elif code == 2:
        for i in range(t.size):
            t[i] = one / (one + max(t[i], single(0)))
    elif code == 3:
        for i in range(t.size):
            r = np.sqrt(min(max(t[i], single(0)), square))
            _exponential(bits, t, i, r, one + r)
    else:
        for i in range(t.size):
            x = min(max(t[i], single(0)), square)
            r = np.sqrt(x)
            _exponential(bits, t, i, r, one + r + x * single(1 / 3))
