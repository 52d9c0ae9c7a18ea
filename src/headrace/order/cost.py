"""Which way of computing is cheapest for a layer: pure arithmetic on sizes, in multiply-adds per example.

A layer's example gradient is Σ_p δ_p a_pᵀ over P positions, with o outputs and i inputs. Its sketch is
R_oᵀ (Σ_p δ_p a_pᵀ) R_i, and the three products may be taken in any order. Its inner products with the other examples of
the batch come from pairs of positions, or from the gradients themselves.

Shapes: B examples, P positions, o rows and i columns of the weight, k_o × k_i the sketch.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Sizes(NamedTuple):
    """A layer as the cost functions see it."""

    batch: int
    positions: int
    rows: int
    columns: int


def split_k(
    k: int, rows: int, columns: int, convolution: bool = False, table: bool = False
) -> tuple[int, int]:
    """k as k_o × k_i for a weight of rows × columns.

    The longer side is the costly one (it is projected at every position), so it gets the smaller number: 8, or 4 for
    a convolution with so few channels that projecting to 8 numbers would cost more than a tenth of its training. The
    error depends on 1/k_o + 1/k_i, whichever is which. In drift, 32 × 8 and 64 × 4 cannot be told from 16 × 16 on
    digits and on LeNet (two seeds each; benchmarks/bench_order_quality.py). The rows of a ``table`` are looked up for
    nothing.
    """
    wanted = 4 if convolution and 8 * (rows + columns) > 0.1 * 3 * rows * columns else 8
    wanted = min(wanted, math.isqrt(k))
    chosen = next(c for c in range(wanted, 0, -1) if k % c == 0)
    rows_long = rows > columns > chosen and not convolution and not table
    return (chosen, k // chosen) if rows_long else (k // chosen, chosen)


UNFOLD = 8  # multiply-adds that cutting out one number of a patch costs: memory traffic, measured on a CPU
BATCHED = 6  # what a multiply-add costs in one small product per example, beside one product for all: measured as well


def sketch_costs(
    sizes: Sizes, k_rows: int, k_columns: int, unfold: bool = False, touched: int | None = None
) -> dict[str, int]:
    """Multiply-adds per example for the four orders of contraction.

    ``unfold``: the inputs are cut-out patches; the first two ways can project them without cutting them out, and
    ``touched`` says how many of a patch's numbers one column of the projection looks at (None: all).
    """
    _, p, o, i = sizes
    patches = UNFOLD * p * i if unfold else 0
    inputs = p * (i if touched is None else touched) * k_columns
    return {
        # project both sides, then sum over positions
        "sketch": p * o * k_rows + inputs + BATCHED * p * k_rows * k_columns,
        # project the inputs, sum over positions, project the outputs
        "inputs": inputs + BATCHED * p * o * k_columns + o * k_rows * k_columns,
        # project the outputs, sum over positions, project the inputs
        "outputs": patches + p * o * k_rows + BATCHED * p * i * k_rows + i * k_rows * k_columns,
        # the example gradient itself, then project both sides
        "materialise": patches + BATCHED * p * o * i + i * o * k_rows + i * k_rows * k_columns,
    }


def choose_sketch(
    sizes: Sizes, k_rows: int, k_columns: int, unfold: bool = False, touched: int | None = None
) -> str:
    """The cheapest order of contraction for a sketch."""
    costs = sketch_costs(sizes, k_rows, k_columns, unfold, touched)
    return min(costs, key=lambda name: costs[name])


def gram_costs(sizes: Sizes) -> dict[str, int]:
    """Multiply-adds per example for the inner products with all B examples of the batch."""
    b, p, o, i = sizes
    return {
        # (a_p·a_q)(δ_p·δ_q) for every pair of positions
        "ghost": b * p * p * (o + i + 1),
        # the example gradients, then their products
        "materialise": p * o * i + b * o * i,
    }


def choose_gram(sizes: Sizes, limit: int = 1 << 27) -> str:
    """The cheaper way to a Gram matrix; never more than ``limit`` numbers of gradients at once."""
    b, _, o, i = sizes
    costs = gram_costs(sizes)
    return "materialise" if costs["materialise"] < costs["ghost"] and b * o * i <= limit else "ghost"


def choose_tokens_gram(batch: int, positions: int, distinct: int, columns: int) -> str:
    """The same for an embedding: pairs of tokens, or gradients over the distinct tokens of the batch."""
    ghost = batch * positions * positions * (columns + 1)
    return "materialise" if batch * distinct * columns < ghost else "ghost"
