"""Reading ranges of files into slots, byte for byte: direct, through the page cache, and from elsewhere."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.buffer.direct import FileReader
from headrace.buffer.passes import Ranges
from headrace.buffer.reads import SECTOR, Piece, phase, pieces, split
from headrace.errors import DataError
from headrace.types import Span

BYTES = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def span(tmp_path: Path) -> Span:
    (tmp_path / "data.bin").write_bytes(BYTES.tobytes())
    return Span(path=str(tmp_path / "data.bin"), offset=128, rows=2998, row_bytes=100, file_bytes=len(BYTES))


@st.composite
def some_ranges(draw: st.DrawFn, rows: int = 2998) -> Ranges:
    starts = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=8))
    return np.array([[s, min(rows, s + draw(st.integers(1, 900)))] for s in starts], dtype=np.int64)


def expected(ranges: Ranges) -> bytes:
    return b"".join(BYTES[128 + 100 * a : 128 + 100 * b].tobytes() for a, b in ranges)


@settings(deadline=None, suppress_health_check=FIXTURE, max_examples=30)
@given(ranges=some_ranges(), direct=st.booleans(), max_bytes=st.integers(1, 50_000), shift=st.booleans())
def test_any_ranges_arrive_whole(
    span: Span, ranges: Ranges, direct: bool, max_bytes: int, shift: bool
) -> None:
    wanted = expected(ranges)
    lead = phase([span], ranges, 1) if shift else 0
    memory = mmap.mmap(-1, len(wanted) + 2 * SECTOR)
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    files = FileReader(direct=direct)
    view = memoryview(memory)
    for piece in pieces([span], ranges, max_bytes):
        at = lead + piece.dest
        files.read(piece, view[at : at + piece.length], address + at)
    assert bytes(view[lead : lead + len(wanted)]) == wanted
    # Nothing outside of the wanted bytes was touched: another thread may be writing there.
    assert not any(view[:lead])
    assert not any(view[lead + len(wanted) :])
    files.close()


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_split_covers_exactly_the_wanted_bytes(offset: int, length: int, address: int) -> None:
    plan = split(offset, length, address)
    assert plan.start % SECTOR == plan.head % SECTOR == plan.middle % SECTOR == plan.tail % SECTOR == 0
    assert plan.start + plan.skip == offset
    assert plan.start + plan.head + plan.middle + plan.tail >= offset + length
    if plan.middle:
        assert (address + plan.head - plan.skip) % SECTOR == 0
        assert plan.head - plan.skip + plan.middle + plan.tail_used == length


def test_a_column_may_lie_in_several_files() -> None:
    spans = [
        Span(path=f"{k}", offset=10 * k, rows=rows, row_bytes=4, file_bytes=0)
        for k, rows in enumerate([5, 3, 8])
    ]
    found = list(pieces(spans, np.array([[3, 10], [0, 1]])))
    assert found == [
        Piece(spans[0], 12, 8, 0),
        Piece(spans[1], 10, 12, 8),
        Piece(spans[2], 20, 8, 20),
        Piece(spans[0], 0, 4, 28),
    ]


def test_a_file_cut_short_is_named_with_its_offset(span: Span) -> None:
    files = FileReader(direct=False)
    piece = Piece(span, 299_000, 1000, 0)
    buffer = memoryview(bytearray(1000))
    files.read(piece, buffer, 0)
    os.truncate(span.path, 299_500)
    with pytest.raises(DataError, match=r"data\.bin ends at byte 299500, where rows up to byte 300000"):
        files.read(piece, buffer, 0)
    files.close()


def test_a_file_that_grew_is_refused(span: Span) -> None:
    with Path(span.path).open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="had 300000 bytes when it was opened and has 300004 now"):
        FileReader(direct=False).read(Piece(span, 0, 10, 0), memoryview(bytearray(10)), 0)
    with pytest.raises(DataError, match="could not be opened"):
        gone = Span(path=span.path + "x", offset=0, rows=1, row_bytes=1, file_bytes=1)
        FileReader(direct=True).read(Piece(gone, 0, 1, 0), memoryview(bytearray(1)), 0)


def test_files_elsewhere_are_read_by_range() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/far/data.bin", BYTES.tobytes())
    span = Span(
        path="/far/data.bin", offset=128, rows=2998, row_bytes=100, file_bytes=len(BYTES), filesystem=files
    )
    into = memoryview(bytearray(500))
    FileReader(direct=True).read(Piece(span, 1128, 500, 0), into, 0)
    assert bytes(into) == BYTES[1128:1628].tobytes()
    with pytest.raises(DataError, match="ends at byte 300000"):
        FileReader(direct=True).read(Piece(span, 299_900, 500, 0), into, 0)
