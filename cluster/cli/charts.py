"""Line and bar charts, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.cli.svg import Drawing, Point

_WIDTH, _HEIGHT = 760, 340  # pixels, of one chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 48, 44
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_COLOURS = (
    *("#4878a8", "#c8553d", "#588157", "#8d6a9f", "#e0a030"),
    *("#4f4f4f", "#2a9d8f", "#b56576", "#9fc5e8", "#a07040"),
)
_GREY = "#d0d0d0"
_BAR, _GAP = 16, 12


@dataclass(frozen=True)
class LineChart:
    """Lines over a logarithmic x axis. series: by name, the y value of each `x`; NaN is skipped."""

    title: str
    x_label: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class BarChart:
    """Groups of bars. groups: by group name, the value of each bar by its name."""

    title: str
    groups: Mapping[str, Mapping[str, float]]


def line_charts(charts: Sequence[LineChart]) -> str:
    """Draw the charts below each other."""
    drawing = Drawing(_WIDTH, _HEIGHT * len(charts))
    for index, chart in enumerate(charts):
        _draw_lines(drawing, chart, _HEIGHT * index)
    return drawing.markup()


def bar_charts(charts: Sequence[BarChart]) -> str:
    """Draw the charts below each other."""
    right = max(_LEFT + _group_width(chart) * len(chart.groups) for chart in charts)
    drawing = Drawing(right + _RIGHT, _HEIGHT * len(charts))
    for index, chart in enumerate(charts):
        _draw_bars(drawing, chart, _HEIGHT * index, right)
    return drawing.markup()


def nice_ceiling(value: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def _draw_bars(drawing: Drawing, chart: BarChart, top: int, right: int) -> None:
    """Draw the groups from left to right, with a legend beside them."""
    drawing.text(Point(12, top + 26), chart.title)
    ceiling = nice_ceiling(max(max(group.values()) for group in chart.groups.values()))
    _draw_grid(drawing, top, right, ceiling)
    colours, width = _colours(_bar_names(chart)), _group_width(chart)
    for index, (label, group) in enumerate(chart.groups.items()):
        left = _LEFT + width * index
        for column, (name, colour) in enumerate(colours.items()):
            height = _PLOT_HEIGHT * group.get(name, 0.0) / ceiling
            corner = Point(left + _GAP + _BAR * column, top + _TOP + _PLOT_HEIGHT - height)
            drawing.bar(corner, _BAR - 2, height, colour)
        drawing.text(Point(left + width / 2, top + _HEIGHT - 22), label, "middle")
    _draw_legend(drawing, top, right + 12, colours)


def _bar_names(chart: BarChart) -> list[str]:
    return list(dict.fromkeys(name for group in chart.groups.values() for name in group))


def _group_width(chart: BarChart) -> int:
    return _BAR * len(_bar_names(chart)) + 2 * _GAP


def _draw_lines(drawing: Drawing, chart: LineChart, top: int) -> None:
    drawing.text(Point(12, top + 26), chart.title)
    values = [y for line in chart.series.values() for y in line if not math.isnan(y)]
    ceiling = nice_ceiling(max(values, default=0.0))
    _draw_grid(drawing, top, _LEFT + _PLOT_WIDTH, ceiling)
    x_pixels = [_LEFT + _PLOT_WIDTH * position for position in _log_positions(chart.x)]
    for x, value in zip(x_pixels, chart.x, strict=True):
        drawing.text(Point(x, top + _HEIGHT - 26), f"{value:g}", "middle")
    drawing.text(Point(_LEFT + _PLOT_WIDTH / 2, top + _HEIGHT - 8), chart.x_label, "middle")
    colours = _colours(list(chart.series))
    for name, line in chart.series.items():
        points = [
            Point(x, top + _TOP + _PLOT_HEIGHT * (1 - y / ceiling))
            for x, y in zip(x_pixels, line, strict=True)
            if not math.isnan(y)
        ]
        drawing.line(points, colours[name], 2)
    _draw_legend(drawing, top, _LEFT + _PLOT_WIDTH + 20, colours)


def _log_positions(x: Sequence[float]) -> list[float]:
    """Return the position of each value between the first and the last on a log scale, 0 to 1."""
    low, high = math.log(x[0]), math.log(x[-1])
    return [(math.log(value) - low) / ((high - low) or 1.0) for value in x]


def _draw_grid(drawing: Drawing, top: int, right: float, ceiling: float) -> None:
    for quarter in range(5):
        y = top + _TOP + _PLOT_HEIGHT * (1 - quarter / 4)
        drawing.line([Point(_LEFT, y), Point(right, y)], _GREY)
        drawing.text(Point(_LEFT - 8, y + 4), f"{ceiling * quarter / 4:g}", "end")


def _draw_legend(drawing: Drawing, top: int, left: float, colours: Mapping[str, str]) -> None:
    for index, (name, colour) in enumerate(colours.items()):
        y = top + _TOP + 20 * index
        drawing.bar(Point(left, y), 12, 12, colour)
        drawing.text(Point(left + 18, y + 11), name)


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
