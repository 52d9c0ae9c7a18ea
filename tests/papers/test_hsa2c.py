"""The page of HSA2C: its curves are those of the rows, and a short run of it writes what it says.

Planted once, and each caught here: a curve that goes on after its run's end, and a band of fewer seeds than were run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.papers import PaperOptions, hsa2c

ROWS = [
    [{"step": 10, "return": 1.0}, {"step": 20, "return": 3.0}, {"step": 40, "return": 5.0}],
    [{"step": 20, "return": 7.0}, {"step": 60, "return": 9.0}],
]


def test_the_return_known_at_a_place_is_the_last_one_before_it() -> None:
    found = hsa2c.at(ROWS[0], "step", np.array([5, 10, 19, 40, 41]))
    np.testing.assert_array_equal(found, [np.nan, 1.0, 1.0, 5.0, np.nan])


def test_a_band_is_over_all_seeds_and_ends_with_the_shortest() -> None:
    band = hsa2c.band("both", ROWS, "step")
    assert band is not None and max(band.x) == 40
    at_20 = int(np.searchsorted(band.x, 20))
    assert (band.low[at_20], band.y[at_20], band.high[at_20]) == (3.0, 5.0, 7.0)
    assert min(band.x) >= 20, "before that one seed has no episode yet"
    assert hsa2c.band("none", [], "step") is None


def test_the_common_end_leaves_out_what_hardly_began() -> None:
    runs = {"fast": [ROWS[0]], "both": ROWS, "none": [], "slow": [[{"step": 3, "return": 0.0}]]}
    assert hsa2c.common_end(runs, "step") == 40.0


def test_every_run_gets_an_equal_share_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow runs that came first used to get four shares, and the last configurations what was left."""
    clock, given = [0.0], []

    def _starts_slowly(learn: Any) -> Any:
        def start_and_learn(seed: int, seconds: float) -> Any:
            rows = learn(seed, seconds)
            clock[0] += 5.0
            return rows

        return start_and_learn

    def kind(uses_s: float) -> Any:
        def learn(seed: int, seconds: float) -> Any:
            given.append(round(seconds, 6))
            clock[0] += min(uses_s, seconds)
            return [{"step": 1, "return": 0.0}]

        return learn

    monkeypatch.setattr(hsa2c.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hsa2c, "CONFIGURATIONS", {"slow": 99.0, "quick": 1.0})
    monkeypatch.setattr(hsa2c, "_ours", lambda experiment, uses_s: kind(uses_s))
    monkeypatch.setattr(hsa2c.importlib.util, "find_spec", lambda name: None)
    hsa2c.run_experiment(hsa2c.EXPERIMENTS["cartpole"], 2, 40.0)
    assert given == [10.0, 10.0, 14.5, 14.5]
    given.clear()
    monkeypatch.setattr(hsa2c, "_ours", lambda experiment, uses_s: _starts_slowly(kind(uses_s)))
    hsa2c.run_experiment(hsa2c.EXPERIMENTS["cartpole"], 1, 8.0)
    assert given == [4.0, 1.0], "what starting took is missing at the end, and no run gets nothing"


def test_a_short_run_writes_its_numbers_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("plotly")
    short = dataclasses.replace(hsa2c.EXPERIMENTS["cartpole"], steps=2_000)
    monkeypatch.setitem(hsa2c.EXPERIMENTS, "cartpole", short)
    monkeypatch.setattr(hsa2c, "CONFIGURATIONS", {"synchronous": {}})
    page = hsa2c.run(PaperOptions(out=tmp_path, seconds=60.0, seeds=2, only=("cartpole",)))
    runs = json.loads((tmp_path / "hsa2c.json").read_text())["cartpole"]["synchronous"]
    assert len(runs) == 2 and all(rows[-1]["step"] == 2_000 for rows in runs) and runs[0] != runs[1]
    text = page.read_text(encoding="utf-8")
    assert "CartPole-v1: return over environment steps" in text and "return over seconds" in text
    assert "return at 2,000 steps" in text
    with pytest.raises(HeadraceError, match="did you mean 'cartpole'"):
        hsa2c.run(PaperOptions(out=tmp_path, only=("cartpol",)))
