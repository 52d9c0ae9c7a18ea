"""A whole grant in one compiled call: steps, merges of a replica, and the worker's counters on the board.

The thread holds the interpreter lock before and after, never between: thirty products a step would otherwise be
thirty chances to wait for the other workers. The order of the lines is that of `runner`: rows are counted after
the update or the merge that carries them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headrace.engine.chain_kernel import CROSS_ENTROPY, step
from headrace.engine.hogbatch.shared import BEAT, BUCKETS, CANCEL, MERGES, ROWS, STALENESS, UPDATES
from headrace.engine.tiles import address, fresh, number_at, put_number

PIECE = 1 << 14
"""Numbers of a merge at a time: three pieces stay in the first two caches."""

_compiled: Any = njit(nogil=True, cache=True)


@_compiled
def merge(pairs: Any) -> None:
    """``shared += local - snapshot``, and ``local = snapshot =`` that sum, by rows of addresses and a count."""
    for p in range(len(pairs)):
        shared, local, snapshot, count = pairs[p, 0], pairs[p, 1], pairs[p, 2], pairs[p, 3]
        for start in range(0, count, PIECE):
            h, w, s = shared + start * 4, local + start * 4, snapshot + start * 4
            for i in range(min(PIECE, count - start)):
                total = number_at(h, i) + (number_at(w, i) - number_at(s, i))
                put_number(h, i, total)
                put_number(w, i, total)
                put_number(s, i, total)


@_compiled
def _others(cells: Any, me: Any) -> Any:
    """Updates made so far by all workers but this one."""
    total, width = 0, cells.shape[1]
    for worker in range(len(cells)):
        if worker != me:
            total += fresh(address(cells), worker * width + UPDATES)
    return total


@_compiled
def _saw(cells: Any, me: Any, updates: Any) -> None:
    bucket = 0
    while updates > 0:
        updates >>= 1
        bucket += 1
    cells[me, STALENESS + min(BUCKETS - 1, bucket)] += 1


@_compiled
def _merged(pairs: Any, canary: Any, cells: Any, me: Any, seen: Any, done: Any) -> Any:
    now = _others(cells, me)
    _saw(cells, me, now - seen)
    merge(pairs)
    canary[0] += 1.0
    cells[me, MERGES] += 1
    cells[me, ROWS] = done
    return now


@_compiled
def train(
    layers: Any, slopes: Any, kind: Any, scratch: Any, crow: Any, col: Any, x: Any, y: Any, order: Any,
    start: Any, stop: Any, batch: Any, lr: Any, keep: Any, pairs: Any, canary: Any, cells: Any, me: Any, token: Any,
    merge_every: Any, bound: Any, sample_every: Any,
) -> Any:  # fmt: skip
    """Steps over rows ``start`` to ``stop`` of the order, until done or the board names another token.

    Returns how many rows were used, the sum of their losses, and whether a label was out of range. ``pairs``
    is empty for direct updates; ``bound`` is −1 for none.
    """
    done, total, since = 0, 0.0, 0
    seen, width, bad = _others(cells, me), cells.shape[1], False
    for steps in range(1, 1 + (stop - start + batch - 1) // batch):
        at = start + (steps - 1) * batch
        if fresh(address(cells), me * width + CANCEL) != token:
            break
        rows = min(batch, stop - at)
        loss = step(layers, slopes, kind, scratch, crow, col, x, y, order, at, rows, lr, keep)
        if kind == CROSS_ENTROPY and loss == -1.0:
            bad = True
            break
        total += loss * rows
        done += rows
        since += 1
        cells[me, UPDATES] += 1
        cells[me, BEAT] += 1
        if len(pairs) == 0:
            cells[me, ROWS] = done
            if since == sample_every or at + rows == stop:
                now = _others(cells, me)
                _saw(cells, me, int(np.rint((now - seen) / since)))
                seen, since = now, 0
        elif steps % merge_every == 0 or (bound >= 0 and _others(cells, me) - seen >= bound):
            seen = _merged(pairs, canary, cells, me, seen, done)
    if len(pairs) and cells[me, ROWS] < done:
        _merged(pairs, canary, cells, me, seen, done)
    return done, total, bad
