"""DPSGD on a simulated cluster, in little."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.papers import PaperOptions, run_paper
from headrace.papers.dpsgd import train


def test_the_page_and_its_numbers(tmp_path: Path) -> None:
    page = run_paper("dpsgd", PaperOptions(out=tmp_path / "dpsgd", seconds=10))
    assert page.exists()
    numbers = json.loads((page.parent / "numbers.json").read_text(encoding="utf-8"))
    one, four = numbers["runs"]["1"], numbers["runs"]["4"]
    assert one["oldest"] == 0 and 2 < four["mean_age"] < 4
    assert four["seconds"][-1] < one["seconds"][-1] / 3
    assert numbers["speed_up"]["64"] > 0.7 * 64


def test_an_mlp_learns_from_four_workers_as_fast_in_steps_as_from_one() -> None:
    """Non-convex, engine's own steps. Measured after 6000 steps: both at 0.42 of the first loss."""
    one, four = train(1, 6000), train(4, 6000)
    assert one["loss"][-1] < 0.65 * one["loss"][0]
    assert four["loss"][-1] < 1.15 * one["loss"][-1]
