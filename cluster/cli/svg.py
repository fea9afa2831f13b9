"""Drawings as SVG: no plotting library is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree


@dataclass(frozen=True)
class Point:
    """In pixels from the upper left corner."""

    x: float
    y: float


class Drawing:
    """Shapes on a white ground, in the order in which they are drawn."""

    def __init__(self, width: int, height: int) -> None:
        """In pixels."""
        self._root = ElementTree.Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            attrib={"font-family": "sans-serif", "font-size": "13"},
        )
        ElementTree.SubElement(self._root, "rect", width="100%", height="100%", fill="white")

    def text(
        self, at: Point, text: str, anchor: Literal["start", "middle", "end"] = "start"
    ) -> None:
        """Writes one line; `anchor` says which of its ends is at the point."""
        attrib: dict[str, str] = {} if anchor == "start" else {"text-anchor": anchor}
        element = ElementTree.SubElement(
            self._root, "text", x=f"{at.x:.1f}", y=f"{at.y:.1f}", attrib=attrib
        )
        element.text = text

    def bar(self, corner: Point, width: float, height: float, colour: str) -> None:
        """Fills a rectangle; `corner` is its upper left one."""
        ElementTree.SubElement(
            self._root,
            "rect",
            x=f"{corner.x:.1f}",
            y=f"{corner.y:.1f}",
            width=f"{width:.1f}",
            height=f"{height:.1f}",
            fill=colour,
        )

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0) -> None:
        """Joins the points by straight lines."""
        ElementTree.SubElement(
            self._root,
            "polyline",
            points=" ".join(f"{point.x:.1f},{point.y:.1f}" for point in points),
            fill="none",
            stroke=colour,
            attrib={"stroke-width": f"{width:g}"},
        )

    def markup(self) -> str:
        """The file's text."""
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"
