"""The DPSVI page: its runs give numbers, and the page is written from numbers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import OptionError
from headrace.papers import PaperOptions, dpsvi, dpsvi_learners, dpsvi_runs


def small() -> tuple:
    return dpsvi_runs.split(dpsvi_runs.synthetic(200, 80, 5, 30, seed=0))


def test_curves_and_machines_learn() -> None:
    train, held_out = small()
    points = dpsvi_runs.curve(dpsvi_learners.headrace_online, train, held_out, 5, 0, limit_s=0.2)
    assert points[-1]["seconds"] >= 0.2 or points[-1]["passes"] == 200
    assert points[-1]["likelihood"] > points[0]["likelihood"] - 0.05
    two = dpsvi_runs.machines(train, held_out, 5, 0, workers=2, rounds=4)
    assert [point["documents"] for point in two] == [64, 128, 192, 256]
    assert all(-np.log(80) - 0.5 < point["likelihood"] < 0 for point in two)


def test_the_page_is_written_from_the_numbers(tmp_path: Path) -> None:
    points = [
        {"seconds": 1.0, "passes": 2, "likelihood": -7.0},
        {"seconds": 2.0, "passes": 4, "likelihood": -6.5},
    ]
    numbers = {
        "topics": 50,
        "missing": ["gensim"],
        "curves": {"AP": {"headrace online": points, "scikit-learn": points}},
        "threads": [
            {"jobs": 1, "rate": 10.0, "likelihood": -7.0},
            {"jobs": 2, "rate": 19.0, "likelihood": -7.0},
        ],
        "machines": {"1": [[{"documents": 64, "likelihood": -7.0}]]},
    }
    text = dpsvi.write_page(numbers, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "left out: gensim" in text and "2 threads" in text and "1.9" in text


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'curves'"):
        dpsvi.run(PaperOptions(out=tmp_path, only=("curve",)))
