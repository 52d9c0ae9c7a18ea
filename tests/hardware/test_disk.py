"""The disk is measured, not the page cache; nothing is left behind; no folder makes it fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.hardware import disk


def read_from_the_device() -> int:
    """Bytes that this process has had fetched from block devices so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def has_block_device(folder: Path) -> bool:
    return os.major(folder.stat().st_dev) != 0


def test_rates_are_positive_and_nothing_is_left(tmp_path: Path) -> None:
    sequential, reads = disk.rates(tmp_path, 0.3)
    assert sequential > 0
    assert reads > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def no_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that keeps its pages whatever it is told."""
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)


@pytest.mark.parametrize("hindrance", ["no_direct_reads", "no_forgetting"])
def test_the_page_cache_is_not_measured(
    tmp_path: Path, hindrance: str, request: pytest.FixtureRequest
) -> None:
    """Either way around the cache suffices alone: the bytes come from the device."""
    if not has_block_device(tmp_path):
        pytest.skip("the temporary folder is not on a block device")
    request.getfixturevalue(hindrance)
    file = tmp_path / "cached"
    pieces = 8
    with file.open("wb") as out:
        out.write(os.urandom(disk.PIECE * pieces))
        out.flush()
        os.fsync(out.fileno())
    file.read_bytes()
    before = read_from_the_device()
    disk._run(file, disk.PIECE, sequential=True, budget_s=30.0)
    assert read_from_the_device() - before >= disk.PIECE * pieces


@pytest.mark.usefixtures("no_direct_reads")
def test_a_file_system_that_refuses_direct_reads(tmp_path: Path) -> None:
    sequential, reads = disk.rates(tmp_path, 0.3)
    assert sequential > 0
    assert reads > 0


def test_where_nothing_can_be_written_or_read_both_are_zero() -> None:
    assert disk.rates(Path("/proc/self/fdinfo"), 0.1) == (0.0, 0.0)


def test_a_folder_that_cannot_be_written_reads_its_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**named: Any) -> tuple[int, str]:
        raise PermissionError(errno.EROFS, "read-only")

    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse)
    assert disk.rates(tmp_path, 0.1) == (0.0, 0.0)
    data = tmp_path / "data.bin"
    data.write_bytes(os.urandom(disk.MIN_FILE_BYTES))
    (tmp_path / "small.bin").write_bytes(b"x")
    sequential, reads = disk.rates(tmp_path, 0.3)
    assert sequential > 0
    assert reads > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "small.bin"]


@pytest.mark.parametrize("sequential", [True, False])
def test_no_place_is_read_twice(sequential: bool) -> None:
    places = disk._places(10 * 4096 + 100, 4096, sequential=sequential)
    assert sorted(places) == [4096 * n for n in range(10)]
    assert (places == sorted(places)) is sequential


def test_a_reader_that_fails_fails_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        disk._run(tmp_path / "gone", 4096, sequential=True, budget_s=0.1)
