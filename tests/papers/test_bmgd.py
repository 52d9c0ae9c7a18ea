"""The simulations of the buffered-descent page against their theory, and the page itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import OptionError
from headrace.papers import PaperOptions, run_paper
from headrace.papers.bmgd import Cycle, predicted_ratio, simulate_ratio


def test_the_limits_of_the_theory() -> None:
    assert predicted_ratio(10, 1e-6) == pytest.approx(1.0)
    assert predicted_ratio(10, 1e6) == pytest.approx(10.0)
    assert predicted_ratio(10, 1.0) == pytest.approx(1.08, abs=0.005)


@pytest.mark.parametrize("rounds", [1, 3])
def test_simulation_meets_the_prediction(rounds: int) -> None:
    # 200 replicates of a fixed seed; five standard errors leave a false alarm in a million. A ratio of 2.3 is
    # 13 standard errors from 1, so a simulation without the effect fails.
    ratio, error = simulate_ratio(Cycle(buffers=5, batches=10, pull=5.0), rounds, 200, seed=3)
    assert abs(ratio - predicted_ratio(5, 5.0)) < 5 * error + 0.1
    assert ratio > 1 + 5 * error


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    page = run_paper("bmgd", PaperOptions(out=tmp_path, seconds=1, seeds=1, only=("images",)))
    assert "Images: equal steps, fewer loads" in page.read_text(encoding="utf-8")
    runs = json.loads((tmp_path / "bmgd.json").read_text(encoding="utf-8"))["images"]["runs"]
    assert {run["loads"] * run["rounds"] for run in runs} == {8}
    assert all(run["points"][-1]["accuracy"] > 0.8 for run in runs)
    with pytest.raises(OptionError, match="did you mean 'images'"):
        run_paper("bmgd", PaperOptions(out=tmp_path, only=("image",)))
