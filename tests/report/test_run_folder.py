"""A run folder holds what was put in, refuses what is not its own, and survives lines that were cut off."""

from __future__ import annotations

import json
import logging
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError, RunFolderError
from headrace.report.files import decode_row, encode_row, replace_text
from headrace.report.run_folder import FORMAT_VERSION, RunFolder
from headrace.report.toml import dump_toml
from headrace.types import Accelerator, Hardware, Plan

HARDWARE = Hardware(
    cores=2,
    memory_bytes=2**34,
    available_bytes=2**33,
    gemm_core_flops=5e10,
    gemm_all_flops=9e10,
    memory_copy_bytes_per_s=1e10,
    disk_path="/data",
    disk_sequential_bytes_per_s=1e9,
    disk_random_reads_per_s=5e4,
    accelerators=(
        Accelerator(
            name="one",
            memory_bytes=1,
            free_bytes=1,
            gemm_fp32_flops=1.0,
            gemm_tf32_flops=1.0,
            gemm_bf16_flops=1.0,
            pinned_bytes_per_s=1.0,
            pageable_bytes_per_s=1.0,
            launch_s=1e-6,
            copy_bytes_per_s=1.0,
        ),
    ),
)

# TOML integers have 64 bits; text is anything that a file can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    TEXT,
    st.lists(st.integers(0, 9)),
)
NESTED = st.recursive(PLAIN, lambda inner: st.dictionaries(TEXT, inner, max_size=4), max_leaves=12)


@given(st.dictionaries(TEXT, NESTED, max_size=5))
def test_toml_comes_back_as_it_was(values: dict[str, Any]) -> None:
    assert tomllib.loads(dump_toml(values)) == values


def test_toml_leaves_out_none_and_names_what_it_cannot_hold() -> None:
    values = {"a": None, "b": {"c": None, "d": np.float32(0.5)}, "e": [{"f": 1, "g": None}], "h": Path("x")}
    assert tomllib.loads(dump_toml(values)) == {"b": {"d": 0.5}, "e": [{"f": 1}], "h": "x"}
    assert math.isnan(tomllib.loads(dump_toml({"a": math.nan}))["a"])
    with pytest.raises(OptionError, match=r"the setting model\.loss is a function"):
        dump_toml({"model": {"loss": lambda: None}})


def test_plan_hardware_and_config_come_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "first")
    plan = Plan().with_("batch_size", 64, "asked for").with_("dtype", torch.float32, "the default")
    folder.write_plan(plan)
    folder.write_hardware(HARDWARE)
    folder.write_config({"epochs": 5, "data": {"path": "train/"}})
    again = RunFolder.open(folder.path)
    assert again.read_plan()["batch_size"] == 64
    assert again.read_plan()["dtype"] == "torch.float32"
    assert again.read_hardware() == HARDWARE
    assert again.read_config() == {"epochs": 5, "data": {"path": "train/"}}
    assert again.read_metrics() == []


def test_a_plan_keeps_array_numbers_as_numbers(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_plan(Plan().with_("rounds", np.int64(3), "measured"))
    assert folder.read_plan()["rounds"] == 3


def test_an_earlier_run_is_kept_unless_overwriting_is_allowed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({"epochs": 5})
    folder.state_path.mkdir()
    (folder.path / "my notes.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(RunFolderError, match="already holds a run; resume it"):
        RunFolder.create(folder.path)
    assert folder.read_config() == {"epochs": 5}
    RunFolder.create(folder.path, overwrite=True)
    assert sorted(p.name for p in folder.path.iterdir()) == ["my notes.txt", "run.json"]


def test_a_strangers_folder_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match=r"is not empty and holds no run \(found thesis\.tex\)"):
            RunFolder.create(tmp_path, overwrite=overwrite)
    with pytest.raises(RunFolderError, match="a file of that name is there"):
        RunFolder.create(tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder.open(tmp_path / "nothing")
    (tmp_path / "a.txt").touch()
    with pytest.raises(RunFolderError, match="is a file, not a run folder"):
        RunFolder.open(tmp_path / "a.txt")
    with pytest.raises(RunFolderError, match=r"holds no run\.json \(found a\.txt\)"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        RunFolder.open(tmp_path)


def test_another_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    replace_text(folder.version_path, json.dumps({"format": 99}))
    with pytest.raises(RunFolderError, match=rf"run format 99.*reads format {FORMAT_VERSION};"):
        RunFolder.open(tmp_path)


def test_missing_and_damaged_parts_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(RunFolderError, match=r"holds no plan\.json"):
        folder.read_plan()
    folder.plan_path.write_text('{"batch_size": 64}', encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"plan\.json is not a plan"):
        folder.read_plan()
    folder.hardware_path.write_text('{"wheels": 4}', encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"hardware\.json does not describe a machine"):
        folder.read_hardware()
    folder.config_path.write_text("epochs = ", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"config\.toml is not TOML"):
        folder.read_config()


def test_a_last_line_that_was_cut_off_is_dropped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder.create(tmp_path)
    folder.metrics_path.write_text('{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert folder.read_metrics() == [{"step": 1}, {"step": 2}]
    assert "the last line of metrics.jsonl was cut off (4 bytes)" in caplog.text


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.metrics_path.write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(RunFolderError, match="line 2 of"):
        folder.read_metrics()


@given(st.dictionaries(TEXT, st.one_of(st.floats(), st.integers(), st.lists(st.floats(), max_size=3))))
def test_rows_come_back_also_when_not_finite(row: dict[str, Any]) -> None:
    line = encode_row(row)
    assert "\n" not in line
    json.loads(line, parse_constant=pytest.fail)  # strict JSON, which other languages read
    assert repr(decode_row(line)) == repr(row)


def test_tensors_and_arrays_become_numbers() -> None:
    row = {"loss": torch.tensor(0.5), "updates": np.array([1, 2]), "worst": torch.tensor(math.inf)}
    assert decode_row(encode_row(row)) == {"loss": 0.5, "updates": [1, 2], "worst": math.inf}
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        encode_row({"loss": object()})
