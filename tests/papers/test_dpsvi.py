"""The DPSVI page: its runs give numbers, and the page is written from numbers alone."""

from __future__ import annotations

import importlib.util
from contextlib import closing
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
    assert points[-1]["documents"] == points[-1]["passes"] * 180
    threads = dpsvi_runs.threads(train, held_out, 5, 0, jobs=2, passes=3)
    assert [point["documents"] for point in threads] == [180, 360, 540]
    assert threads[-1]["likelihood"] > threads[0]["likelihood"] - 0.05


def test_synthetic_documents_have_the_lengths_asked_for() -> None:
    counts = dpsvi_runs.synthetic(300, 90, 4, 40, seed=0)
    assert counts.shape == (300, 90)
    assert np.asarray(counts.sum(axis=1)).mean() == pytest.approx(41, rel=0.05)
    assert set(dpsvi_runs.corpora(250)) >= {"synthetic", "synthetic, large"}


def test_what_a_curve_needs_is_read_between_its_points() -> None:
    points = [{"documents": d, "likelihood": v} for d, v in ((10, -3.0), (20, -2.0), (30, -2.5), (40, -1.0))]
    assert dpsvi_runs.needed(points, -3.0, "documents") == 10
    assert dpsvi_runs.needed(points, -2.5, "documents") == 15
    assert dpsvi_runs.needed(points, -1.5, "documents") == pytest.approx(35)
    assert dpsvi_runs.needed(points, -0.5, "documents") is None
    half = [{"documents": point["documents"] / 2, "likelihood": point["likelihood"]} for point in points]
    level, ratios = dpsvi.speed_up({"1": [points, points], "2": [half, half]})
    assert level == pytest.approx(-1.4) and ratios == [1, pytest.approx(2)]


@pytest.mark.skipif(importlib.util.find_spec("vowpalwabbit") is None, reason="vowpalwabbit is not installed")
def test_vowpal_wabbit_goes_on_from_pass_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpsvi_learners, "BATCH", 16)
    train, held_out = small()
    with closing(dpsvi_learners.vowpal_wabbit(train, 5, 0)) as learner:
        learned = [dpsvi_learners.likelihood(next(learner), held_out) for _ in range(12)]
        total = next(learner).components.sum()
    assert learned[-1] > learned[0]
    # Its start weighs ten times as much as these documents; what is left is their words and the prior.
    assert total == pytest.approx(train.sum() + 80, rel=0.1)


def test_the_page_is_written_from_the_numbers(tmp_path: Path) -> None:
    points = [
        {"seconds": 1.0, "passes": 2, "documents": 200, "likelihood": -7.0},
        {"seconds": 2.0, "passes": 4, "documents": 400, "likelihood": -6.5},
    ]
    numbers = {
        "topics": 50,
        "missing": ["gensim"],
        "curves": {"AP": {"headrace online": points, "scikit-learn": points}},
        "threads": [
            {"jobs": 1, "corpus": "AP", "rate": 10.0, "likelihood": -7.0, "points": points},
            {"jobs": 2, "corpus": "AP", "rate": 19.0, "likelihood": -7.0, "points": points},
        ],
        "machines": {"1": [[{"documents": 64, "likelihood": -7.0}]]},
    }
    text = dpsvi.write_page(numbers, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "left out: gensim" in text and "2 threads" in text and "1.9" in text


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'curves'"):
        dpsvi.run(PaperOptions(out=tmp_path, only=("curve",)))
