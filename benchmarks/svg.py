"""Parts of charts as SVG. Sizes are in pixels."""

from __future__ import annotations

from xml.etree import ElementTree


def drawing(width: int, height: int, font_size: int) -> ElementTree.Element:
    """Return an empty drawing."""
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}"}
    font = {"font-family": "sans-serif", "font-size": str(font_size)}
    root = ElementTree.Element("svg", attributes | font)
    element(root, "rect", width="100%", height="100%", fill="white")
    return root


def element(root: ElementTree.Element, tag: str, **attributes: object) -> ElementTree.Element:
    """Add an element; underscores in the names of attributes stand for dashes."""
    named = {name.replace("_", "-"): str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(root, tag, named)


def text(root: ElementTree.Element, x: float, y: float, words: str, colour: str = "black") -> None:
    """Add a text that begins at a place."""
    element(root, "text", x=f"{x:g}", y=f"{y:.1f}", fill=colour).text = words
