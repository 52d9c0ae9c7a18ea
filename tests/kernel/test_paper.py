"""The paper's page is made from numbers that a run of this machine wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from headrace.errors import OptionError
from headrace.papers import PaperOptions, eigenpro_scaling, run_paper
from headrace.papers.eigenpro_data import Split
from headrace.papers.eigenpro_scaling import critical_batches


def test_adapting_moves_the_critical_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        eigenpro_scaling, "BATCHES", (4, 64)
    )  # all of them take longer than a busy machine has
    X, y = load_digits(return_X_y=True)
    split = Split(X=X[:600].astype(np.float32) / 8, y=y[:600], X_test=X, y_test=y)
    original, adapted = critical_batches(split, target=0.3, seconds=1e9, seeds=1)
    assert adapted.critical > 5 * original.critical
    assert adapted.points[64][0]["epochs"] < 0.5 * original.points[64][0]["epochs"]


def test_a_page_is_written_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    page = run_paper("eigenpro", PaperOptions(out=tmp_path / "out", seconds=5, only=("accuracy",)))
    assert "HEADRACE_DATA" in page.read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out" / "numbers.json").read_text(encoding="utf-8")) == {"accuracy": []}


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'scaling'"):
        run_paper("eigenpro", PaperOptions(out=tmp_path, only=("scalling",)))
