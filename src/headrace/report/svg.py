"""A line plot as a small SVG file, for a README and the gallery, without any package.

Text stays text in the reader's own fonts; the panel brings its own ground, dark for readers who prefer dark.
Values that are not finite, and values ≤ 0 on a logarithmic axis, become gaps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.errors import OptionError
from headrace.report.files import replace_text
from headrace.report.page import Series, lift_to_positive

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 78, 52
"""Margins around the plot, for tick labels, title and legend."""

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1d2329; }
.title { font-size: 16px; font-weight: 600; } .tick { font-size: 12px; fill: #59636e; }
.ground { fill: #ffffff; } .grid { stroke: #d9dee3; stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { stroke: none; opacity: .18; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec; } .tick { fill: #a0abb6; } .ground { fill: #14181c; } .grid { stroke: #333c45; } }
"""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5579b", "#b07d00", "#3a9bd9", "#7a4fbf", "#5f6b76")
_DASHES = ("", "7 4", "2 3")

Point = tuple[float, float]


def write_svg_lines(
    path: str | os.PathLike[str],
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Path:
    """Write the plot and return its path; a series with ``low`` and ``high`` gets a shaded interval."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, svg_lines(title, series, x_label, y_label, log_x, log_y))
    return path


def svg_lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """The plot as SVG text."""
    lines = [_Line.of(one, log_y) for one in series]
    x_axis = Axis.around((x for line in lines for x in line.x), log_x, LEFT, WIDTH - RIGHT)
    y_values = (y for line in lines for y in (*line.y, *line.low, *line.high))
    y_axis = Axis.around(y_values, log_y, HEIGHT - BOTTOM, TOP)
    told = f"{title}: {y_label} over {x_label}; {', '.join(line.name for line in lines)}"
    body = [*_grid(x_axis, y_axis), *_labels(title, x_label, y_label), *_legend(lines)]
    for number, line in enumerate(lines):
        body += _drawn(line, number, x_axis, y_axis)
    joined = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{escape(told)}">\n<title>{escape(told)}</title>\n'
        f'<style>{_STYLE}</style>\n<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n'
        f"{joined}\n</svg>\n"
    )


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    is_log: bool
    start: float
    """The pixel of ``low``."""
    end: float

    @classmethod
    def around(cls, values: Iterable[float], is_log: bool, start: float, end: float) -> Axis:
        """The axis that just holds the values and ends at round numbers where they are near."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
        if not kept:
            raise OptionError("a plot needs at least one value that its axes can show; there is none")
        low, high = min(kept), max(kept)
        if is_log:
            low, high = (low / 2, high * 2) if low == high else (low, high)
        else:
            low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
            space = 0.04 * (high - low)
            # A quantity that cannot be negative should not seem to be: keep zero as the edge.
            low, high = (0.0 if 0 <= low < space else low - space), high + space
        return cls(low, high, is_log, start, end)

    def pixel(self, value: float) -> float | None:
        if not math.isfinite(value) or (self.is_log and value <= 0):
            return None
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values inside the axis: about six, or the decades of a logarithmic one."""
        if not self.is_log:
            step = _round_step((self.high - self.low) / 7)
            first = math.ceil(self.low / step)
            return [i * step for i in range(first, math.floor(self.high / step) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        stride = max(1, len(decades) // 8)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        values = [m * 10.0**d for d in decades if d % stride == 0 for m in steps]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


@dataclass(frozen=True)
class _Line:
    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    group: int | None

    @classmethod
    def of(cls, series: Series, log_y: bool) -> _Line:
        y = _floats(series.y)
        x = [float(i) for i in range(len(y))] if series.x is None else _floats(series.x)
        has_interval = series.low is not None and series.high is not None
        low = [] if series.low is None or series.high is None else _floats(series.low)
        high = [] if series.low is None or series.high is None else _floats(series.high)
        if len(x) != len(y) or (has_interval and not len(low) == len(high) == len(y)):
            raise OptionError(
                f"series {series.name!r} needs values of one length; x has {len(x)}, y has {len(y)}, "
                f"low has {len(low)}, high has {len(high)}"
            )
        low = lift_to_positive(low, y) if log_y else low
        return cls(series.name, x, y, low, high, series.group)


def _drawn(line: _Line, number: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    colour, dash = _ink(line, number)
    parts = []
    if line.low:
        for below, above in zip(
            _runs(line.x, line.low, line.high, x_axis, y_axis),
            _runs(line.x, line.high, line.low, x_axis, y_axis),
            strict=True,
        ):
            parts.append(f'<path class="band" fill="{colour}" d="{_path([*below, *above[::-1]])}Z"/>')
    for run in _runs(line.x, line.y, line.y, x_axis, y_axis):
        parts.append(f'<path class="line" stroke="{colour}"{dash} d="{_path(run)}"/>')
        if len(line.y) <= 30 or len(run) == 1:
            parts += [f'<circle fill="{colour}" r="3" cx="{x:g}" cy="{y:g}"/>' for x, y in run]
    return parts


def _runs(
    x: list[float], y: list[float], other: list[float], x_axis: Axis, y_axis: Axis
) -> list[list[Point]]:
    """Pixels of ``y`` in stretches without a gap, where ``other`` has none either; repeats left out."""
    runs: list[list[Point]] = [[]]
    for x_value, y_value, other_value in zip(x, y, other, strict=True):
        across, down = x_axis.pixel(x_value), y_axis.pixel(y_value)
        if across is None or down is None or y_axis.pixel(other_value) is None:
            runs.append([])
        else:
            runs[-1].append((across, down))
    return [_without_repeats(run) for run in runs if run]


def _without_repeats(run: list[Point]) -> list[Point]:
    return [run[0], *(after for before, after in pairwise(run) if after != before)]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _ink(line: _Line, number: int) -> tuple[str, str]:
    colour = number if line.group is None else line.group
    dash = _DASHES[colour // len(_COLOURS) % len(_DASHES)]
    return _COLOURS[colour % len(_COLOURS)], f' stroke-dasharray="{dash}"' if dash else ""


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for value in x_axis.ticks():
        x = x_axis.pixel(value)
        parts.append(f'<path class="grid" d="M{x:g} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x or 0, HEIGHT - BOTTOM + 18, _tick(value), "tick", "middle"))
    for value in y_axis.ticks():
        y = y_axis.pixel(value) or 0
        parts.append(f'<path class="grid" d="M{LEFT} {y:g}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, _tick(value), "tick", "end"))
    return parts


def _labels(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    upright = f'<text text-anchor="middle" transform="translate(18 {middle:g}) rotate(-90)">'
    return [
        _text(16, 28, title, "title"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "", "middle"),
        f"{upright}{escape(y_label)}</text>",
    ]


def _legend(lines: Sequence[_Line]) -> list[str]:
    """Names beside a stroke of their colour, in one row or two; a single line needs none."""
    parts: list[str] = []
    x, y = float(LEFT), 48
    for number, line in enumerate(lines if len(lines) > 1 else ()):
        colour, dash = _ink(line, number)
        width = 28 + 7.5 * len(line.name) + 18  # the reader's font is not known; 7.5 pixels a letter is ample
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 18
        parts.append(f'<path class="line" stroke="{colour}"{dash} d="M{x:g} {y}h22"/>')
        parts.append(_text(x + 28, y + 4, line.name))
        x += width
    return parts


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _tick(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        factor = f"{float(mantissa):g}"
        return f"10{raised}" if factor == "1" else f"{factor}·10{raised}"
    return f"{value:,.6g}" if abs(value) >= 1e4 else f"{value:.6g}"


def _round_step(step: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _floats(values: Iterable[Any]) -> list[float]:
    plain = values.tolist() if hasattr(values, "tolist") else list(values)
    return [math.nan if value is None else float(value) for value in plain]
