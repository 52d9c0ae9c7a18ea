"""A user's mistakes are answered with a sentence before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import DataError, ModelError, OptionError, RunFolderError

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3


def fit(model: Any = "linear", data: Any = (X, Y), **options: Any) -> hr.Run:
    return hr.fit(model, data, **{"epochs": 1, "progress": False, **options})


def test_labels_of_the_validation_data() -> None:
    with pytest.raises(
        DataError, match=r"the validation data's labels run from 7 to 9, the model has 3 outputs"
    ):
        fit(validation=(X, Y + 7))


def test_classes_are_no_targets_of_bce() -> None:
    with pytest.raises(
        DataError, match=r"bce takes targets from 0 to 1, targets run from 0 to 2.*cross_entropy"
    ):
        fit(loss="bce")


def test_bce_takes_zeros_and_ones() -> None:
    assert fit(data=(X, Y % 2), loss="bce").last["loss"] > 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def make(:\n", r"cannot be imported: SyntaxError: .*net\.py, line 1"),
        ("import no_such_package\n", r"cannot be imported: ModuleNotFoundError: .*no_such_package"),
        ("def make():\n    raise KeyError('width')\n", r"failed: KeyError: 'width' \(.*net\.py, line 2\)"),
    ],
)
def test_a_model_file_that_fails(tmp_path: Path, source: str, says: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(ModelError, match=says):
        fit(f"{file}:make")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": "a"}, "whole number"),
        ({"seed": 1.5}, "whole number"),
        ({"metrics": [print]}, "names and functions"),
    ],
)
def test_options_of_a_wrong_kind(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        fit(**options)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be made"):
        fit(out=tmp_path / "file" / "run")
