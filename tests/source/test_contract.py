"""One suite that every source passes: the same rows, whatever they were opened from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.loader import Loader
from headrace.source import check_finite, open_source
from headrace.types import InMemory, Source

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def dense(values: Tensor) -> Tensor:
    return values.to_dense() if values.layout == torch.sparse_csr else values


def expected() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 4, 40))


def test_columns_describe_what_is_read(source: Source) -> None:
    assert isinstance(source, Source)
    assert len(source) == 40
    x, y = source.columns
    assert (x.name, x.role, x.dtype, x.shape) == ("x", "input", torch.float32, (3,))
    assert (y.name, y.role, y.dtype, y.shape) == ("y", "target", torch.int64, ())
    read = source.read(range(3, 9))
    assert list(read) == ["x", "y"]
    assert [v.dtype for v in read.values()] == [torch.float32, torch.int64]


def test_ranges_give_the_rows_as_they_lie(source: Source) -> None:
    x, y = expected()
    for rows in (range(0, 40), range(7, 8), range(5, 31), range(0, 0)):
        read = source.read(rows)
        torch.testing.assert_close(dense(read["x"]), x[rows.start : rows.stop], rtol=1e-6, atol=0)
        assert read["y"].equal(y[rows.start : rows.stop])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.integers(0, 39), max_size=60))
def test_rows_come_in_the_order_asked(source: Source, rows: list[int]) -> None:
    x, y = expected()
    read = source.read(torch.tensor(rows, dtype=torch.int64))
    torch.testing.assert_close(dense(read["x"]), x[rows], rtol=1e-6, atol=0)
    assert read["y"].equal(y[rows])


def test_reading_into_given_memory(source: Source) -> None:
    if source.columns[0].sparse:
        return
    out = {c.name: torch.zeros((5, *c.shape), dtype=c.dtype) for c in source.columns}
    kept = dict(out)
    assert source.read(range(10, 15), out) is out
    assert all(out[name] is kept[name] for name in out)
    torch.testing.assert_close(out["x"], expected()[0][10:15], rtol=1e-6, atol=0)


def test_tensors_are_all_rows(source: Source) -> None:
    if isinstance(source, InMemory):
        tensors = source.tensors()
        assert dense(tensors["x"]).shape == (40, 3)
        assert tensors["y"].equal(expected()[1])


def test_opening_a_source_gives_it_back(source: Source) -> None:
    assert open_source(source) is source
    check_finite(source)
    assert "40 rows" in repr(source)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_every_format_passes_through_buffers(source: Source, on_error: Any) -> None:
    """Several buffers a pass: every row once, beside its own label, in another order the next time."""
    x, y = expected()
    known = {round(float(row.sum()), 4): int(label) for row, label in zip(x, y, strict=True)}
    orders = []
    with Loader(source, 4, buffer=13 * 20, device="cpu", on_error=on_error) as batches:
        assert batches.plan["residence"] == "buffered"
        for _ in range(2):
            seen = [
                (round(float(row.sum()), 4), int(label))
                for rows, labels in batches
                for row, label in zip(dense(rows), labels, strict=True)
            ]
            assert dict(seen) == known
            assert len(seen) == 40
            orders.append(seen)
    assert orders[0] != orders[1]
