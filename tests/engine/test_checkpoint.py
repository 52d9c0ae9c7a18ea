"""Checkpoints: exact, atomic, checked, with the one before as a fallback."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import checkpoint
from headrace.errors import CheckpointError, RunFolderError

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert checkpoint.unflatten(checkpoint.flatten(state, tensors), tensors) == state


def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {
        "a": shared,
        "b": [shared.view(2, 3), torch.tensor(3, dtype=torch.int64)],
        7: torch.zeros(0),
        "c": shared[::2],
    }
    checkpoint.save_checkpoint(tmp_path, 1, state)
    found, damaged = checkpoint.load_newest(tmp_path)
    assert damaged == []
    assert torch.equal(found["a"], shared)
    assert torch.equal(found["b"][0], shared.view(2, 3))
    assert found["b"][1].dtype == torch.int64
    assert found[7].shape == (0,)
    assert torch.equal(found["c"], shared[::2])


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save_checkpoint(tmp_path, step, {"step": step})
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-000000000010", "step-000000000003"]


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.REST, checkpoint.SUMS])
@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path, step, {"w": torch.full((5,), float(step)), "step": step})
    file = tmp_path / "step-000000000002" / name
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 0x01
        file.write_bytes(data)
    elif harm == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    found, damaged = checkpoint.load_newest(tmp_path)
    assert found["step"] == 1
    assert len(damaged) == 1
    assert "step-000000000002" in damaged[0]


def test_no_readable_checkpoint_is_an_error_that_names_all(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no checkpoint"):
        checkpoint.load_newest(tmp_path)
    checkpoint.save_checkpoint(tmp_path, 1, {})
    (tmp_path / "step-000000000001" / checkpoint.SUMS).write_text("{}")
    with pytest.raises(RunFolderError, match="step-000000000001 is damaged"):
        checkpoint.load_newest(tmp_path)


def test_a_full_disk_keeps_the_checkpoint_before_and_says_how_much_was_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save_checkpoint(tmp_path, 1, {"w": torch.ones(1000)})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"[45],\d\d\d bytes are needed and [\d,]+ are free"):
            checkpoint.save_checkpoint(tmp_path, 2, {"w": torch.ones(1000)})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000001"]
    assert torch.equal(checkpoint.load_newest(tmp_path)[0]["w"], torch.ones(1000))


def test_an_unfinished_checkpoint_is_not_seen(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, 1, {"step": 1})
    (tmp_path / "writing-000000000002").mkdir()
    (tmp_path / "writing-000000000002" / checkpoint.REST).write_text("{")
    assert checkpoint.load_newest(tmp_path)[0]["step"] == 1


def test_what_a_checkpoint_cannot_hold_is_named() -> None:
    with pytest.raises(CheckpointError, match="/a/1 holds a object"):
        checkpoint.flatten({"a": [1, object()]}, {})
