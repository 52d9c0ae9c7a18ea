"""The plot's coordinates are its data, and the file is whole XML without anything from outside."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.report.page import Series
from headrace.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, svg_lines, write_svg_lines

SVG = "{http://www.w3.org/2000/svg}"


def paths(svg: str, kind: str) -> list[list[tuple[float, float]]]:
    """The points of every path of a class that lies inside the plot."""
    found = [p.get("d", "") for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("class") == kind]
    points = [re.findall(r"[ML]([-\d.e+]+) ([-\d.e+]+)", d) for d in found if "h" not in d]
    return [[(float(x), float(y)) for x, y in one] for one in points]


def test_points_lie_where_the_data_is() -> None:
    svg = svg_lines("Loss", [Series("a", [0, 5, 10], [0, 1, 2])], "step", "loss")
    (line,) = paths(svg, "line")
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y0 == HEIGHT - BOTTOM  # zero is the edge of what cannot be negative
    assert y2 < y1 < y0 and LEFT <= x0 < x2 < WIDTH - RIGHT


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis() -> None:
    svg = svg_lines("Loss", [Series("a", [1, 10, 100], [1.0, 0.1, 0.01])], "x", "y", log_x=True, log_y=True)
    (line,) = paths(svg, "line")
    assert line == [
        (LEFT, TOP),
        ((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2),
        (WIDTH - RIGHT, HEIGHT - BOTTOM),
    ]
    assert ">0.1<" in svg and ">10<" in svg


def test_gaps_part_a_line_and_its_band() -> None:
    y = np.array([1.0, 2.0, math.nan, 3.0, 4.0])
    svg = svg_lines("Loss", [Series("a", None, y, low=y - 0.5, high=y + 0.5)], "x", "y")
    assert [len(line) for line in paths(svg, "line")] == [2, 2]
    assert [len(band) for band in paths(svg, "band")] == [4, 4]
    one = Series("a", None, [1.0, 0.0, 2.0], low=[0.5, -1.0, -1.0], high=[1, 1, 2])
    zero = svg_lines("Loss", [one], "x", "y", log_y=True)
    assert [len(line) for line in paths(zero, "line")] == [1, 1]
    assert [len(band) for band in paths(zero, "band")] == [6]  # bounds ≤ 0 lie on the edge


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20),
    st.booleans(),
)
def test_everything_is_inside_the_panel(values: list[float], log: bool) -> None:
    kept = [abs(value) + 1e-6 for value in values] if log else values
    svg = svg_lines("Loss", [Series("a", None, kept)], "x", "y", log_y=log)
    for line in paths(svg, "line"):
        for x, y in line:
            assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM


@given(st.floats(1e-8, 1e8), st.floats(1.001, 1e8), st.booleans())
def test_ticks_are_few_and_inside(low: float, ratio: float, log: bool) -> None:
    ticks = Axis(low, low * ratio, log, 0, 100).ticks()
    assert len(ticks) <= 12
    assert all(low * 0.998 <= tick <= low * ratio * 1.002 for tick in ticks)
    assert ticks == sorted(ticks)
    if not log:
        assert len(ticks) >= 2


def test_names_are_escaped_and_one_line_needs_no_legend() -> None:
    hostile = '</svg><script>"&'
    svg = svg_lines(hostile, [Series(hostile, None, [1]), Series("b", None, [2])], hostile, hostile)
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count(hostile) == 4
    assert "<script" not in svg
    one = svg_lines("Loss", [Series("alone", None, [1, 2])], "x", "y")
    assert ">alone<" not in one


def test_nothing_to_show_and_lengths_that_differ_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one value"):
        svg_lines("Loss", [Series("a", None, [math.nan])], "x", "y")
    with pytest.raises(OptionError, match="'a' needs values of one length; x has 1, y has 2"):
        svg_lines("Loss", [Series("a", [1], [1, 2])], "x", "y")


def test_the_file_is_small_and_refers_to_nothing(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 5000)
    path = write_svg_lines(tmp_path / "new" / "a.svg", "Sine", [Series("a", x, np.sin(9 * x))], "x", "y")
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|@import|url\(|<script", text)
