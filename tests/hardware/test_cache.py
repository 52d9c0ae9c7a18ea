"""A saved measurement is used only when it is whole; saving never leaves half a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.hardware import cache
from headrace.types import Accelerator, Hardware

ACCELERATOR = Accelerator(
    name="made up",
    memory_bytes=1000,
    free_bytes=900,
    gemm_fp32_flops=1.0,
    gemm_tf32_flops=2.0,
    gemm_bf16_flops=3.0,
    pinned_bytes_per_s=4.0,
    pageable_bytes_per_s=5.0,
    launch_s=1e-6,
    copy_bytes_per_s=6.0,
)
MACHINE = Hardware(
    cores=4,
    memory_bytes=100,
    available_bytes=50,
    gemm_core_flops=1.5,
    gemm_all_flops=2.5,
    memory_copy_bytes_per_s=3.5,
    disk_path="/data",
    disk_sequential_bytes_per_s=4.5,
    disk_random_reads_per_s=5.5,
    accelerators=(ACCELERATOR,),
    compiler=None,
    torch_version="2.13.0",
    measured_at="2026-01-01T00:00:00+00:00",
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


def test_what_is_saved_is_loaded(cache_folder: Path) -> None:
    file = cache.file_for(Path("/"), "2.13.0")
    assert file.parent == cache_folder
    assert cache.load(file) is None
    assert cache.save(MACHINE, file)
    assert cache.load(file) == MACHINE
    assert [path.name for path in cache_folder.iterdir()] == [file.name]


def test_every_torch_has_its_own_file() -> None:
    assert cache.file_for(Path("/"), "2.11.0") != cache.file_for(Path("/"), "2.13.0")


def no_field(saved: dict[str, Any]) -> None:
    del saved["hardware"]["cores"]


def new_field(saved: dict[str, Any]) -> None:
    saved["hardware"]["tomorrow"] = 1


def older(saved: dict[str, Any]) -> None:
    saved["format"] = cache.FORMAT - 1


def text_for_number(saved: dict[str, Any]) -> None:
    saved["hardware"]["gemm_core_flops"] = "fast"


def not_a_number(saved: dict[str, Any]) -> None:
    saved["hardware"]["gemm_core_flops"] = float("nan")


def negative(saved: dict[str, Any]) -> None:
    saved["hardware"]["accelerators"][0]["launch_s"] = -1.0


def half_an_accelerator(saved: dict[str, Any]) -> None:
    saved["hardware"]["accelerators"][0].pop("name")


def no_list(saved: dict[str, Any]) -> None:
    saved["hardware"]["accelerators"] = None


@pytest.mark.parametrize(
    "damage",
    [no_field, new_field, older, text_for_number, not_a_number, negative, half_an_accelerator, no_list],
)
def test_a_damaged_file_counts_as_none(damage: Callable[[dict[str, Any]], None]) -> None:
    file = cache.file_for(Path("/"), "2.13.0")
    assert cache.save(MACHINE, file)
    saved = json.loads(file.read_text())
    damage(saved)
    file.write_text(json.dumps(saved))
    assert cache.load(file) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\x00\xff"])
def test_a_file_of_something_else_counts_as_none(text: str) -> None:
    file = cache.file_for(Path("/"), "2.13.0")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert cache.load(file) is None


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not cache.save(MACHINE, cache.file_for(Path("/"), "2.13.0"))


def test_a_failed_write_leaves_the_old_file(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache.file_for(Path("/"), "2.13.0")
    assert cache.save(MACHINE, file)

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(cache.os, "fsync", full)
    assert not cache.save(dataclasses.replace(MACHINE, cores=99), file)
    assert cache.load(file) == MACHINE
    assert [path.name for path in cache_folder.iterdir()] == [file.name]


def test_measure_saves_reuses_and_measures_again(tmp_path: Path, cache_folder: Path) -> None:
    first = hr.measure(path=tmp_path, budget_s=0.5)
    assert first.gemm_all_flops >= first.gemm_core_flops > 0
    (file,) = cache_folder.iterdir()
    marked = dataclasses.replace(first, gemm_core_flops=12345.0, available_bytes=1)
    cache.save(marked, file)
    again = hr.measure(path=tmp_path)
    assert again.gemm_core_flops == 12345.0
    assert again.available_bytes > 1
    assert hr.measure(path=tmp_path, quick=True).gemm_core_flops == 12345.0
    assert hr.measure(fresh=True, path=tmp_path, budget_s=0.5).gemm_core_flops != 12345.0
    file.write_text("{")
    assert hr.measure(path=tmp_path, budget_s=0.5).gemm_core_flops > 0
    assert cache.load(file) is not None


def test_quick_times_nothing_and_saves_nothing(tmp_path: Path, cache_folder: Path) -> None:
    found = hr.measure(path=tmp_path, quick=True)
    assert found.cores >= 1
    assert found.available_bytes > 0
    assert found.gemm_core_flops == 0.0
    assert found.disk_sequential_bytes_per_s == 0.0
    assert not cache_folder.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "/no/such/folder"}, "no such file or folder"),
        ({"budget_s": 0.0}, "too short"),
        ({"budget_s": float("nan")}, "too short"),
        ({"fresh": True, "quick": True}, "give one of them"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(hr.HeadraceError, match=says):
        hr.measure(**arguments)
