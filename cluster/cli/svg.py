"""Writes SVG drawings without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree


@dataclass(frozen=True)
class Point:
    """Position in pixels from the upper left corner."""

    x: float
    y: float


class Drawing:
    """Shapes on a white background, in drawing order; all sizes are in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._root = ElementTree.Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            attrib={"font-family": "sans-serif", "font-size": "13"},
        )
        self._add("rect", {"width": "100%", "height": "100%", "fill": "white"})

    def text(
        self, at: Point, text: str, anchor: Literal["start", "middle", "end"] = "start"
    ) -> None:
        """Write one line of text; `anchor` is the part of it at the point."""
        anchors = {} if anchor == "start" else {"text-anchor": anchor}
        self._add("text", {**anchors, "x": at.x, "y": at.y}).text = text

    def bar(self, corner: Point, width: float, height: float, colour: str) -> None:
        """Fill a rectangle; `corner` is the upper left one."""
        position = {"x": corner.x, "y": corner.y}
        self._add("rect", {**position, "width": width, "height": height, "fill": colour})

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0) -> None:
        """Connect the points by straight lines."""
        joined = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in points)
        stroke = {"fill": "none", "stroke": colour, "stroke-width": f"{width:g}"}
        self._add("polyline", {"points": joined, **stroke})

    def markup(self) -> str:
        """Return the SVG text."""
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, shape: str, attributes: Mapping[str, str | float]) -> ElementTree.Element:
        texts = {
            name: value if isinstance(value, str) else f"{value:.1f}"
            for name, value in attributes.items()
        }
        return ElementTree.SubElement(self._root, shape, texts)
