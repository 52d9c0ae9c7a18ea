"""One page with text, tables and plots: a single HTML file that opens anywhere, also without a network.

`Page` collects fragments; `Page.save` writes them with plotly.js inlined once (about 4 MB, left out when the
page has no plot). Nothing is fetched from outside. Plots follow the reader's light or dark setting.

Data is embedded as JSON whose "<" is escaped, so no name or value can end the script it stands in; all text
is escaped except what is given to `Page.html`. Values that are not finite become gaps.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.errors import OptionError, missing_extra
from headrace.report.files import replace_text
from headrace.report.page_style import DRAW_SCRIPT, STYLE


@dataclass(frozen=True)
class Series:
    """One line or one group of bars; ``low`` and ``high`` bound an interval around ``y``.

    Values may be lists, NumPy arrays or tensors.
    """

    name: str
    x: Iterable[Any] | None
    """None for bars, whose positions are the labels, and for lines over 0, 1, 2, ..."""
    y: Iterable[Any]
    low: Iterable[Any] | None = None
    high: Iterable[Any] | None = None
    group: int | None = None
    """Series of one group share a colour and differ in their dashes; None gives each a colour of its own."""


@dataclass(frozen=True)
class _Fragment:
    html: str
    is_plot: bool = False


class Page:
    """A page under construction; the methods add to its end."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._fragments: list[_Fragment] = []
        self._figures: list[dict[str, Any]] = []

    def heading(self, text: str) -> None:
        self.html(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """One paragraph; blank lines part it into several."""
        for paragraph in text.split("\n\n"):
            self.html(f"<p>{escape(paragraph.strip())}</p>")

    def html(self, fragment: str) -> None:
        """HTML that is taken as it is; the caller has escaped what needs it."""
        self._fragments.append(_Fragment(fragment))

    def table(self, head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        """A table; cells that are numbers are right-aligned and shortened to four digits."""
        body = [[_cell(value) for value in row] for row in rows]
        wrong = next((row for row in body if len(row) != len(head)), None)
        if wrong is not None:
            raise OptionError(f"a table with {len(head)} columns was given a row with {len(wrong)} cells")
        kinds = [
            " class=number" if all(row[i].startswith("<td class") for row in body) else ""
            for i in range(len(head))
        ]
        shown_head = "".join(
            f'<th scope="col"{kind}>{escape(str(cell))}</th>' for cell, kind in zip(head, kinds, strict=True)
        )
        shown_rows = "".join(f"<tr>{''.join(row)}</tr>\n" for row in body)
        shown_caption = f"<caption>{escape(caption)}</caption>" if caption else ""
        self.html(
            f'<div class="scroll"><table>{shown_caption}<thead><tr>{shown_head}</tr></thead>\n'
            f"<tbody>{shown_rows}</tbody></table></div>"
        )

    def lines(
        self,
        title: str,
        series: Sequence[Series],
        x_label: str = "",
        y_label: str = "",
        log_x: bool = False,
        log_y: bool = False,
        caption: str = "",
        y_range: tuple[float, float] | None = None,
    ) -> None:
        """A line plot; a series with ``low`` and ``high`` gets a shaded interval."""
        inks = _inks([one.group for one in series])
        traces = [t for one, ink in zip(series, inks, strict=True) for t in _line_traces(ink, one, log_y)]
        axes = {"x": _axis(x_label, log_x), "y": _axis(y_label, log_y)}
        y_range = y_range or _range_of_constant(traces)
        if y_range and not log_y:
            axes["y"]["range"] = list(y_range)
        self._plot(title, [one.name for one in series], traces, axes, caption)

    def bars(
        self,
        title: str,
        labels: Sequence[str],
        series: Sequence[Series],
        y_label: str = "",
        x_label: str = "",
        log_y: bool = False,
        stacked: bool = False,
        caption: str = "",
    ) -> None:
        """Bars beside one another (or stacked), one group per label; intervals become error bars."""
        names = [str(label) for label in labels]
        inks = _inks([one.group for one in series])
        traces = [_bar_trace(ink, one, names) for one, ink in zip(series, inks, strict=True)]
        axes = {"x": {**_axis(x_label, False), "type": "category"}, "y": _axis(y_label, log_y)}
        layout = {"barmode": "stack" if stacked else "group"}
        self._plot(title, [one.name for one in series], traces, axes, caption, layout)

    def render(self) -> str:
        """The whole page."""
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self.title)}</h1>{subtitle}</header>\n<main>\n{self._body()}\n</main>\n"
            f"{self._scripts()}</body>\n</html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page and return its path; a page that was there is replaced in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self.render())
        return path

    def _plot(
        self,
        title: str,
        names: Sequence[str],
        traces: list[dict[str, Any]],
        axes: dict[str, dict[str, Any]],
        caption: str,
        layout: dict[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("plotly") is None:
            raise missing_extra("plotly", "report", "a page with plots")
        number = len(self._figures)
        self._figures.append(
            {"traces": traces, "axes": axes, "layout": layout or {}, "legend": len(names) > 1}
        )
        told = f"{title}: {axes['y']['title']} over {axes['x']['title'] or 'categories'}; {', '.join(names)}"
        note = f"<p>{escape(caption)}</p>" if caption else ""
        html = (
            f"<figure><figcaption><h3>{escape(title)}</h3>{note}</figcaption>"
            f'<div class="plot" id="plot-{number}" role="img" aria-label="{escape(told)}"></div></figure>'
        )
        self._fragments.append(_Fragment(html, is_plot=True))

    def _body(self) -> str:
        """Plots that follow one another share a grid: two columns on a wide screen."""
        parts = []
        for is_plot, group in groupby(self._fragments, key=lambda fragment: fragment.is_plot):
            joined = "\n".join(fragment.html for fragment in group)
            parts.append(f'<div class="plots">{joined}</div>' if is_plot else joined)
        return "\n".join(parts)

    def _scripts(self) -> str:
        if not self._figures:
            return ""
        from plotly.offline import get_plotlyjs

        data = json.dumps(self._figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return (
            "<noscript><p>The plots need JavaScript, which is switched off.</p></noscript>\n"
            f"<script>{get_plotlyjs()}</script>\n"
            f'<script type="application/json" id="figures">{data}</script>\n<script>{DRAW_SCRIPT}</script>\n'
        )


def _inks(groups: Sequence[int | None]) -> list[tuple[int, int]]:
    """Colour and dash numbers: colours by group or position, dashes by how often the group came before."""
    inks = []
    for i, group in enumerate(groups):
        colour = i if group is None else group
        inks.append((colour, 0 if group is None else list(groups[:i]).count(group)))
    return inks


def _line_traces(ink: tuple[int, int], series: Series, log_y: bool) -> list[dict[str, Any]]:
    y = _values(series.y)
    x = list(range(len(y))) if series.x is None else _values(series.x)
    _same_length(series.name, x=x, y=y)
    mode = "lines" if len(y) > 30 else "lines+markers"
    line = {"type": "scatter", "mode": mode, "name": series.name, "x": x, "y": y, "ink": ink}
    if series.low is None or series.high is None:
        return [line]
    low, high = _values(series.low), _values(series.high)
    _same_length(series.name, y=y, low=low, high=high)
    if log_y:
        low = lift_to_positive(low, y)
    band = {"type": "scatter", "mode": "lines", "name": series.name, "x": x, "ink": ink, "band": True}
    return [{**band, "y": low}, {**band, "y": high, "fill": "tonexty"}, line]


def _range_of_constant(traces: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """A constant is shown above zero, on an axis of its own size; left alone, it would seem to be zero."""
    values = {value for trace in traces for value in trace["y"] if value is not None}
    if len(values) != 1 or not (value := float(values.pop())) > 0:
        return None
    return 0.0, 2 * value


def lift_to_positive(low: list[Any], y: list[Any]) -> list[Any]:
    """A logarithmic axis has no place for bounds ≤ 0; they are drawn at the least positive value shown."""
    floor = min((value for value in [*low, *y] if value is not None and value > 0), default=None)
    return [value if value is None or value > 0 else floor for value in low]


def _bar_trace(ink: tuple[int, int], series: Series, labels: list[str]) -> dict[str, Any]:
    y = _values(series.y)
    _same_length(series.name, labels=labels, y=y)
    trace: dict[str, Any] = {"type": "bar", "name": series.name, "x": labels, "y": y, "ink": ink}
    if series.low is not None and series.high is not None:
        low, high = _values(series.low), _values(series.high)
        _same_length(series.name, y=y, low=low, high=high)
        above = [None if v is None or h is None else h - v for v, h in zip(y, high, strict=True)]
        below = [None if v is None or l is None else v - l for v, l in zip(y, low, strict=True)]  # noqa: E741
        trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return trace


def _axis(label: str, is_log: bool) -> dict[str, Any]:
    return {"title": label, "type": "log"} if is_log else {"title": label}


def _values(values: Iterable[Any]) -> list[Any]:
    """Plain JSON values with seven digits, which is more than a plot can show; None where not finite."""
    plain = values.tolist() if hasattr(values, "tolist") else list(values)
    return [_value(value) for value in plain]


def _value(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else str(value)


def _same_length(name: str, **columns: list[Any]) -> None:
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{column} has {length}" for column, length in lengths.items())
        raise OptionError(f"series {name!r} needs values of one length; {found}")


def _cell(value: Any) -> str:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape(str(value))}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f'<td class="number">{shown}</td>'
