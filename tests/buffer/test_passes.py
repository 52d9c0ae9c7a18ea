"""Passes: whatever the sizes, every row once, equal steps on every rank, batches that tile the buffers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.passes import PassShape, pass_ranges, permuted_blocks, row_numbers
from headrace.errors import OptionError


@st.composite
def shapes(draw: st.DrawFn) -> list[PassShape]:
    """One shape for each rank of a world."""
    world = draw(st.integers(1, 5))
    rows = draw(st.integers(world, 300))
    common = {
        "rows": rows,
        "batch_size": draw(st.integers(1, 40)),
        "block": draw(st.integers(0, 70)),
        "buffer_rows": draw(st.integers(0, 120)),
        "seed": draw(st.integers(0, 5)),
    }
    return [PassShape(**common, rank=rank, world_size=world) for rank in range(world)]


@given(shapes(), st.integers(0, 3))
def test_every_row_once_over_ranks_and_buffers(world: list[PassShape], pass_index: int) -> None:
    rows = np.concatenate([row_numbers(r) for shape in world for r in pass_ranges(shape, pass_index)])
    assert sorted(rows.tolist()) == list(range(world[0].rows))


@given(shapes())
def test_every_rank_makes_the_same_steps(world: list[PassShape]) -> None:
    assert len({tuple(shape.steps()) for shape in world}) == 1


@given(shapes())
def test_batches_tile_every_buffer(world: list[PassShape]) -> None:
    for shape in world:
        for k, (first, last) in enumerate(pairwise(shape.cuts)):
            bounds = shape.bounds(k)
            assert [p for a, b in bounds for p in range(a, b)] == list(range(last - first))
            sizes = [b - a for a, b in bounds]
            assert all(size == shape.batch_size for size in sizes[:-1])
            assert 1 <= sizes[-1] <= shape.batch_size + (shape.world_size > 1)


@given(shapes())
def test_only_the_last_buffer_may_end_in_a_short_batch(world: list[PassShape]) -> None:
    for shape in world:
        for first, last in pairwise(shape.cuts[:-1]):
            assert (last - first) % shape.batch_size == 0


@given(shapes())
def test_buffers_hold_no_more_than_allowed(world: list[PassShape]) -> None:
    for shape in world:
        limit = max(shape.buffer_rows, shape.batch_size) if shape.buffer_rows else shape.rows
        # One row more where the ranks' parts differ by one.
        assert all(last - first <= limit + (shape.world_size > 1) for first, last in pairwise(shape.cuts))


def test_drop_last_leaves_whole_batches_only() -> None:
    shape = PassShape(rows=103, batch_size=10, drop_last=True)
    assert [b - a for a, b in shape.bounds(0)] == [10] * 10


def test_blocks_keep_neighbours_together_and_passes_differ() -> None:
    shape = PassShape(rows=6400, batch_size=64, block=64, buffer_rows=1000, seed=3)
    ranges = permuted_blocks(shape, 0)
    lengths = ranges[:, 1] - ranges[:, 0]
    assert lengths.max() <= 64
    assert (lengths == 64).mean() > 0.8
    again, other = pass_ranges(shape, 0), pass_ranges(shape, 1)
    assert all((a == b).all() for a, b in zip(again, pass_ranges(shape, 0), strict=True))
    assert set(map(tuple, again[0])) != set(map(tuple, other[0]))


def test_membership_of_buffers_is_uniform_over_passes() -> None:
    # Each block falls into the first of 8 buffers with probability 1/8; 400 passes give 50 ± 6.6 visits, and
    # six standard deviations bound a false alarm over 101 blocks below 1e-6.
    shape = PassShape(rows=800, batch_size=10, block=8, buffer_rows=100, seed=0)
    visits = np.zeros(800)
    for k in range(400):
        visits[row_numbers(pass_ranges(shape, k)[0])] += 1
    assert abs(visits - 50).max() < 6 * 6.7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rows": 3, "world_size": 4}, "3 rows cannot be shared by 4 ranks"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_shapes_are_refused_in_words(change: dict[str, int], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        PassShape(**{"rows": 100, "batch_size": 10, **change})
