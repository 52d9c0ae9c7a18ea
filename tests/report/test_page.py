"""A page is one file that fetches nothing, escapes what it is given and keeps every finite value."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import MissingExtraError, OptionError
from headrace.report.page import Page, Series


def figures(html: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    loaded: list[dict[str, Any]] = json.loads(found.group(1))
    return loaded


def without_plotly(html: str) -> str:
    from plotly.offline import get_plotlyjs

    assert html.count(get_plotlyjs()) <= 1
    return html.replace(get_plotlyjs(), "")


def test_a_page_without_plots_is_small_and_needs_no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = Page("Title", subtitle="one line")
    page.heading("Numbers")
    page.text("First.\n\nSecond.")
    page.table(["method", "error"], [["GraB", 0.125]], caption="low is good")
    html = page.render()
    assert len(html) < 10_000
    assert "<script" not in html
    assert "<p>First.</p>" in html and "<p>Second.</p>" in html
    assert "<caption>low is good</caption>" in html and '<td class="number">0.125</td>' in html


def test_a_plot_without_plotly_is_refused_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"headrace\[report\]"):
        Page("Title").lines("Loss", [Series("a", [1], [1])])


def test_plotly_is_inlined_once_and_nothing_else_is_referred_to() -> None:
    page = Page("Title")
    page.lines("Loss", [Series("a", [1, 2], [3, 4])], x_label="step", y_label="loss")
    page.lines("Loss again", [Series("a", [1, 2], [3, 4])])
    html = page.render()
    ours = without_plotly(html)
    assert len(ours) < 20_000 < len(html)
    assert re.findall(r"https?:|<link[^>]+href=\"(?!data:)|<script[^>]+src|@import|url\(", ours) == []


@pytest.mark.parametrize("hostile", ["</script><b>x</b>", "<!--<script>", "a & b <i>", 'quote " here'])
def test_no_name_or_text_can_break_out(hostile: str) -> None:
    page = Page(hostile, subtitle=hostile)
    page.heading(hostile)
    page.text(hostile)
    page.table([hostile], [[hostile]], caption=hostile)
    page.lines(hostile, [Series(hostile, [1], [1])], x_label=hostile, y_label=hostile, caption=hostile)
    page.bars(hostile, [hostile], [Series(hostile, None, [1])])
    html = without_plotly(page.render())
    loaded = figures(html)
    assert loaded[0]["traces"][0]["name"] == hostile
    assert loaded[1]["traces"][0]["x"] == [hostile]
    assert "<b>" not in html and "<i>" not in html and "<!--" not in html
    assert html.count("<script") == html.count("</script>") == 3


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_values_arrive_whole_and_gaps_stay_gaps(make: Any) -> None:
    page = Page("Title")
    page.lines("Loss", [Series("a", make([1, 2, 3]), make([0.5, float("nan"), float("inf")]))])
    (trace,) = figures(page.render())[0]["traces"]
    assert trace["x"] == [1, 2, 3]
    assert trace["y"] == [0.5, None, None]


def test_an_interval_is_drawn_between_its_bounds_and_stays_on_a_logarithmic_axis() -> None:
    page = Page("Title")
    page.lines("Loss", [Series("a", None, [1.0, 2.0], low=[-1.0, 0.5], high=[3.0, 4.0])], log_y=True)
    low, high, line = figures(page.render())[0]["traces"]
    assert low["y"] == [0.5, 0.5]
    assert high["y"] == [3.0, 4.0] and high["fill"] == "tonexty"
    assert line["x"] == [0, 1]


def test_error_bars_are_distances_from_the_value() -> None:
    page = Page("Title")
    page.bars("Time", ["a", "b"], [Series("run", None, [2, 5], low=[1, 5], high=[4, 6])], y_label="s")
    (trace,) = figures(page.render())[0]["traces"]
    assert trace["error_y"]["array"] == [2, 1]
    assert trace["error_y"]["arrayminus"] == [1, 0]


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(OptionError, match=r"'a' needs values of one length; x has 2, y has 1"):
        Page("Title").lines("Loss", [Series("a", [1, 2], [1])])
    with pytest.raises(OptionError, match="2 columns was given a row with 1 cells"):
        Page("Title").table(["a", "b"], [[1]])


def test_saving_makes_the_folder_and_leaves_one_file(tmp_path: Path) -> None:
    page = Page("Title")
    path = page.save(tmp_path / "new" / "page.html")
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
