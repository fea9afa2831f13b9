"""Chart of `benchmarks.async_simulation`: speed of each mode over synchronous drafting."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from benchmarks import svg
from benchmarks.async_results import CaseResult

_PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN = 230, 150, 46  # pixels
_LOW, _HIGH = 0.5, 2.5
_COLOURS = {"none": "#999999", "continuing": "#c06030", "outcomes": "#4878a8", "auto": "#202020"}


def chart(results: Sequence[CaseResult]) -> str:
    """Return an SVG with a panel for each acceptance and number of streams; ratios to the right."""
    streams = sorted({each.case.num_streams for each in results})
    acceptances = sorted({each.case.acceptance for each in results})
    width = _MARGIN + len(acceptances) * (_PANEL_WIDTH + _MARGIN)
    height = _MARGIN + len(streams) * (_PANEL_HEIGHT + _MARGIN)
    root = svg.drawing(width, height, font_size=11)
    for index, (mode, colour) in enumerate(_COLOURS.items()):
        svg.text(root, _MARGIN + 130 * index, 16, f"— {mode}", colour)
    for row, count in enumerate(streams):
        for column, acceptance in enumerate(acceptances):
            own = [
                each
                for each in results
                if (each.case.num_streams, each.case.acceptance) == (count, acceptance)
            ]
            left = _MARGIN + column * (_PANEL_WIDTH + _MARGIN)
            top = _MARGIN + row * (_PANEL_HEIGHT + _MARGIN)
            title = f"acceptance {acceptance:g}, {count} streams"
            _panel(root, left, top, title, sorted(own, key=lambda each: each.case.ratio))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _panel(
    root: ElementTree.Element, left: int, top: int, title: str, results: Sequence[CaseResult]
) -> None:
    svg.text(root, left, top - 6, title)
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        y = _y(top, value)
        line = {"x1": left, "x2": left + _PANEL_WIDTH, "y1": y, "y2": y}
        svg.element(root, "line", **line, stroke="#dddddd" if value != 1 else "#888888")
        svg.text(root, left - 24, y + 4, f"{value:g}")
    places = [left + 15 + index * 40 for index in range(len(results))]
    for x, each in zip(places, results, strict=True):
        svg.text(root, x - 8, top + _PANEL_HEIGHT + 14, f"{each.case.ratio:g}")
    for mode, colour in _COLOURS.items():
        points = " ".join(
            f"{x},{_y(top, each.over_synchronous(mode)):.1f}"
            for x, each in zip(places, results, strict=True)
        )
        svg.element(root, "polyline", points=points, fill="none", stroke=colour)


def _y(top: int, value: float) -> float:
    share = (min(_HIGH, max(_LOW, value)) - _LOW) / (_HIGH - _LOW)
    return top + _PANEL_HEIGHT * (1 - share)
